"""Attention of families that are rows of a table, as their DeclaredForm says."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.declared import (
    ALL_HEADS,
    CHUNKS,
    EACH_HEAD,
    FIXED,
    FIXED_RMS,
    LAYER,
    OFFSET,
    QUARTERS,
    RMS,
    ROWS,
    UNBIASED,
    DeclaredForm,
)
from jaxengine.models.families.llama import LAYER as LAYER_NAME
from jaxengine.models.layers.attention.attention import Attention, StepInputs, head_copies
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import (
    FixedLayerNorm,
    FixedRMSNorm,
    HeadLayerNorms,
    HeadsRMSNorm,
    LayerNorm,
    NormClass,
    OffsetRMSNorm,
    RMSNorm,
    UnbiasedLayerNorm,
)
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of

NORMS: dict[str, NormClass] = {
    RMS: RMSNorm,
    OFFSET: OffsetRMSNorm,
    FIXED_RMS: FixedRMSNorm,
    LAYER: LayerNorm,
    UNBIASED: UnbiasedLayerNorm,
    FIXED: FixedLayerNorm,
}
GATES: dict[str, Callable[[jax.Array], jax.Array]] = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}


class LowRankQueries(nnx.Module):
    """Projection to queries, keys and values side by side, in which queries are projected from the norm of a vector of
    `rank` elements: wq(inter_norm(q_proj(x))), k_proj(x), v_proj(x). Each device computes that vector.

    attention: the layer's heads, which are split over devices; keys and values as in Attention. eps: epsilon of the
    norm.
    """

    def __init__(self, rank: int, attention: LayerAttention, hidden_size: int, eps: float, build: Build):
        source, heads = f"{LAYER_NAME}.self_attn", attention.num_heads * attention.head_dim
        copies, dims = head_copies(attention, build.mesh), (attention.head_dim, attention.v_head_dim)
        self.down = Linear(hidden_size, (Source(f"{source}.q_proj", rank),), axes=("embed", "latent"), build=build)
        self.norm = RMSNorm(rank, eps, source=f"{source}.inter_norm", build=build)
        wq = Source(f"{source}.wq", heads, group=attention.head_dim)
        self.up = Linear(rank, (wq,), axes=("latent", "heads"), build=build)
        kv = (
            Source(f"{source}.{name}_proj", attention.num_kv_heads * size, repeat=copies, group=size)
            for name, size in zip("kv", dims, strict=True)
        )
        self.kv = Linear(hidden_size, tuple(kv), axes=("embed", "heads"), build=build)

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        """Return this device's queries, keys and values side by side, [T, N * H + K * (H + Hv)], of x [T, D]."""
        return jnp.concatenate([self.up(self.norm(self.down(x, rows)), rows), self.kv(x, rows)], axis=-1)


