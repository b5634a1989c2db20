"""Self attention over paged keys and values: project, rotate, write this step's KV, attend.

Owns what one layer does with the batch. How pages are stored and how attention is computed is pallas_kernels' affair.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.model_config import ModelConfig
from models.layers.linear import Linear
from models.layers.norm import RMSNorm
from models.layers.rope import apply_rope
from models.weights.declare import Source
from pallas_kernels.attention.op import AttentionSpec, RaggedBatch, ragged_paged_attention
from pallas_kernels.kv.pages import KVPages
from pallas_kernels.kv.update import kv_cache_update
from sharding.layout import ONE_DEVICE, MeshLayout


class StepInputs(NamedTuple):
    """What every layer with one attention window shares: worked out once per step, outside the layers."""

    cos: jax.Array  # f32[T, H/2]
    sin: jax.Array  # f32[T, H/2]
    ragged: RaggedBatch  # page ids of layer 0
    schedule: Any  # pallas_kernels.attention.op.attention_schedule of this window
    update_schedule: Any  # pallas_kernels.kv.update.kv_update_schedule


def num_kv_heads(config: ModelConfig, mesh: MeshLayout) -> int:
    """kv heads of one device; a head is stored more than once where there are more devices than heads.

    Of a mesh that does not divide the heads this, and attention_spec, say nothing true: the weights' declarations tell.
    """
    return max(1, config.num_kv_heads // mesh.model)


def attention_spec(config: ModelConfig, window: int | None, mesh: MeshLayout = ONE_DEVICE) -> AttentionSpec:
    """What attention is on one device, in layers of this window."""
    return AttentionSpec(
        num_q_heads=max(1, config.num_heads // mesh.model),
        num_kv_heads=num_kv_heads(config, mesh),
        head_dim=config.head_dim,
        v_head_dim=config.head_dim,
        sm_scale=config.head_dim**-0.5,
        window=window,
        soft_cap=None,
    )


def ragged_of_layer(ragged: RaggedBatch, page_offset: jax.Array, page_size: int) -> RaggedBatch:
    """The batch as a layer sees it whose pages start at row `page_offset` of the pool; padding slots stay -1."""
    slots = ragged.slot_mapping
    return ragged._replace(
        page_table=ragged.page_table + page_offset,
        slot_mapping=jnp.where(slots < 0, -1, slots + page_offset * page_size),
    )


class Attention(nnx.Module):
    """Grouped-query attention with rope; bias, per-head q/k norm and sliding window as the configuration says."""

    def __init__(
        self, config: ModelConfig, window: int | None, *, source: str, dtype: Any, mesh: MeshLayout = ONE_DEVICE
    ):
        self.spec = attention_spec(config, window, mesh)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        copies = max(1, mesh.model // config.num_kv_heads)
        heads = partial(Source, group=config.head_dim)
        kv = partial(heads, rows=kv_size, repeat=copies)
        self.qkv = Linear(
            config.hidden_size,
            (heads(f"{source}.q_proj", q_size), kv(f"{source}.k_proj"), kv(f"{source}.v_proj")),
            axes=("embed", "heads"),
            bias=config.attention_bias,
            dtype=dtype,
        )
        self.out = Linear(
            q_size,
            (Source(f"{source}.o_proj", config.hidden_size),),
            axes=("heads", "embed"),
            bias=config.output_bias,
            dtype=dtype,
        )
        norm = partial(RMSNorm, config.head_dim, config.rms_norm_eps, dtype=dtype)
        self.q_norm = norm(source=f"{source}.q_norm") if config.qk_norm else None
        self.k_norm = norm(source=f"{source}.k_norm") if config.qk_norm else None

    def __call__(
        self, x: jax.Array, kv: KVPages, page_offset: jax.Array, step: StepInputs
    ) -> tuple[jax.Array, KVPages]:
        """x[T, D] -> [T, D], and the pool with this step's keys and values of this layer written."""
        spec = self.spec
        with jax.named_scope("qkv"):
            heads = self.qkv(x).reshape(x.shape[0], -1, spec.head_dim)
            q, k, v = jnp.split(heads, (spec.num_q_heads, spec.num_q_heads + spec.num_kv_heads), axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            with jax.named_scope("qk_norm"):
                q, k = self.q_norm(q), self.k_norm(k)
        with jax.named_scope("rope"):
            q, k = apply_rope(q, step.cos, step.sin), apply_rope(k, step.cos, step.sin)
        ragged = ragged_of_layer(step.ragged, page_offset, kv.page_size)
        with jax.named_scope("kv_cache_update"):
            kv = kv_cache_update(kv, k, v, ragged.slot_mapping, schedule=step.update_schedule)
        with jax.named_scope("ragged_paged_attention"):
            o = cast(jax.Array, ragged_paged_attention(q, kv, ragged, spec=spec, schedule=step.schedule))
        with jax.named_scope("o_proj"):
            return self.out(o.reshape(x.shape[0], -1)), kv
