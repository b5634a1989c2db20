"""JetMoE (Shen et al. 2024, arXiv:2404.07413): Llama with experts in both parts of a layer. Experts of attention share
keys and values.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, LlamaLayer, gated_fields
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs, head_copies
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.layers.experts.projections import ExpertProjections
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.kv.pages import KVPages

_EPS = 1e-6  # of the norms of layers; rms_norm_eps is that of the last norm alone
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_key_value_heads": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class MixtureOfAttention(Attention):
    """Attention in which a router picks k experts for each token. Each has one query for each of the K key heads, so
    that there are K * k heads, and a projection of their outputs.
    """

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        own, size, source = config.attention[layer], config.hidden_size, f"{LAYER}.self_attn"
        super().__init__(own, size, eps=_EPS, source=source, build=build)
        experts, kv_size = config.experts, own.num_kv_heads * own.head_dim
        assert experts is not None
        parts = parts_of(f"{source}.kv_proj", kv_size, kv_size)
        parts = [part._replace(group=own.head_dim, repeat=head_copies(own, build.mesh)) for part in parts]
        self.qkv = Linear(size, parts, axes=("embed", "heads"), build=build)
        counts = experts.num_experts, experts.num_per_token
        source = f"{source}.experts"
        self.out = ExpertProjections(size, kv_size, *counts, group=own.head_dim, source=source, build=build)

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        with jax.named_scope("route"):
            picks = self.out.pick(x, step.rows)
        with jax.named_scope("qkv"):
            q = self._by_key_head(self.out.project(x, picks))  # heads of one key head are neighbours
            keys, values = jnp.split(self.qkv(x, step.rows).reshape(len(q), -1, self.spec.head_dim), 2, axis=1)
        q, keys = self.rotate(q, keys, step)
        o, kv = self.attend(q, (keys, values), kv, pages, step)
        with jax.named_scope("o_proj"):
            o = o.reshape(len(o), -1, self.out.num_picked, o.shape[-1]).swapaxes(1, 2)
            return self.out.combine(o.reshape(*o.shape[:2], -1), picks), kv

    def _by_key_head(self, y: jax.Array) -> jax.Array:
        """Return queries [T, K * k, H], those of a key head side by side, for those of experts, y [T, k, K * H]."""
        dim = self.spec.head_dim
        return y.reshape(*y.shape[:2], -1, dim).swapaxes(1, 2).reshape(len(y), -1, dim)


class BiasedExperts(nnx.Module):
    """Experts, and a bias that is added to each token's sum."""

    def __init__(self, config: ModelConfig, build: Build):
        source = f"{LAYER}.mlp"
        self.experts = MixtureOfExperts(config, source=source, build=build, names=ExpertNames(router="router"))
        size = config.hidden_size
        self.bias = declare((size,), build.dtype, ParamDecl((None,), (Source(f"{source}.bias", size),), init_std=0.02))

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        """Return the experts' output [T, D] for x [T, D] plus the learned bias."""
        return (self.experts(x, rows).astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class JetMoeForCausalLM(LlamaForCausalLM):
    """Llama with experts in attention and in place of the MLP, as many and as many of a token in both."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        suffixes=(
            (".self_attention.experts.router.layer.weight", ".self_attn.experts.router.weight"),
            (".self_attention.experts.input_linear.weight", ".self_attn.experts.up_proj"),
            (".self_attention.experts.output_linear.weight", ".self_attn.experts.down_proj"),
            (".mlp.router.layer.weight", ".mlp.router.weight"),
            (".mlp.input_linear.weight", ".mlp.experts.gate_up_proj"),
            (".mlp.output_linear.weight", ".mlp.experts.down_proj"),
        ),
        parts=((".self_attention.", ".self_attn."), (".router.layer.", ".router.")),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_DEFAULTS)
        experts = ExpertsConfig(
            num_experts=fields.integer("num_local_experts", 8),
            num_per_token=fields.integer("num_experts_per_tok", 2),
            intermediate_size=fields.integer("intermediate_size"),
        )
        head_dim = fields.integer("kv_channels", None) or fields.integer("head_dim", 128)
        heads = fields.integer("num_key_value_heads") * experts.num_per_token  # whatever the file says
        own = {"num_attention_heads": heads, "head_dim": head_dim}
        shared = gated_fields(ConfigFields({**fields.raw, **own}), named="activation_function", tied=True)
        return shared | {"experts": experts}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        parts = MixtureOfAttention(self.config, layer, build), BiasedExperts(self.config, build)
        return LlamaLayer(self.config, *parts, build, norm_class=_layer_norm)


def _layer_norm(size: int, eps: float, *, source: str, build: Build) -> RMSNorm:
    """Return a new RMSNorm of `size` elements with the epsilon of layers, whatever `eps` is."""
    return RMSNorm(size, _EPS, source=source, build=build)