class DeclaredAttention(Attention):
    """Attention of a DeclaredForm. Depending on the form it norms q and k before or after rope, reverses the rotation,
    scales values, and norms and gates the heads' outputs. eps: epsilon of the norms.
    """

    def __init__(self, form: DeclaredForm, attention: LayerAttention, hidden_size: int, *, eps: float, build: Build):
        """Create the projections, of queries by way of `query_rank` if the form has it, the norms of q and k, and, if
        the form names them, the norm of the heads' outputs and the gate.
        """
        norms = _qk_norms(form, attention, eps, build)
        super().__init__(
            attention,
            hidden_size,
            eps=eps,
            source=f"{LAYER_NAME}.self_attn",
            build=build,
            qkv=_qkv(form, attention),
            out=Source(f"{LAYER_NAME}.{form.out}", hidden_size),
            qk_norms=[None, None] if form.qk_norms_last else norms,
        )
        self.form = form
        if form.query_rank is not None:
            self.qkv = LowRankQueries(form.query_rank, attention, hidden_size, eps, build)
        if form.heads_norm is not None:
            count, size = attention.num_heads, attention.v_head_dim
            self.heads_norm = HeadsRMSNorm(count, size, eps, source=f"{LAYER_NAME}.{form.heads_norm}", build=build)
        self.late_norms = nnx.List(norms if form.qk_norms_last else [])
        if form.gate is not None:
            size = 1 if form.gates_heads else attention.v_head_dim
            gate = Source(f"{LAYER_NAME}.{form.gate}", attention.num_heads * size, group=size)
            self.gate = Linear(hidden_size, (gate,), axes=("embed", "heads"), build=build)
        if form.gate_bias is not None:
            bias = Source(f"{LAYER_NAME}.{form.gate_bias}", attention.num_heads)
            self.gate_bias = declare((bias.rows,), build.dtype, ParamDecl(("heads",), (bias,), init_std=0.02))

    def rotate(self, q: jax.Array, k: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        """Return q [T, N, H] and k [T, K, H] after rope (reversed if the form says so) and, if they come last, their
        norms.
        """
        if step.rope is not None and self.form.reversed_rope:
            step = step._replace(rope=(step.rope[0], -step.rope[1]))
        q, k = super().rotate(q, k, step)
        if not self.late_norms:
            return q, k
        with jax.named_scope("qk_norm"):
            return self.late_norms[0](q), self.late_norms[1](k)

    def values(self, v: jax.Array) -> jax.Array:
        """Return values v within their bound, multiplied by the form's `value_scale`."""
        return scaled(super().values(v), self.form.value_scale)

    def gated(self, o: jax.Array, gate: jax.Array, x: jax.Array, step: StepInputs) -> jax.Array:
        """Return the heads' outputs o [T, N, Hv], normed if the form has a norm of them, and multiplied by the
        activated gate, projected from x [T, D], if it has one. The argument `gate` is not used.
        """
        if self.form.heads_norm is not None:
            o = self.heads_norm(o)
        if self.form.gate is None:
            return o
        gate = self.gate(x, step.rows).astype(jnp.float32).reshape(*o.shape[:2], -1)
        gate = gate if self.form.gate_bias is None else gate + self.gate_bias[...].astype(jnp.float32)[:, None]
        return (o.astype(jnp.float32) * GATES[self.form.gate_activation](gate)).astype(o.dtype)


def _qk_norms(form: DeclaredForm, attention: LayerAttention, eps: float, build: Build) -> list[nnx.Module]:
    """Return the norms of queries and of keys, in this order, of the kind `form.qk_norm`: over each head or, for
    ALL_HEADS, over all heads at once. Returns an empty list if the form names no norms. eps: epsilon of the norms.
    """
    names = [f"{LAYER_NAME}.{name}" for name in form.qk_norms]
    if form.qk_norm in NORMS:
        return [NORMS[form.qk_norm](attention.head_dim, eps, source=name, build=build) for name in names]
    norm = {ALL_HEADS: HeadsRMSNorm, EACH_HEAD: HeadLayerNorms}[form.qk_norm]
    counts = ((attention.num_heads, 1), (attention.num_kv_heads, head_copies(attention, build.mesh)))
    return [
        norm(count, attention.head_dim, eps, source=name, copies=copies, build=build)
        for name, (count, copies) in zip(names, counts, strict=False)
    ]


def _qkv(form: DeclaredForm, attention: LayerAttention) -> list[Source]:
    """Return the sources of queries, keys and values, in this order: three modules, or the respective rows of one
    joined module, or of keys and values alone, arranged as `form.joined` says.
    """
    heads, kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    sizes = heads * head_dim, kv_heads * head_dim, kv_heads * attention.v_head_dim
    names = [f"{LAYER_NAME}.{name}" for name in form.qkv]
    if len(names) == len(sizes):
        return [Source(name, size) for name, size in zip(names, sizes, strict=True)]
    if len(names) == 2:  # the rows of keys and values alone are joined, by heads
        runs, rows = (head_dim, attention.v_head_dim), {"tensor_rows": sum(sizes[1:])}
        firsts = zip(sizes[1:], (0, runs[0]), runs, strict=True)
        own = [Source(names[1], size, first=at, run=run, stride=sum(runs), **rows) for size, at, run in firsts]
        return [Source(names[0], sizes[0]), *own]
    if form.joined == ROWS:
        return list(parts_of(names[0], *sizes))
    count = {QUARTERS: 4, CHUNKS: form.chunks}.get(form.joined, kv_heads)
    runs = [size // count for size in sizes]
    stored = (0, 2, 1) if form.joined == QUARTERS else (0, 1, 2)  # CodeGen has values before keys
    firsts = {part: sum(runs[each] for each in stored[:place]) for place, part in enumerate(stored)}
    joined = {"tensor_rows": sum(sizes), "stride": sum(runs)}
    return [Source(names[0], sizes[each], first=firsts[each], run=runs[each], **joined) for each in range(3)]
