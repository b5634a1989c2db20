"""DiffLlama (Ye et al. 2024, arXiv:2410.05258): Llama whose attention is the difference of two softmaxes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM
from jaxengine.models.layers.attention.attention import Attention, StepInputs
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import rms_normalized
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of


class DifferentialAttention(Attention):
    """Attention of N / 2 pairs of heads, head i and head i + N / 2, to K key heads. A pair's output is the first head's
    minus `factor` times the second's, normed and multiplied by 1 - `start`. Both heads attend to the pair's two value
    heads side by side, so that a value is twice as long as a key: `attention.value_size` is 2 * head_dim.

    start: the part of `factor` that is not learned. eps: epsilon of the norm of a pair's output. Each device has as
    many first heads as second ones: their projections are halves of a tensor, each split by itself.
    """

    def __init__(self, attention: LayerAttention, hidden_size: int, *, start: float, eps: float, build: Build):
        source, head_dim, bias = f"{LAYER}.self_attn", attention.head_dim, attention.bias
        super().__init__(attention, hidden_size, eps=eps, source=source, build=build)
        counts = {"q": attention.num_heads, "k": attention.num_kv_heads, "v": attention.num_kv_heads}
        halves = [
            half._replace(group=head_dim)
            for name, count in counts.items()
            for half in parts_of(f"{source}.{name}_proj", *(count // 2 * head_dim,) * 2)
        ]
        self.qkv = Linear(hidden_size, tuple(halves), axes=("embed", "heads"), bias=bias, build=build)
        size, out = attention.num_heads * head_dim, Source(f"{source}.o_proj", hidden_size)
        self.out = Linear(size, (out,), axes=("heads", "embed"), bias=attention.output_bias, build=build)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            declare((head_dim,), build.dtype, ParamDecl((None,), (Source(f"{source}.{name}", head_dim),), init_std=0.1))
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
        )
        self.start, self.eps = start, eps

    @property
    def factor(self) -> jax.Array:
        """Factor f32[] of the second heads: exp(q1 . k1) - exp(q2 . k2) + start, of the layer's four vectors."""
        q1, k1, q2, k2 = (
            each[...].astype(jnp.float32) for each in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        )
        return jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + self.start

    def _heads(self, joined: jax.Array) -> list[jax.Array]:
        """Split `joined` [T, (N + 2 K) H] into queries [T, N, H], keys [T, K, H], values [T, K, 2 H] and no gates."""
        spec = self.spec
        heads = joined.reshape(joined.shape[0], -1, spec.head_dim)
        q, k, v = jnp.split(heads, (spec.num_q_heads, spec.num_q_heads + spec.num_kv_heads), axis=1)
        pairs = jnp.concatenate(jnp.split(v, 2, axis=1), axis=-1)
        return [q, k, jnp.concatenate([pairs, pairs], axis=1), q[:, :0]]

    def gated(self, o: jax.Array, gate: jax.Array, x: jax.Array, step: StepInputs) -> jax.Array:
        """Return the outputs [T, N / 2, 2 H] of the pairs of heads, (1 - start) * rms_norm(first - factor * second),
        for those of the heads, o [T, N, 2 H]: the first ones, then the second ones.
        """
        first, second = jnp.split(o.astype(jnp.float32), 2, axis=1)
        return ((1 - self.start) * rms_normalized(first - self.factor * second, self.eps)).astype(o.dtype)


class DiffLlamaForCausalLM(LlamaForCausalLM):
    """Llama with differential attention, whose factor starts at 0.8 - 0.6 exp(-0.3 n) in layer n."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = super().read_hf(fields.with_defaults(rms_norm_eps=1e-5))
        if shared["attention"][0].num_kv_heads % 2:
            raise fields.fail("num_key_value_heads", "an even number")
        each = (replace(layer, value_size=2 * layer.head_dim) for layer in shared["attention"])
        return shared | {"attention": tuple(each)}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, start = self.config, 0.8 - 0.6 * math.exp(-0.3 * layer)
        own = config.attention[layer]
        return DifferentialAttention(own, config.hidden_size, start=start, eps=config.rms_norm_eps, build=build)
