"""DeBERTa, v2 and v3 (He et al. 2020, arXiv:2006.03654; 2021, arXiv:2111.09543): BERT's encoder with disentangled
attention, whose logits add products with keys and queries of distances.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.encoder import C2P, P2C, Disentangled, EncoderConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.pooler import Classifier
from jaxengine.models.families.bert import BASE, NAMES, NORM_SUFFIXES
from jaxengine.models.layers.attention.attention import Attention
from jaxengine.models.layers.attention.disentangled import (
    DisentangledAttention,
    DistanceEmbeddings,
    HeadwiseAttention,
    HeadwiseDisentangledAttention,
)
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.classify import DenseLabelScores
from jaxengine.models.layers.encoder import HIDDEN_ACT, ConvolvedLayer, EncoderNames, NamedEncoder, encoder_fields
from jaxengine.models.layers.states.short_conv import taps_of_layers
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames

_MAX_KERNEL = 31
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

    make_layer_inputs = taps_of_layers
    names: ClassVar[EncoderNames] = NAMES._replace(
        qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")
    )
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.deberta.", "model."),),
        suffixes=NORM_SUFFIXES,
        unused=("model.mask_predictions.", "model.lm_predictions."),
        unused_ends=(".embeddings.position_ids",),
        flattened=(".encoder.conv.conv.weight",),
        heads=(
            "model.pooler.",
            "model.cls.",
            "model.classifier.",
            "model.embeddings.position_embeddings.",
            "model.encoder.LayerNorm.",
        ),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_XLARGE, layer_norm_eps=1e-7, max_position_embeddings=512)
        fields.require(embedding_size=fields.integer("hidden_size"), pooler_hidden_size=fields.integer("hidden_size"))
        kinds, longest = _kinds(fields), fields.integer("max_position_embeddings")
        encoder = EncoderConfig(
            read_activation(fields),
            num_token_types=fields.integer("type_vocab_size", 0, minimum=0),
            num_positions=longest if fields.boolean("position_biased_input", True) else 0,
            head_activation=read_activation(fields, "pooler_hidden_act"),
            disentangled=cls.read_ranges(fields, kinds) if fields.boolean("relative_attention", False) else None,
            convolution=cls.read_convolution(fields),
        )
        shared = encoder_fields(fields, encoder, activation=HIDDEN_ACT, eps="layer_norm_eps")
        parts = 1 + len(kinds)  # whose sum is a logit
        layers = (replace(each, scale=(parts * each.head_dim) ** -0.5) for each in shared["attention"])
        taps = 0 if encoder.convolution is None else encoder.convolution[0]
        return shared | {"attention": tuple(layers), "layer_input_size": taps}

    @classmethod
    def read_ranges(cls, fields: ConfigFields, kinds: tuple[str, ...]) -> Disentangled:
        """Return the attention's parts by distance, of these kinds, from `position_buckets` (default: -1; below 1 a
        range for each distance), `max_relative_positions`, `norm_rel_ebd` and `share_att_key`. Raises ModelConfigError
        for wrong fields, and for `position_buckets` above 0 that are not from 4 to 4096 with half of them below
        max_relative_positions - 1.
        """
        farthest, buckets = _farthest(fields), fields.value("position_buckets", -1)
        if type(buckets) is not int:
            raise fields.fail("position_buckets", "an integer")
        if buckets > 0 and not 4 <= buckets <= min(1 << 12, 2 * farthest - 3):
            raise fields.fail("position_buckets", "from 4 to 4096, half of it below max_relative_positions - 1")
        normed = "layer_norm" in [part.strip() for part in fields.text("norm_rel_ebd", "none").lower().split("|")]
        return Disentangled(max(buckets, 0), farthest, kinds, normed, fields.boolean("share_att_key", False))

    @classmethod
    def read_convolution(cls, fields: ConfigFields) -> tuple[int, str] | None:
        """Return EncoderConfig.convolution, (`conv_kernel_size`, `conv_act`); None if that size is 0 or absent. Raises
        ModelConfigError for wrong fields, and for an even kernel or more than one group.
        """
        kernel = fields.integer("conv_kernel_size", 0, minimum=0)
        if not kernel:
            return None
        if not kernel % 2 or kernel > _MAX_KERNEL:
            raise fields.fail("conv_kernel_size", f"0 or an odd number up to {_MAX_KERNEL}")
        fields.require(conv_groups=1)
        return kernel, read_activation(fields, "conv_act", "tanh")

    def make_attention(self, layer: int, build: Build, **names: Any) -> nnx.Module:
        config = self.config
        assert config.encoder is not None
        ranges = config.encoder.disentangled
        if ranges is None:
            return self.make_plain(layer, build=build, **names)
        if layer == self.stage.layers.start:
            source, eps = "model.encoder", config.rms_norm_eps
            self._distances = DistanceEmbeddings(ranges, config.hidden_size, eps, source=source, build=build)
        names |= {"distances": self._distances, "ranges": ranges, "build": build}
        return self.make_disentangled(layer, longest=config.max_position_embeddings, **names)

    def make_plain(self, layer: int, **names: Any) -> Attention:
        """Return a new Attention, without parts by distance, for layer index `layer`. names: its further arguments."""
        return Attention(self.config.attention[layer], self.config.hidden_size, **names)

    def make_disentangled(self, layer: int, **names: Any) -> DisentangledAttention:
        """Return a new DisentangledAttention for layer index `layer`, with its own projections of distances. names:
        further arguments of DisentangledAttention.
        """
        source = f"{self.names.layer}.attention.self"
        own = (f"{source}.pos_key_proj", True), (f"{source}.pos_query_proj", True)
        return DisentangledAttention(self.config.attention[layer], self.config.hidden_size, own=own, **names)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        made, encoder = super().make_layer(layer, build), self.config.encoder
        assert encoder is not None
        if layer or encoder.convolution is None:
            return made
        kernel, activation = encoder.convolution
        size, eps, source = self.config.hidden_size, self.config.rms_norm_eps, "model.encoder.conv"
        return ConvolvedLayer(made, kernel, activation, size, eps, source=source, build=build)

    def make_labels(self, classifier: Classifier, build: Build) -> DenseLabelScores:
        """Return the module that scores labels, with a dense layer and the activation `pooler_hidden_act` before the
        scores.
        """
        assert self.config.encoder is not None
        activation = ACTIVATIONS[self.config.encoder.head_activation]
        sources = self.names.dense, self.names.labels
        return DenseLabelScores(self.config.hidden_size, classifier, sources, activation=activation, build=build)


class DebertaModel(DebertaV2Model):
    """The first DeBERTa, with a range for each distance, projections of distances of their own, and queries, keys and
    values joined by heads.
    """

    names: ClassVar[EncoderNames] = NAMES._replace(qkv=("attention.self.in_proj",))
    checkpoint_names: ClassVar[CheckpointNames] = DebertaV2Model.checkpoint_names

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(talking_head=False)
        shared = super().read_hf(fields.with_defaults(**BASE, vocab_size=50265))
        return shared | {"attention": tuple(replace(each, bias=False) for each in shared["attention"])}

    @classmethod
    def read_ranges(cls, fields: ConfigFields, kinds: tuple[str, ...]) -> Disentangled:
        return Disentangled(0, _farthest(fields), kinds, normed=False, shared=False)

    @classmethod
    def read_convolution(cls, fields: ConfigFields) -> None:
        return None

    def make_attention(self, layer: int, build: Build, **names: Any) -> nnx.Module:
        attention, source = self.config.attention[layer], f"{self.names.layer}.attention.self.in_proj"
        size = attention.head_dim
        width, runs = attention.num_heads * size, {"run": size, "stride": 3 * size}
        joined = {"tensor_rows": 3 * width, **runs}
        names["qkv"] = [Source(source, width, first=index * size, **joined) for index in range(3)]
        names["biases"] = f"{self.names.layer}.attention.self"
        return super().make_attention(layer, build, **names)

    def make_plain(self, layer: int, **names: Any) -> HeadwiseAttention:
        return HeadwiseAttention(self.config.attention[layer], self.config.hidden_size, **names)

    def make_disentangled(self, layer: int, **names: Any) -> DisentangledAttention:
        own = f"{self.names.layer}.attention.self"
        names["own"] = (f"{own}.pos_proj", False), (f"{own}.pos_q_proj", True)
        return HeadwiseDisentangledAttention(self.config.attention[layer], self.config.hidden_size, **names)


def _kinds(fields: ConfigFields) -> tuple[str, ...]:
    """Return the parts of logits by distance that `pos_att_type` lists, or names with | between them; none if it is
    absent. Raises ModelConfigError for another value.
    """
    kinds = fields.value("pos_att_type", None) or []
    kinds = [part.strip() for part in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or len({*map(str, kinds)}) < len(kinds) or not {*map(str, kinds)} <= {C2P, P2C}:
        raise fields.fail("pos_att_type", f"null, or a list of {C2P} and {P2C}")
    return tuple(kinds)


def _farthest(fields: ConfigFields) -> int:
    """Return `max_relative_positions` or, if that is below 1, `max_position_embeddings`. Raises ModelConfigError unless
    it is an integer of at most 65536.
    """
    farthest = fields.value("max_relative_positions", -1)
    if type(farthest) is not int or farthest > 1 << 16:
        raise fields.fail("max_relative_positions", f"an integer of at most {1 << 16}")
    return farthest if farthest >= 1 else fields.integer("max_position_embeddings")
