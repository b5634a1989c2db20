"""Multi-head latent attention over paged latents (DeepSeek-AI 2024, arXiv:2405.04434).

For each token one latent is stored, and one rotated part of the key, both shared by all heads. W^UK and W^UV would
expand the latent to the keys and values of heads. Here both are absorbed instead (section 2.1.2): a query is projected
to the latent's space, attention works on latents, and its results are projected to values. So a decode reads
kv_lora_rank + qk_rope_head_dim elements per token, whatever the number of heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs, attention_spec, tempered
from jaxengine.models.layers.attention.mla_adapters import LatentAdapters, LatentPools
from jaxengine.models.layers.attention.mla_expanded import attend_expanded, most_short
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.rope import apply_rope
from jaxengine.models.params.declare import Source
from jaxengine.pallas_kernels.attention.op import RaggedBatch, ragged_paged_attention
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.kv.update import kv_cache_update

# Epsilon of the norms of latents. It does not depend on that of a model's other norms.
LATENT_EPS = 1e-6


def times_gate(o: jax.Array, gate: jax.Array) -> jax.Array:
    """Return the heads' outputs o [T, N * Hv] multiplied by sigmoid(gate), gate f32[T, N * Hv], in the dtype of o."""
    return (o.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(o.dtype)


class LatentAttention(nnx.Module):
    """Multi-head latent attention, configured by a LayerAttention, which must have a Latent (ModelConfigError).

    Heads are split over devices. Each device computes the latent, since its norm and projection are small. eps: epsilon
    of the norms of latents.
    """

    def __init__(
        self, attention: LayerAttention, hidden_size: int, *, source: str, build: Build, eps: float = LATENT_EPS
    ):
        if attention.latent is None:
            raise ModelConfigError("latent must be set for multi-head latent attention, got None")
        self.latent = latent = attention.latent
        self.spec = attention_spec(attention, build.mesh)
        self.interleaved = attention.rope is not None and attention.rope.interleaved
        rank, q_rank, heads = latent.kv_lora_rank, latent.q_lora_rank, attention.num_heads
        nope, value = latent.qk_nope_head_dim, latent.v_head_dim
        own = attention.kv_source is None
        down = (Source(f"{source}.kv_a_proj_with_mqa", attention.head_dim),) if own else ()
        if q_rank is not None:
            down = (Source(f"{source}.q_a_proj", q_rank), *down)
        down = Linear(hidden_size, down, axes=("embed", "latent"), bias=attention.bias, build=build) if down else None
        self.down = down
        norm = partial(RMSNorm, eps=eps, build=build)
        self.q_norm = None if q_rank is None else norm(q_rank, source=f"{source}.q_a_layernorm")
        self.kv_norm = norm(rank, source=f"{source}.kv_a_layernorm") if own else None
        q_dim = nope + latent.qk_rope_head_dim
        q = Source(f"{source}.{'q_proj' if q_rank is None else 'q_b_proj'}", heads * q_dim, group=q_dim)
        self.q = Linear(q_rank or hidden_size, (q,), axes=("embed", "heads"), build=build)
        # In the checkpoint, each head's rows for keys are followed by its rows for values.
        interleaved = {"tensor_rows": heads * (nope + value), "stride": nope + value}
        of_keys = Source(f"{source}.kv_b_proj", heads * nope, group=nope, **interleaved)
        of_values = Source(f"{source}.kv_b_proj", heads * value, group=value, first=nope, **interleaved)
        self.w_uk = build.weight((heads * nope, rank), (of_keys,), ("heads", "latent"), table=True)
        self.w_uv = build.weight((heads * value, rank), (of_values,), ("heads", "latent"), table=True)
        spec = None if build.layer is None else build.lora
        self.lora = None if spec is None else LatentPools(spec, latent, (of_keys, of_values), dtype=build.dtype)
        out = (Source(f"{source}.o_proj", hidden_size),)
        self.out = Linear(heads * value, out, axes=("heads", "embed"), bias=attention.output_bias, build=build)

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x[T, D] to ([T, D], the pool with this step's latents of this layer written): projections, attention,
        gate, output projection.
        """
        q, keys, q_latent = self.project(x, step)
        assert keys is not None
        ragged = pages.in_pool(kv.page_size)
        with jax.named_scope("kv_cache_update"):
            kv = kv_cache_update(kv, keys, None, ragged.slot_mapping, schedule=pages.update_schedule)
        o = self.gated(self._attend(q, keys[:, 0], kv, ragged, step), x, q_latent, step)
        with jax.named_scope("o_proj"):
            return self.out(o, step.rows), kv

    def gated(self, o: jax.Array, x: jax.Array, q_latent: jax.Array, step: StepInputs) -> jax.Array:
        """Return the outputs of heads that are projected: o [T, N * Hv] itself. Subclasses may multiply it by a gate.

        x: [T, D], the layer's input. q_latent: [T, .], the latent of queries as `project` returns it.
        """
        return o

    def normed(self, q_latent: jax.Array) -> jax.Array:
        """Return the latent of queries [T, R] after its norm."""
        assert self.q_norm is not None
        return self.q_norm(q_latent)

    def normed_key(self, k_rope: jax.Array) -> jax.Array:
        """Return the part of keys [T, 1, R] that will be rotated: k_rope itself. Subclasses may have a norm of it."""
        return k_rope

    def project(
        self, x: jax.Array, step: StepInputs
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None, jax.Array]:
        """Return ((q, q_rope), keys, q_latent) for hidden states x[T, D].

        q, q_rope: the parts [T, N, .] of queries without and with rope, after temperature. keys: [T, 1, C + R], the
        normed latent and the rotated part, which are cached; None for a layer with a kv_source. q_latent: [T,
        q_lora_rank], the normed latent of queries; [T, 0] if the layer has none.
        """
        spec, latent = self.spec, self.latent
        q_rank = latent.q_lora_rank or 0
        with jax.named_scope("qkv"):
            down = x[:, :0] if self.down is None else self.down(x, step.rows)
            q_latent, keys = jnp.split(down, (q_rank,), axis=1)
            q_latent = q_latent if self.q_norm is None else self.normed(q_latent)
            q = self.q(x if self.q_norm is None else q_latent, step.rows)
            q = q.reshape(x.shape[0], spec.num_q_heads, -1)
            q, q_rope = jnp.split(q, (latent.qk_nope_head_dim,), axis=-1)
        q_rope = self._rotated(q_rope, step)
        return (tempered(q, step), tempered(q_rope, step)), self._keys(keys, step), q_latent

    def _keys(self, down: jax.Array, step: StepInputs) -> jax.Array | None:
        """Return the keys [T, 1, C + R] that `project` returns, from their projections [T, C + R]; None for a layer
        with a kv_source.
        """
        if self.kv_norm is None:
            return None
        kv_latent, k_rope = jnp.split(down, (self.latent.kv_lora_rank,), axis=1)
        k_rope = self._rotated(self.normed_key(k_rope[:, None]), step)
        return jnp.concatenate([self.kv_norm(kv_latent)[:, None], k_rope], axis=-1)

    def _rotated(self, part: jax.Array, step: StepInputs) -> jax.Array:
        """Return queries or keys [T, heads, R] rotated; unchanged in a layer without rope."""
        if step.rope is None:
            return part
        with jax.named_scope("rope"):
            return apply_rope(part, *step.rope, interleaved=self.interleaved)

    def _attend(
        self, q: tuple[jax.Array, jax.Array], keys: jax.Array, kv: KVPages, ragged: RaggedBatch, step: StepInputs
    ) -> jax.Array:
        """Return the attention output [T, N * Hv] of queries q, given as parts [T, N, .] without and with rope.

        keys: this step's keys [T, C + R]: latents of kv_lora_rank and rotated parts of qk_rope_head_dim. kv: the pool,
        which already has these keys. The rows of `step.expanded` use expanded keys and values, all others the absorbed
        form.
        """
        num_tokens, num_heads = q[0].shape[:2]
        # Results of heads are transposed to token-major order in the model's dtype. Without the barriers XLA:TPU
        # transposes them in float32 if the next product rounds them. Large results are transposed before their barrier,
        # which also keeps later operations out of the branches; small ones after it, on the chip.
        if (expanded := step.expanded) is None:
            return lax.optimization_barrier(self._absorbed(q, kv, ragged, step)).reshape(num_tokens, -1)

        def no_rows():
            return jnp.zeros((num_tokens, num_heads, self.latent.v_head_dim), keys.dtype)

        def of_first(count: int, schedule: Any):
            short = ragged._replace(num_seqs=expanded.num_short, slot_mapping=ragged.slot_mapping[:count])
            o = self._absorbed((q[0][:count], q[1][:count]), kv, short, step._replace(schedule=schedule))
            return jnp.pad(o, ((0, num_tokens - count), (0, 0), (0, 0)))

        def both():
            with jax.named_scope("short_rows"):
                decodes = partial(of_first, len(ragged.kv_lens), expanded.decode_schedule)
                few = partial(of_first, most_short(self.latent, num_tokens), expanded.schedule)
                o = lax.switch(expanded.short_form, (no_rows, decodes, few))
            with jax.named_scope("expanded_rows"):
                weights, sizes = (self.w_uk, self.w_uv), {"latent": self.latent, "spec": self.spec}
                sizes["adapters"] = self._adapters(step)
                return attend_expanded(o, q, keys, weights, kv, ragged.page_table, expanded, **sizes)

        o = lax.cond(expanded.rows.num_seqs > 0, both, lambda: self._absorbed(q, kv, ragged, step))
        return lax.optimization_barrier(o.reshape(num_tokens, -1))

    def _absorbed(
        self, q: tuple[jax.Array, jax.Array], kv: KVPages, ragged: RaggedBatch, step: StepInputs
    ) -> jax.Array:
        """Return the attention output [R, N, Hv] of all rows of `ragged` in the absorbed form, that is by attention
        over the latents in the pool `kv`.

        q: parts [R, N, .] without and with rope, of the step's first tokens. step: with the attention schedule of these
        rows.
        """
        latent_q = self.absorbed(q[0], step)
        with jax.named_scope("ragged_paged_attention"):
            o = ragged_paged_attention(latent_q, kv, ragged, spec=self.spec, q_rest=q[1], schedule=step.schedule)
        return self.values(cast(jax.Array, o), step).astype(latent_q.dtype)

    def absorbed(self, q: jax.Array, step: StepInputs) -> jax.Array:
        """Return queries without rope q [R, N, H], of the step's first tokens, in the latent's space: [R, N, C]."""
        with jax.named_scope("absorb"):
            latent_q, adapters = self.w_uk.batched_matmul(q, contract=0), self._adapters(step)
            return (latent_q if adapters is None else adapters.add_to_queries(latent_q, q)).astype(q.dtype)

    def values(self, o: jax.Array, step: StepInputs) -> jax.Array:
        """Return the values f32[R, N, Hv] of attention's results o [R, N, C] for the step's first tokens."""
        with jax.named_scope("values"):
            values, adapters = self.w_uv.batched_matmul(o, contract=1), self._adapters(step)
            return values if adapters is None else adapters.add_to_values(values, o)

    def _adapters(self, step: StepInputs) -> LatentAdapters | None:
        """Return the adapters of the step's tokens for the expansion of latents, None if no token can have one."""
        return None if self.lora is None else self.lora.of_rows(step.rows)
