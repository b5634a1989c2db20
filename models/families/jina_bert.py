"""JinaBERT, the encoder of Jina Embeddings v2 (Günther et al. 2023, arXiv:2310.19923): BERT with ALiBi, slopes of
attention by distance, in place of positions, and gated MLPs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import alibi_slopes
from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.pooler import CLS, MEAN
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.config.readers.hf import hf_architecture
from jaxengine.models.families.bert import BASE, NAMES, BertModel
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.attention.distance_bias import SlopedAttention
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import HeadsLayerNorm, LayerNorm
from jaxengine.models.layers.encoder import HIDDEN_ACT, EncoderNames, PostNormLayer, encoder_fields, gguf_encoder_fields
from jaxengine.models.params.declare import Source, parts_of
from jaxengine.pallas_kernels.kv.pages import KVPages

_LAYER = NAMES.layer
_MLPS = {"geglu": "gelu", "reglu": "relu"}
# Part of the name in `auto_map` of the code of checkpoints with norms of queries and keys.
_NORMED = "qk-post-norm"


class JinaBertModel(BertModel):
    """Post-norm encoder with ALiBi and gated MLPs, with a dense layer, tanh and scores of labels if it classifies.

    Checkpoints with norms of queries and keys have other names of weights, gate and up in the opposite order, and an
    additional norm in each layer.
    """

    gguf_architecture: ClassVar[str | None] = "jina-bert-v2"
    names: ClassVar[EncoderNames] = NAMES._replace(up="mlp.gated_layers", down="mlp.wo", mlp_norm="mlp.layernorm")

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(position_embedding_type="alibi", is_decoder=False)
        fields = fields.with_defaults(**BASE, vocab_size=30522, max_position_embeddings=8192, layer_norm_eps=1e-12)
        kind = fields.text("feed_forward_type", "original")
        if kind not in _MLPS:
            raise fields.fail("feed_forward_type", " or ".join(_MLPS))
        types = fields.integer("type_vocab_size", 2)
        encoder = EncoderConfig(_MLPS[kind], types, num_positions=0, head_activation=read_activation(fields))
        shared = encoder_fields(fields, encoder, activation=HIDDEN_ACT, eps="layer_norm_eps")
        normed = any(_NORMED in str(each) for each in (fields.mapping("auto_map") or {}).values())
        changes: dict[str, Any] = {"slopes": alibi_slopes(fields.integer("num_attention_heads")), "qk_norm": normed}
        shared["attention"] = tuple(replace(each, **changes) for each in shared["attention"])
        return shared

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        if "attn_q_norm" in gguf.stored:
            raise ModelConfigError("a GGUF file of a JinaBERT with norms of queries and keys is not read")
        # Files of earlier converters have two matrices in place of a joined one.
        shared = gguf_encoder_fields(gguf, activation="gelu", bias=True, gated="ffn_gate" in gguf.stored)
        slopes = alibi_slopes(shared["attention"][0].num_heads)
        return shared | {"attention": tuple(replace(each, slopes=slopes) for each in shared["attention"])}

    @classmethod
    def usual_pooling(cls, fields: ConfigFields) -> str:
        """Return CLS for a model that classifies sequences, MEAN for others. Raises ModelConfigError unless
        `architectures` is a list of one class name.
        """
        return CLS if hf_architecture(fields).endswith("ForSequenceClassification") else MEAN

    def make_attention(self, layer: int, build: Build, **names: Any) -> nnx.Module:
        config, own = self.config, self.config.attention[layer]
        if own.qk_norm:
            names["qk_norms"] = [
                HeadsLayerNorm(own.num_heads, own.head_dim, config.rms_norm_eps, source=source, build=build)
                for source in (f"{_LAYER}.attention.self.layer_norm_{part}" for part in "qk")
            ]
        return SlopedAttention(own, config.hidden_size, build=build, **names)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        made = super().make_layer(layer, build)
        if not self.config.attention[layer].qk_norm:
            return made
        assert isinstance(made, PostNormLayer)
        first, last = (
            LayerNorm(self.config.hidden_size, self.config.rms_norm_eps, source=f"{_LAYER}.{name}", build=build)
            for name in ("layer_norm_1", "layer_norm_2")
        )
        return PostNormLayer(_NormedAttention(made.attention, made.attention_norm), first, made.mlp, last)

    def make_mlp(self, build: Build) -> nnx.Module:
        size, ffn, normed = self.config.hidden_size, self.config.intermediate_size, self.config.attention[0].qk_norm
        up_down = ("mlp.up_gated_layer", "mlp.down_layer") if normed else (self.names.up, self.names.down)
        first, second = parts_of(f"{_LAYER}.{up_down[0]}", ffn, ffn)
        options: dict[str, Any] = {"down": Source(f"{_LAYER}.{up_down[1]}", size), "down_bias": True, "build": build}
        gate_up = (second, first) if normed else (first, second)
        if self.config.encoder is not None and self.config.encoder.gated:
            gate_up = Source(f"{_LAYER}.mlp.gated_layers_w", ffn), Source(f"{_LAYER}.{self.names.up}", ffn)
        return GatedMLP(size, ffn, source=_LAYER, gate_up=gate_up, activation=self.activation, **options)

    @property
    def masked_activation(self) -> Callable[[jax.Array], jax.Array]:
        """Activation before the scores of the masked language model: the configuration's head_activation."""
        assert self.config.encoder is not None
        return ACTIVATIONS[self.config.encoder.head_activation]


class _NormedAttention(nnx.Module):
    """Attention followed by a residual and a norm: norm(x + attention(x))."""

    def __init__(self, attention: nnx.Module, norm: nnx.Module):
        self.attention, self.norm = attention, norm

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        attended, kv = self.attention(x, kv, pages, step)
        return self.norm(x + attended), kv
