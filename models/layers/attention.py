"""Self attention over paged keys and values: project, rotate, write this step's KV, attend.

Owns what one layer does with the batch. How pages are stored and how attention is computed is pallas_kernels' affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

from models.build import Build
from models.config.attention import LayerAttention
from models.layers.linear import Linear
from models.layers.norm import RMSNorm
from models.layers.rope import apply_rope
from models.layers.rows import Rows
from models.weights.declare import Source
from pallas_kernels.attention.op import AttentionSpec, RaggedBatch, ragged_paged_attention
from pallas_kernels.kv.pages import KVPages
from pallas_kernels.kv.update import kv_cache_update
from sharding.layout import ONE_DEVICE, MeshLayout


class StepInputs(NamedTuple):
    """What layers with equal LayerAttention share: worked out once per step, outside the layers.

    Attributes:
      rows: what the step's tokens are.
      rope: cos and sin, each f32[T, rotary_dim / 2].
      schedule: of pallas_kernels.attention.op.attention_schedule.
    """

    rows: Rows
    rope: tuple[jax.Array, jax.Array]
    schedule: Any


class LayerPages(NamedTuple):
    """Where one layer's keys and values are.

    Attributes:
      ragged: the batch with the page table of the layer's cache group; page ids and slots are counted from the layer's
        first page, padding slots are -1.
      first_page: i32[], the pool's row of that page.
      update_schedule: of pallas_kernels.kv.update.kv_update_schedule.
    """

    ragged: RaggedBatch
    first_page: jax.Array
    update_schedule: Any

    def in_pool(self, page_size: int) -> RaggedBatch:
        """The batch with page ids and slots of the whole pool."""
        slots = self.ragged.slot_mapping
        return self.ragged._replace(
            page_table=self.ragged.page_table + self.first_page,
            slot_mapping=jnp.where(slots < 0, -1, slots + self.first_page * page_size),
        )


def num_kv_heads(attention: LayerAttention, mesh: MeshLayout) -> int:
    """kv heads of one device; a head is stored more than once where there are more devices than heads.

    Of a mesh that does not divide the heads this, and attention_spec, say nothing true: the weights' declarations tell.
    """
    return max(1, attention.num_kv_heads // mesh.model)


def attention_spec(attention: LayerAttention, mesh: MeshLayout = ONE_DEVICE) -> AttentionSpec:
    """What a layer's attention is on one device."""
    return AttentionSpec(
        num_q_heads=max(1, attention.num_heads // mesh.model),
        num_kv_heads=num_kv_heads(attention, mesh),
        head_dim=attention.head_dim,
        v_head_dim=attention.head_dim,
        sm_scale=attention.sm_scale,
        window=attention.window,
        soft_cap=attention.soft_cap,
    )


class Attention(nnx.Module):
    """Grouped-query attention with rope, as a LayerAttention says.

    qkv: the checkpoint modules of q, k and v, by default `q_proj`, `k_proj` and `v_proj` of `source`.
    """

    def __init__(
        self,
        attention: LayerAttention,
        hidden_size: int,
        *,
        eps: float,
        source: str,
        build: Build,
        qkv: Sequence[Source] | None = None,
    ):
        self.spec = attention_spec(attention, build.mesh)
        head_dim = attention.head_dim
        q_size, kv_size = attention.num_heads * head_dim, attention.num_kv_heads * head_dim
        if qkv is None:
            sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
            qkv = [Source(f"{source}.{name}", size) for name, size in sizes.items()]
        copies = max(1, build.mesh.model // attention.num_kv_heads)
        q, k, v = (part._replace(group=head_dim) for part in qkv)
        self.qkv = Linear(
            hidden_size,
            (q, k._replace(repeat=copies), v._replace(repeat=copies)),
            axes=("embed", "heads"),
            bias=attention.bias,
            build=build,
        )
        out = (Source(f"{source}.o_proj", hidden_size),)
        self.out = Linear(q_size, out, axes=("heads", "embed"), bias=attention.output_bias, build=build)
        norm = partial(RMSNorm, head_dim, eps, build=build)
        self.q_norm = norm(source=f"{source}.q_norm") if attention.qk_norm else None
        self.k_norm = norm(source=f"{source}.k_norm") if attention.qk_norm else None

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """x[T, D] -> [T, D], and the pool with this step's keys and values of this layer written."""
        spec = self.spec
        with jax.named_scope("qkv"):
            heads = self.qkv(x, step.rows).reshape(x.shape[0], -1, spec.head_dim)
            q, k, v = jnp.split(heads, (spec.num_q_heads, spec.num_q_heads + spec.num_kv_heads), axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            with jax.named_scope("qk_norm"):
                q, k = self.q_norm(q), self.k_norm(k)
        with jax.named_scope("rope"):
            q, k = apply_rope(q, *step.rope), apply_rope(k, *step.rope)
        ragged = pages.in_pool(kv.page_size)
        with jax.named_scope("kv_cache_update"):
            kv = kv_cache_update(kv, k, v, ragged.slot_mapping, schedule=pages.update_schedule)
        with jax.named_scope("ragged_paged_attention"):
            o = cast(jax.Array, ragged_paged_attention(q, kv, ragged, spec=spec, schedule=step.schedule))
        with jax.named_scope("o_proj"):
            return self.out(o.reshape(x.shape[0], -1), step.rows), kv
