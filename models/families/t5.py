"""T5's encoder (Raffel et al. 2020, arXiv:1910.10683), of sentence-T5 and GTR: RMS norms before a layer's parts, and
biases of attention by the distance of two tokens in place of positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.pooler import MEAN
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.config.readers.hf import hf_fields
from jaxengine.models.families.llama import LAYER, LlamaLayer
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.distance_bias import BiasedAttention, distance_table
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.embedding import Embedding
from jaxengine.models.layers.base.mlp import MLP, GatedMLP
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.encoder import HIDDEN_ACT, Encoder
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames

# By the usual name of a field: its name in T5's config.json, and its default.
_FIELDS = {
    "hidden_size": ("d_model", 512),
    "num_attention_heads": ("num_heads", 8),
    "num_hidden_layers": ("num_layers", 6),
    "intermediate_size": ("d_ff", 2048),
    "head_dim": ("d_kv", 64),
    "max_position_embeddings": ("n_positions", 512),
    "vocab_size": ("vocab_size", 32128),
}
_UNSCALED: dict[str, Any] = {"causal": False, "scale": 1.0}  # of products: the weights are scaled
_GATED = "gated-"  # beginning of the names of gated MLPs; the rest is that of the activation
_ATTENTION, _MLP = f"{LAYER}.layer.0.SelfAttention", f"{LAYER}.layer.1.DenseReluDense"


class T5EncoderModel(Encoder):
    """Pre-norm encoder whose attention scores get biases by the distance of two tokens, with plain or gated MLPs.

    Attributes:
      has_own_distances: whether each layer has a table of these biases, instead of one for all.
    """

    gguf_architecture: ClassVar[str | None] = "t5encoder"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        parts=((".DenseReluDense.wi.", ".DenseReluDense.wi_1."),),
        prefixes=(("model.encoder.block.", "model.layers."), ("model.encoder.final_layer_norm.", "model.norm.")),
        heads=("model.decoder.", "model.encoder.embed_tokens.", "lm_head."),
    )
    has_own_distances: ClassVar[bool] = False

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        named = {name: fields.value(own, usual) for name, (own, usual) in _FIELDS.items()}
        fields = ConfigFields({**fields.raw, **named})
        kind = fields.text("feed_forward_proj", "relu")
        activation = "gelu_new" if kind == "gated-gelu" else kind.removeprefix(_GATED)
        if activation not in ACTIVATIONS:
            raise fields.fail("feed_forward_proj", f"{', '.join(ACTIVATIONS)}, each also with {_GATED} before it")
        buckets = fields.integer("relative_attention_num_buckets", 32)
        farthest = fields.integer("relative_attention_max_distance", 128)
        if not 4 <= buckets <= 4 * farthest - 1 or farthest > 1 << 16:
            raise fields.fail(
                "relative_attention_num_buckets", "at least 4, and less than four times relative_attention_max_distance"
            )
        gated = kind.startswith(_GATED)
        encoder = EncoderConfig(activation, 0, num_positions=0, distances=(buckets, farthest), gated=gated)
        options: dict[str, Any] = {"activation": HIDDEN_ACT, **_UNSCALED}
        ropes = [None] * fields.integer("num_hidden_layers")
        return hf_fields(fields, ropes=ropes, eps="layer_norm_epsilon", tied=True, **options) | {"encoder": encoder}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        shared, gated = gguf_fields(gguf, **_UNSCALED), "ffn_gate" in gguf.stored
        name, farthest = "attention.relative_buckets_count", 128  # which llama.cpp fixes
        if not 4 <= (buckets := gguf.fields.integer(name)) < 4 * farthest:
            raise gguf.fields.fail(name, f"from 4 to {4 * farthest - 1}")
        activation = "gelu_new" if gated else "relu"
        encoder = EncoderConfig(activation, 0, num_positions=0, distances=(buckets, farthest), gated=gated)
        return shared | {
            "encoder": encoder,
            "attention": tuple(replace(each, rope=None) for each in shared["attention"]),
            "tie_word_embeddings": True,
        }

    @classmethod
    def usual_pooling(cls, fields: ConfigFields) -> str:
        return MEAN

    def make_embedding(self, build: Build) -> Embedding:
        return Embedding(self.config.vocab_size, self.config.hidden_size, source="model.shared", build=build)

    def embed_batch(self, batch: ForwardBatch) -> jax.Array:
        return self.embed(batch.token_ids)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        """Return a new layer. Without `has_own_distances`, the first layer of this stage also creates the distance
        table, kept in `_distances`, that all its layers share.
        """
        config, size, encoder = self.config, self.config.hidden_size, self.config.encoder
        attention = config.attention[layer]
        assert encoder is not None and encoder.distances is not None
        buckets, farthest = encoder.distances
        table = distance_table(f"{_ATTENTION}.relative_attention_bias", buckets, attention.num_heads)
        if not self.has_own_distances:
            if layer == self.stage.layers.start:
                source = f"{_ATTENTION.format(layer=0)}.relative_attention_bias"
                self._distances = distance_table(source, buckets, attention.num_heads)
            table = self._distances
        width = attention.num_heads * attention.head_dim
        attend = BiasedAttention(
            attention,
            size,
            table=table,
            farthest=farthest,
            eps=config.rms_norm_eps,
            source=LAYER,
            qkv=[Source(f"{_ATTENTION}.{name}", width) for name in "qkv"],
            out=Source(f"{_ATTENTION}.o", size),
            build=build,
        )
        names = "layer.0.layer_norm", "layer.1.layer_norm"
        return LlamaLayer(config, attend, self._make_mlp(build), build, norm_class=RMSNorm, norm_names=names)

    def _make_mlp(self, build: Build) -> nnx.Module:
        """Return a new feed-forward module, which maps ([T, D], Rows) to [T, D]: a plain MLP, or one with a gate."""
        size, ffn, encoder = self.config.hidden_size, self.config.intermediate_size, self.config.encoder
        assert encoder is not None
        options: dict[str, Any] = {"source": _MLP, "activation": ACTIVATIONS[encoder.activation], "build": build}
        if not encoder.gated:
            return MLP(size, ffn, up="wi_1", down="wo", **options)
        gate_up = Source(f"{_MLP}.wi_0", ffn), Source(f"{_MLP}.wi_1", ffn)
        return GatedMLP(size, ffn, gate_up=gate_up, down=Source(f"{_MLP}.wo", size), **options)


class UMT5EncoderModel(T5EncoderModel):
    """Encoder of UMT5 (Chung et al. 2023, arXiv:2304.09151): T5's encoder in which each layer has its own table of
    distance biases.
    """

    has_own_distances: ClassVar[bool] = True
