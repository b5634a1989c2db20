"""Self-attention of a layer over paged keys and values: project, rotate, write this step's KV, attend.

The storage of pages and the computation of attention are in pallas_kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention, TemperatureTuning
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.rope import apply_rope
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.base.step_inputs import StepContext, StepInput
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.pallas_kernels.attention.op import (
    AttentionSpec,
    RaggedBatch,
    attention_schedule,
    gathered_by,
    ragged_paged_attention,
)
from jaxengine.pallas_kernels.attention.selected import selection_schedule
from jaxengine.pallas_kernels.attention.whole_prompts import (
    has_whole_prompts,
    whole_prompt_attention,
    whole_prompt_schedule,
)
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.kv.update import kv_cache_update
from jaxengine.sharding.collectives import shard_index
from jaxengine.sharding.layout import ONE_DEVICE, MeshLayout

QK_NORMS = ("q_norm", "k_norm")


class StepInputs(NamedTuple):
    """Inputs that layers with equal LayerAttention share. They are computed once per step, outside of the layers.

    Attributes:
      rows: description of the step's rows.
      rope: cos and sin, each f32[T, rotary_dim / 2]; None without rope.
      schedule: result of jaxengine.pallas_kernels.attention.op.attention_schedule, or of
        jaxengine.pallas_kernels.attention.selected.selection_schedule if the layers have an indexer.
      temperature: f32[T], factor of queries; None for none.
      expanded: result of jaxengine.models.layers.attention.mla_expanded.expanded_rows; None if no row has expanded
        (non-absorbed) keys and values.
      of_layer: [T, P], this layer's second input, after the hidden states; None for none.
      selected: i32[T, k], positions of the keys that the last indexer has selected; None without one.
      blocks: result of jaxengine.models.layers.attention.blocks.token_blocks.token_blocks; None where it is not needed.
      biases: [T, N, E], what each head of a token adds to the logits of keys by their distance; None for nothing.
      positions: i32[T], for layers whose effect of positions has weights; None for others.
      state_inputs: inputs of this layer's state that replace its own; () if its own are to be recorded, None otherwise
        (jaxengine.models.layers.states.inputs).
    """

    rows: Rows
    rope: tuple[jax.Array, jax.Array] | None
    schedule: Any
    temperature: jax.Array | None = None
    expanded: Any = None
    of_layer: jax.Array | None = None
    selected: jax.Array | None = None
    blocks: Any = None
    positions: jax.Array | None = None
    biases: jax.Array | None = None
    state_inputs: tuple[jax.Array, ...] | None = None


class LayerPages(NamedTuple):
    """Location of one layer's keys and values in the pool.

    Attributes:
      ragged: the batch with the page table of the layer's cache group. Page ids and slots are counted from the layer's
        first page; padding slots are -1.
      first_page: i32[], row of the layer's first page in the pool.
      update_schedule: result of jaxengine.pallas_kernels.kv.update.kv_update_schedule.
    """

    ragged: RaggedBatch
    first_page: jax.Array
    update_schedule: Any

    def in_pool(self, page_size: int) -> RaggedBatch:
        """Return `ragged` with page ids and slots counted from the beginning of the pool, for pages of `page_size`
        tokens. Padding slots stay -1.
        """
        slots = self.ragged.slot_mapping
        return self.ragged._replace(
            page_table=self.ragged.page_table + self.first_page,
            slot_mapping=jnp.where(slots < 0, -1, slots + self.first_page * page_size),
        )


def num_kv_heads(attention: LayerAttention, mesh: MeshLayout) -> int:
    """Return the number of key/value heads on one device, at least 1: if there are more devices than heads, each head
    is stored more than once.

    The result is meaningless for a mesh that does not divide the heads.
    """
    return max(1, attention.num_kv_heads // mesh.model)


def head_copies(attention: LayerAttention, mesh: MeshLayout) -> int:
    """Return how many of the devices that split the heads store the same key/value head, at least 1."""
    return max(1, mesh.model // attention.num_kv_heads)


def attention_spec(attention: LayerAttention, mesh: MeshLayout = ONE_DEVICE) -> AttentionSpec:
    """Return the AttentionSpec of a layer on one device, with the device's share of the heads.

    The result is meaningless for a mesh that does not divide the heads.
    """
    return AttentionSpec(
        num_q_heads=max(1, attention.num_heads // mesh.model),
        num_kv_heads=num_kv_heads(attention, mesh),
        head_dim=attention.head_dim,
        v_head_dim=attention.v_head_dim,
        sm_scale=attention.sm_scale,
        window=attention.window,
        chunk=attention.chunk,
        lookback=attention.lookback,
        soft_cap=attention.soft_cap,
        causal=attention.causal,
        values_in_keys=attention.values_in_keys,
        has_slopes=attention.slopes is not None,
        bias_extent=0 if attention.relative is None else attention.relative.extent,
        has_sinks=attention.sinks,
        mutual=attention.mutual,
        paged=attention.paged,
    )


def gathered_bytes(attention: LayerAttention, mesh: MeshLayout, platform: str, num_seqs: int, page_size: int) -> int:
    """Return the bytes of keys and values that attention copies out of the pages at once for a layer's decodes; 0 on
    platforms whose kernels read the pages directly.

    platform: the pool's platform. num_seqs: sequences of the step. page_size: tokens of a page.
    """
    return gathered_by(attention_spec(attention, mesh), platform, num_seqs, page_size)


def query_temperature(positions: jax.Array, tuning: TemperatureTuning) -> jax.Array:
    """Return the factors f32[T] of queries at positions i32[T]. With u = (position + offset) / floor_scale, a factor is
    exp(attn_scale * log1p(u)) if `tuning.power`, 1 + attn_scale * log(max(u, 1)) if `tuning.begins`, otherwise 1 +
    attn_scale * log1p(floor(u)).
    """
    steps = (positions.astype(jnp.float32) + tuning.offset) / tuning.floor_scale
    if tuning.power:
        return jnp.exp(tuning.attn_scale * jnp.log1p(steps))
    if tuning.begins:
        return 1.0 + tuning.attn_scale * jnp.log(jnp.maximum(steps, 1.0))
    steps = jnp.floor(steps)
    return 1.0 + tuning.attn_scale * jnp.log1p(steps)


def _schedule(spec: AttentionSpec | str, step: StepContext) -> Any:
    """Return StepInputs.schedule for all layers with this spec, a result of `_spec_of`. It is a schedule of key
    selection for "selection"; of whole prompts for attention of which `has_whole_prompts` holds; otherwise of paged
    attention.
    """
    ragged, num_tokens, platform = step.batch.ragged[0], step.batch.token_ids.shape[0], step.kv.platform
    if isinstance(spec, str):
        return selection_schedule(ragged, num_tokens=num_tokens, page_size=step.kv.page_size, platform=platform)
    if has_whole_prompts(spec, platform):
        return whole_prompt_schedule(ragged.cu_q_lens, ragged.num_seqs, num_tokens=num_tokens, platform=platform)
    return attention_schedule(
        ragged,  # schedules depend on lengths only
        spec,
        num_tokens=num_tokens,
        page_size=step.kv.page_size,
        platform=platform,
        kv_spec=step.kv.spec,
        q_dtype=step.build.dtype,
        kv_limits=None if step.in_windows_only and spec.window is None else step.key_limits,
    )


def _spec_of(attention: LayerAttention, build: Build) -> AttentionSpec | str | None:
    """Return the value on which a layer's schedule depends: "selection" for a layer with an indexer, None for a layer
    that needs no schedule (no attention, or keys of blocks of tokens), otherwise its AttentionSpec.
    """
    if attention.index is not None:
        return "selection"
    return attention_spec(attention, build.mesh) if attention.attends and not attention.has_blocks else None


SCHEDULE = StepInput("attention_schedule", _spec_of, _schedule)
TEMPERATURE = StepInput(
    "temperature",
    lambda attention, build: attention.temperature,
    lambda tuning, step: query_temperature(step.batch.positions, tuning),
)

POSITIONS = StepInput(
    "positions",
    lambda attention, build: attention.learned_positions or None,
    lambda learned, step: step.batch.positions,
)


def tempered(q: jax.Array, step: StepInputs) -> jax.Array:
    """Return queries q [T, N, .] multiplied by the step's temperature, in q's dtype; q itself if there is none."""
    if step.temperature is None:
        return q
    with jax.named_scope("temperature"):
        return (q.astype(jnp.float32) * step.temperature[:, None, None]).astype(q.dtype)


def own_slopes(slopes: Sequence[float], count: int) -> jax.Array:
    """Return the slopes f32[count] of this device's heads. slopes: those of all heads."""
    return lax.dynamic_slice_in_dim(jnp.asarray(slopes, jnp.float32), shard_index("heads") * count, count)


