"""Latent attention to the keys that an indexer selects: DeepSeek Sparse Attention (DeepSeek-AI 2025,
"DeepSeek-V3.2-Exp").

The indexer has a few small heads and one key for each token, cached in the layer's pages in the place of a value. A
token attends to the `top_k` keys of the highest scores, over latents as all latent attention does. Where `pool` is set
(GLM-5.3), the indexer scores groups of tokens by one key for each, which is averaged anew from the cached keys and
gates of its tokens whenever keys are selected. Nothing is rounded here, so the published code's Hadamard matrix, which
changes no product, is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import KeyIndex, LayerAttention
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.attention.mla import LATENT_EPS, LatentAttention
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.layers.base.rope import apply_rope
from jaxengine.models.layers.base.section import SelectedKeys
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.quantization.registry import PLAIN
from jaxengine.pallas_kernels.attention.selected import positions_of_groups, select_keys, selected_attention
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.kv.update import kv_cache_update


class KeyPooling(nnx.Module):
    """Weights with which the keys of a group of tokens are averaged, where `index` has a `pool`: `gate` projects hidden
    states to gates [T, J], to which `bias` f32[m, J] is added by a token's number in its group of m.
    """

    def __init__(self, index: KeyIndex, hidden_size: int, *, source: str, build: Build):
        assert index.pool is not None
        gate, bias = (f"{source}.index_kpool_compress_{name}" for name in ("gate", "ape"))
        whole, size = replace(build, scheme=PLAIN), index.head_dim
        self.gate = whole.weight((hidden_size, size), (Source(gate, size),), ("embed", None))
        places = ParamDecl((None, None), (Source(bias, index.pool),), init_std=0.3)
        self.bias = declare((index.pool, size), jnp.float32, places)


class Indexer(nnx.Module):
    """Projections of an indexer: queries from the latent of queries, of `q_rank` elements, and a key and the weights of
    its heads from the hidden state. It is whole on every device.
    """

    def __init__(self, index: KeyIndex, q_rank: int, hidden_size: int, *, source: str, build: Build):
        self.index, self.num_heads, self.head_dim = index, index.num_heads, index.head_dim
        heads = (Source(f"{source}.wq_b", index.num_heads * index.head_dim),)
        self.q = Linear(q_rank, heads, axes=("latent", "latent"), build=build)
        key = (Source(f"{source}.wk", index.head_dim),)
        self.k = Linear(hidden_size, key, axes=("embed", "latent"), build=build)
        self.k_norm = LayerNorm(index.head_dim, index.norm_eps, source=f"{source}.k_norm", build=build)
        # Stored plain in all checkpoints and multiplied in float32: the result ranks keys.
        plain = replace(build, scheme=PLAIN, dtype=jnp.float32)
        weights = (Source(f"{source}.weights_proj", index.num_heads),)
        self.weights = Linear(hidden_size, weights, axes=("embed", "latent"), build=plain)

        self.pooling = None if index.pool is None else KeyPooling(index, hidden_size, source=source, build=build)

    def __call__(self, x: jax.Array, q_latent: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries [T, I, J], the weights of their heads f32[T, I], divided by sqrt(I * J), and normed keys [T,
        1, J], followed by gates, [T, 1, 2 * J], where keys are pooled.

        x: [T, D]. q_latent: [T, q_rank]. Queries are projected from it, the rest from x. Queries and keys are rotated
        if the step has rope.
        """
        q = self.q(q_latent, step.rows).reshape(x.shape[0], self.num_heads, self.head_dim)
        k = self.k_norm(self.k(x, step.rows))[:, None]
        if step.rope is not None:
            q, k = (self._rotated(part, step.rope) for part in (q, k))
        if self.pooling is not None:
            k = jnp.concatenate([k, self.pooling.gate.matmul(x).astype(k.dtype)[:, None]], axis=-1)
        weights = self.weights(x.astype(jnp.float32), step.rows)
        return q, weights * (self.num_heads * self.head_dim) ** -0.5, k

    def _rotated(self, x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Return x [T, heads, J] with its first elements, or with `rotates_last` its last ones, rotated. rope: cos and
        sin [T, R / 2].
        """
        if not self.index.rotates_last:
            return apply_rope(x, *rope, interleaved=self.index.interleaved)
        kept, last = jnp.split(x, (x.shape[-1] - 2 * rope[0].shape[-1],), axis=-1)
        return jnp.concatenate([kept, apply_rope(last, *rope, interleaved=self.index.interleaved)], axis=-1)


class SparseLatentAttention(LatentAttention):
    """LatentAttention to the keys that its indexer selects, or, without an indexer of its own, to those that an earlier
    layer selected.

    notes: whether a later layer uses this layer's selection; each call then sets the attribute `selected` to it, as
    SelectedKeys. Without a latent of queries the indexer reads the hidden state in its place. Raises ModelConfigError
    without an indexer configuration.
    """

    indexer_class: ClassVar[type[Indexer]] = Indexer

    def __init__(
        self,
        attention: LayerAttention,
        hidden_size: int,
        *,
        source: str,
        build: Build,
        notes: bool = False,
        eps: float = LATENT_EPS,
    ):
        index, latent = attention.index, attention.latent
        if index is None or latent is None:
            raise ModelConfigError("index must be set for sparse attention, got None")
        super().__init__(replace(attention, index=None, sinks=False), hidden_size, source=source, build=build, eps=eps)
        self.top_k, self.index_width, self.notes = index.top_k, index.stored_size, notes
        sizes, inner = (latent.q_lora_rank or hidden_size, hidden_size), f"{source}.indexer"
        own = index.source is None
        self.indexer = self.indexer_class(index, *sizes, source=inner, build=build) if own else None
        sinks = ParamDecl(("heads",), (Source(f"{source}.sinks", attention.num_heads),), init_std=1.0)
        self.sinks = declare((attention.num_heads,), jnp.float32, sinks) if attention.sinks else None

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x[T, D] to ([T, D], the pool with this step's latents and this layer's keys of the indexer written).

        A layer without an indexer of its own attends to `step.selected` and writes zeros as indexer keys. One without
        keys of its own writes nothing. With `notes` the attribute `selected` is set to the selected positions, as
        SelectedKeys.
        """
        (q, q_rope), keys, q_latent = self.project(x, step)
        ragged = pages.in_pool(kv.page_size)
        if self.indexer is None:
            index_keys = jnp.zeros((x.shape[0], 1, self.index_width), q.dtype)
        else:
            with jax.named_scope("indexer"):
                of_queries = x if self.q_norm is None else q_latent[:, : self.latent.q_lora_rank]
                index_q, weights, index_keys = self.indexer(x, of_queries, step)
        if keys is not None:
            with jax.named_scope("kv_cache_update"):
                kv = kv_cache_update(kv, keys, index_keys, ragged.slot_mapping, schedule=pages.update_schedule)
        if self.indexer is None:
            assert step.selected is not None
            selected = step.selected
        else:
            with jax.named_scope("select_keys"):
                pooling = None if self.indexer.pooling is None else self.indexer.pooling.bias[...]
                size = 1 if pooling is None else len(pooling)
                count = min(self.top_k, ragged.page_table.shape[1] * kv.page_size)  # of the longest sequence
                options = {"count": max(count // size, 1), "schedule": step.schedule, "pooling": pooling}
                selected = select_keys(index_q, weights, kv, ragged, **options)
                selected = selected if pooling is None else positions_of_groups(selected, ragged, size)
        if self.notes:
            self.selected = SelectedKeys(selected)
        latent_q = self.absorbed(q, step)
        with jax.named_scope("selected_attention"):
            sinks = None if self.sinks is None else self.sinks[...]
            o = selected_attention(latent_q, q_rope, kv, ragged, selected, spec=self.spec, sinks=sinks)
        o = self.values(o, step).astype(x.dtype)
        with jax.named_scope("o_proj"):
            return self.out(self.gated(o.reshape(x.shape[0], -1), x, q_latent, step), step.rows), kv
