"""ALBERT (Lan et al. 2019, arXiv:1909.11942): BERT's encoder, all of whose layers have the same weights."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.bert import NORM_SUFFIXES, BertModel
from jaxengine.models.families.electra import ProjectedEmbeddings, read_embedding_size
from jaxengine.models.layers.encoder import EncoderNames
from jaxengine.models.params.source import CheckpointNames


class AlbertModel(BertModel):
    """BERT's encoder in which one module serves as all layers, after embeddings that are narrower than hidden
    states.
    """

    names: ClassVar[EncoderNames] = EncoderNames(
        layer="model.encoder.albert_layer_groups.0.albert_layers.0",
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
        fields.require(num_hidden_groups=1, inner_group_num=1)
        defaults = {"hidden_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 64, "intermediate_size": 16384}
        fields = fields.with_defaults(vocab_size=30000, hidden_act="gelu_new", **defaults)
        shape = super().read_hf(fields)
        return shape | {"encoder": shape["encoder"]._replace(embedding_size=read_embedding_size(fields))}

    def make_embedding(self, build: Build) -> ProjectedEmbeddings:
        source = "model.encoder.embedding_hidden_mapping_in"
        return ProjectedEmbeddings(super().make_embedding(build), self.config, source=source, build=build)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        """Return the one module that serves as every layer. It is built, and stored, when the stage's first layer is
        requested.
        """
        if layer == self.stage.layers.start:
            self._shared = super().make_layer(layer, build)
        return self._shared