class Attention(nnx.Module):
    """Grouped-query attention with or without rope, configured by a LayerAttention.

    Args:
      qkv: checkpoint modules of q, k and v, by default `q_proj`, `k_proj` and `v_proj` of `source`. If keys serve as
        values, only q and k; for a layer with a kv_source, only q.
      out: checkpoint module of the projection after attention, by default `o_proj`.
      gate: checkpoint module of a gate whose sigmoid multiplies each head's output; None for no gate.
      qk_norms: norms of q and of k before rope, [T, heads, H] -> [T, heads, H]; None to follow LayerAttention.qk_norm.
        That of k is None for a layer with a kv_source.
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
        out: Source | None = None,
        gate: Source | None = None,
        qk_norms: Sequence[nnx.Module | None] | None = None,
    ):
        self.spec = attention_spec(attention, build.mesh)
        self.slopes, self.clip = attention.slopes, attention.clip
        self.interleaved = attention.rope is not None and attention.rope.interleaved
        head_dim = attention.head_dim
        q_size, kv_size = attention.num_heads * head_dim, attention.num_kv_heads * head_dim
        if qkv is None:
            num_kv_parts = 0 if attention.kv_source is not None else 1 if attention.keys_as_values else 2
            values = attention.num_kv_heads * attention.v_head_dim
            sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": values}
            qkv = [Source(f"{source}.{name}", size) for name, size in list(sizes.items())[: 1 + num_kv_parts]]
        copies = head_copies(attention, build.mesh)
        dims = head_dim, head_dim, attention.v_head_dim
        q, *kv = (part._replace(group=dim) for part, dim in zip(qkv, dims, strict=False))
        self.num_kv_parts, self.has_gate = len(kv), gate is not None
        gates = [] if gate is None else [gate._replace(group=head_dim)]
        self.qkv = Linear(
            hidden_size,
            (q, *(part._replace(repeat=copies) for part in kv), *gates),
            axes=("embed", "heads"),
            bias=attention.bias,
            build=build,
        )
        out = out or Source(f"{source}.o_proj", hidden_size)
        o_size = attention.num_heads * attention.v_head_dim
        self.out = Linear(o_size, (out,), axes=("heads", "embed"), bias=attention.output_bias, build=build)
        if attention.qk_norm and qk_norms is None:
            qk_norms = [RMSNorm(head_dim, eps, source=f"{source}.{name}", build=build) for name in QK_NORMS]
        self.q_norm, self.k_norm = qk_norms or (None, None)
        # float32, because the kernels add them to float32 products.
        sinks = ParamDecl(("heads",), (Source(f"{source}.sinks", attention.num_heads),), init_std=1.0)
        self.sinks = declare((attention.num_heads,), jnp.float32, sinks) if attention.sinks else None

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x[T, D] to ([T, D], the pool with this layer's keys and values of this step written): projections, norms
        and rope, attention, gate, output projection. The pool is unchanged if the layer uses another layer's keys and
        values.
        """
        with jax.named_scope("qkv"):
            q, *keys_values, gate = self._heads(self.qkv(x, step.rows))
        if keys_values:
            (q, k), v = self.rotate(q, keys_values[0], step), self.values(keys_values[-1])
            o, kv = self.attend(q, (k, v), kv, pages, step)
        else:
            o, kv = self.attend(self.rotate_queries(q, step), None, kv, pages, step)
        with jax.named_scope("gate"):
            o = self.gated(o, gate, x, step)
        with jax.named_scope("o_proj"):
            return self.out(o.reshape(x.shape[0], -1), step.rows), kv

    def _heads(self, joined: jax.Array) -> list[jax.Array]:
        """Split `joined`, the output of `qkv`, into the list [queries, keys, values, gates], each [T, heads, .].

        Keys or values that the projection does not have are left out. Without a gate, the gates are [T, 0, .]. There is
        never a gate if the head dimensions of values and keys differ.
        """
        spec = self.spec
        if spec.v_head_dim == spec.head_dim:
            heads = joined.reshape(joined.shape[0], -1, spec.head_dim)
            ends = np.cumsum([spec.num_q_heads, *[spec.num_kv_heads] * self.num_kv_parts])
            return jnp.split(heads, ends, axis=1)
        ends = np.cumsum([spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim])
        q, k, v = jnp.split(joined, ends, axis=1)
        sizes = spec.head_dim, spec.head_dim, spec.v_head_dim
        heads = [part.reshape(len(part), -1, size) for part, size in zip((q, k, v), sizes, strict=True)]
        return [*heads, heads[0][:, :0]]

    def gated(self, o: jax.Array, gate: jax.Array, x: jax.Array, step: StepInputs) -> jax.Array:
        """Return the heads' outputs o [T, N, Hv] multiplied by the sigmoid of their gates; o itself without a gate.

        gate: [T, N, H] or [T, 0, H]. x: [T, D], the layer's input. x and `step` are only used by subclasses.
        """
        if not self.has_gate:
            return o
        return (o.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(o.dtype)

    def attend(
        self,
        q: jax.Array,
        own: tuple[jax.Array, jax.Array] | None,
        kv: KVPages,
        pages: LayerPages,
        step: StepInputs,
    ) -> tuple[jax.Array, KVPages]:
        """Return ([T, N, Hv], the pool with this step's keys and values written) for queries q [T, N, H].

        own: this step's keys [T, K, H] and values [T, K, Hv]; None for a layer that uses another layer's keys and
        values, and writes none. Attention that is not causal has whole prompts in one step unless its layer is `paged`;
        if the platform has a kernel for whole prompts, the pool is unchanged.
        """
        spec, sinks = self.spec, None if self.sinks is None else self.sinks[...]
        if own is not None and has_whole_prompts(spec, kv.platform):
            with jax.named_scope("whole_prompt_attention"):
                return whole_prompt_attention(q, *own, step.schedule, spec=spec, platform=kv.platform), kv
        slopes = None if self.slopes is None else own_slopes(self.slopes, spec.num_q_heads)
        ragged = pages.in_pool(kv.page_size)
        if own is not None:
            with jax.named_scope("kv_cache_update"):
                kv = kv_cache_update(kv, *own, ragged.slot_mapping, schedule=pages.update_schedule)
        with jax.named_scope("ragged_paged_attention"):
            options: dict[str, Any] = {"schedule": step.schedule, "sinks": sinks, "slopes": slopes}
            options["biases"] = step.biases
            return cast(jax.Array, ragged_paged_attention(q, kv, ragged, spec=spec, **options)), kv

    def rotate(self, q: jax.Array, k: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        """Return projected q [T, N, H] and k [T, K, H] after norms, rope and, only for q, temperature, as far as the
        layer and `step` have them. Shapes and dtypes are unchanged.
        """
        q, k = (self._rotated(x, norm, step) for x, norm in ((q, self.q_norm), (k, self.k_norm)))
        return tempered(q, step), k

    def rotate_queries(self, q: jax.Array, step: StepInputs) -> jax.Array:
        """Return projected q [T, N, H] after norm, rope and temperature: `rotate` for a layer without its own keys."""
        return tempered(self._rotated(q, self.q_norm, step), step)

    def _rotated(self, x: jax.Array, norm: Any, step: StepInputs) -> jax.Array:
        """Return heads x [T, N, H] after `norm`, their bound and then rope, each unless it is None."""
        if norm is not None:
            with jax.named_scope("qk_norm"):
                x = norm(x)
        x = self._clipped(x)
        if step.rope is None:
            return x
        with jax.named_scope("rope"):
            return apply_rope(x, *step.rope, interleaved=self.interleaved)

    def values(self, v: jax.Array) -> jax.Array:
        """Return the values [T, K, Hv] to cache for projected values v: v within its bound, unless a subclass overrides
        this.
        """
        return self._clipped(v)

    def _clipped(self, x: jax.Array) -> jax.Array:
        """Return queries, keys or values x [T, N, H] bounded to [-clip, clip], or x itself if there is no bound."""
        return x if self.clip is None else jnp.clip(x, -self.clip, self.clip)
