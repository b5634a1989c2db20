"""DeBERTa-v3 and v2 (He et al. 2020, arXiv:2006.03654; 2021, arXiv:2111.09543): BERT's encoder with disentangled
attention, whose logits add products with keys and queries of distances.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.pooler import Classifier
from jaxengine.models.families.bert import NAMES, NORM_SUFFIXES
from jaxengine.models.layers.attention.disentangled import DisentangledAttention, DistanceEmbeddings
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.classify import DenseLabelScores
from jaxengine.models.layers.encoder import HIDDEN_ACT, EncoderNames, NamedEncoder, encoder_fields
from jaxengine.models.params.source import CheckpointNames

_PARTS = 3  # number of products whose sum is a logit
# transformers' sizes of a model whose config.json has none.
_XLARGE = {
    "vocab_size": 128100,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "intermediate_size": 6144,
}


class DebertaV2Model(NamedEncoder):
    """BERT's encoder with DisentangledAttention, whose embeddings of distances all layers share."""

    names: ClassVar[EncoderNames] = NAMES._replace(
        qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")
    )
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.deberta.", "model."),),
        suffixes=NORM_SUFFIXES,
        unused=("model.mask_predictions.", "model.lm_predictions."),
        unused_ends=(".embeddings.position_ids",),
        heads=("model.pooler.", "model.cls.", "model.classifier.", "model.embeddings.position_embeddings."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_XLARGE, layer_norm_eps=1e-7, max_position_embeddings=512, legacy=True)
        fields.require(share_att_key=True, norm_rel_ebd="layer_norm", conv_kernel_size=0, legacy=True)
        fields.require(embedding_size=fields.integer("hidden_size"), pooler_hidden_size=fields.integer("hidden_size"))
        for name, needed in (("relative_attention", True), ("share_att_key", True), ("norm_rel_ebd", "layer_norm")):
            if fields.value(name, None) != needed:
                raise fields.fail(name, repr(needed))
        kinds = fields.value("pos_att_type")
        kinds = kinds.split("|") if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or sorted(map(str, kinds)) != ["c2p", "p2c"]:
            raise fields.fail("pos_att_type", "c2p and p2c")
        longest, farthest = fields.integer("max_position_embeddings"), fields.value("max_relative_positions", -1)
        if farthest == -1:
            farthest = longest
        buckets = fields.integer("position_buckets", minimum=4)
        if type(farthest) is not int or not buckets // 2 < farthest - 1 <= 1 << 16 or buckets > 1 << 12:
            raise fields.fail("position_buckets", "from 4 to 4096, half of it below max_relative_positions - 1")
        encoder = EncoderConfig(
            read_activation(fields),
            num_token_types=fields.integer("type_vocab_size", 0, minimum=0),
            num_positions=longest if fields.boolean("position_biased_input", True) else 0,
            head_activation=read_activation(fields, "pooler_hidden_act"),
            distances=(buckets, farthest),
        )
        shared = encoder_fields(fields, encoder, activation=HIDDEN_ACT, eps="layer_norm_eps")
        layers = (replace(each, scale=(_PARTS * each.head_dim) ** -0.5) for each in shared["attention"])
        return shared | {"attention": tuple(layers)}

    def make_attention(self, layer: int, build: Build, **names: Any) -> nnx.Module:
        config = self.config
        assert config.encoder is not None and config.encoder.distances is not None
        buckets, farthest = config.encoder.distances
        if layer == self.stage.layers.start:
            source, eps = "model.encoder", config.rms_norm_eps
            self._distances = DistanceEmbeddings(buckets, config.hidden_size, eps, source=source, build=build)
        names |= {"distances": self._distances, "buckets": buckets, "farthest": farthest, "build": build}
        names["longest"] = config.max_position_embeddings
        return DisentangledAttention(config.attention[layer], config.hidden_size, **names)

    def make_labels(self, classifier: Classifier, build: Build) -> DenseLabelScores:
        """Return the module that scores labels, with a dense layer and the activation `pooler_hidden_act` before the
        scores.
        """
        assert self.config.encoder is not None
        activation = ACTIVATIONS[self.config.encoder.head_activation]
        sources = self.names.dense, self.names.labels
        return DenseLabelScores(self.config.hidden_size, classifier, sources, activation=activation, build=build)
