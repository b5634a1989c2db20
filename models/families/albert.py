"""ALBERT (Lan et al. 2019, arXiv:1909.11942): BERT's encoder, whose layers share the weights of a few."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_LAYERS, ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.families.bert import NORM_SUFFIXES, BertModel
from jaxengine.models.families.electra import ProjectedEmbeddings, read_embedding_size
from jaxengine.models.layers.encoder import EncoderNames
from jaxengine.models.params.source import CheckpointNames


class AlbertModel(BertModel):
    """BERT's encoder in which one module serves as several layers, usually all, after embeddings that are narrower than
    hidden states.
    """

    names: ClassVar[EncoderNames] = EncoderNames(
        layer="model.encoder.albert_layer_groups.{group}.albert_layers.{inner}",
        qkv=("attention.query", "attention.key", "attention.value"),
        out="attention.dense",
        attention_norm="attention.LayerNorm",
        up="ffn",
        down="ffn_output",
        mlp_norm="full_layer_layer_norm",
        dense="model.pooler",
        labels="model.classifier",
        masked=("model.predictions.dense", "model.predictions.LayerNorm", "model.predictions.bias"),
    )
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.albert.", "model."),),
        suffixes=NORM_SUFFIXES,
        heads=("model.pooler.", "model.predictions.", "model.sop_classifier.", "model.classifier."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        defaults = {"hidden_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 64, "intermediate_size": 16384}
        fields = fields.with_defaults(vocab_size=30000, hidden_act="gelu_new", **defaults)
        groups, inner = fields.integer("num_hidden_groups", 1), fields.integer("inner_group_num", 1)
        runs = fields.integer("num_hidden_layers")
        if groups > runs:
            raise fields.fail("num_hidden_groups", f"at most num_hidden_layers = {runs}")
        if inner > MAX_LAYERS // runs:
            raise fields.fail("inner_group_num", f"at most {MAX_LAYERS // runs}, with num_hidden_layers = {runs}")
        shape = super().read_hf(ConfigFields({**fields.raw, "num_hidden_layers": runs * inner}))
        size = read_embedding_size(fields)
        return shape | {"encoder": shape["encoder"]._replace(embedding_size=size, layer_groups=(groups, inner))}

    def __init__(self, config: ModelConfig, build: Build):
        super().__init__(config, build)
        first: dict[str, nnx.Module] = {}
        for index, layer in enumerate(self.stage.layers):
            self.layers[index] = first.setdefault(self.layer_source(layer), self.layers[index])

    def layer_source(self, layer: int) -> str:
        assert self.config.encoder is not None
        groups, inner = self.config.encoder.layer_groups
        runs = self.config.num_layers // inner
        group = int(layer // inner / (runs / groups))  # as transformers rounds it
        return self.names.layer.format(group=group, inner=layer % inner)

    def make_embedding(self, build: Build) -> ProjectedEmbeddings:
        source = "model.encoder.embedding_hidden_mapping_in"
        return ProjectedEmbeddings(super().make_embedding(build), self.config, source=source, build=build)
