"""Adapters of the matrix that expands latents, `kv_b_proj`, in both forms of latent attention.

An adapter changes each head's W^UK and W^UV to W + B_head A, with one A for all heads. The absorbed form multiplies by
them from either side: a query's part in the latent's space is q (W^UK + B_head A), and values are
(W^UV + B_head A) o of attention's result o. In the expanded form the sum has the usual order. All are the flat form of
jaxengine.models.layers.base.lora, as each row here has a product per head.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.models.adapters import Adapters
from jaxengine.models.config.attention import Latent
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.layers.base.lora import LoraPools
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.params.declare import Source
from jaxengine.sharding.collectives import gather_tokens

_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


class LatentPools(LoraPools):
    """Pools with all adapters' matrices for a latent's expansion, [C, N * (H + Hv)], made of two sources: the rows of
    keys, N * H, and those of values, N * Hv.
    """

    may_group: ClassVar[bool] = False

    def __init__(self, spec: LoraSpec, latent: Latent, sources: tuple[Source, Source], *, dtype: jnp.dtype):
        super().__init__(spec, latent.kv_lora_rank, sources, axes=("latent", "heads"), dtype=dtype)
        self.latent = latent

    def of_rows(self, rows: Rows) -> LatentAdapters | None:
        """Return the adapters of a step's rows for these pools, None if no row can have one."""
        if rows.adapters is None:
            return None
        return LatentAdapters(self, rows.adapters._replace(slots=gather_tokens(rows.adapters.slots, "heads")))

    def in_own_columns(self, inner: jax.Array, slots: jax.Array) -> jax.Array:
        """Return inner f32[R, ..., columns], products with the matrices of all slots, in the pools' dtype, with zeros
        but for the columns of each row's own slot. slots: i32[R], -1 for none.
        """
        own = slots[:, None] == jnp.arange(self.spec.columns, dtype=jnp.int32) // self.spec.max_lora_rank
        own = own.reshape(len(slots), *(1,) * (inner.ndim - 2), -1)
        return jnp.where(own, inner, 0).astype(self.a.dtype)


class LatentAdapters(NamedTuple):
    """Adapters of a step's tokens in the pools of a layer. Methods for rows take the slots of the first tokens."""

    pools: LatentPools
    adapters: Adapters

    def add_to_queries(self, y: jax.Array, q: jax.Array) -> jax.Array:
        """Return y f32[R, N, C], queries q [R, N, H] in the latent's space, plus what the rows' adapters add."""
        num_heads, pools = q.shape[1], self.pools

        def added() -> jax.Array:
            b = pools.b[0][...].reshape(pools.spec.columns, num_heads, -1)
            inner = _product("rnh,snh->rns", q, b)
            inner = pools.in_own_columns(inner, self.adapters.slots[: len(q)])
            return y + _product("rns,sc->rnc", inner, pools.a[...])

        with jax.named_scope("lora"):
            return lax.cond(self.adapters.form > 0, added, lambda: y)

    def add_to_values(self, y: jax.Array, o: jax.Array) -> jax.Array:
        """Return y f32[R, N, Hv], values of attention's results o [R, N, C], plus what the rows' adapters add."""
        num_heads, pools = o.shape[1], self.pools

        def added() -> jax.Array:
            b = pools.b[1][...].reshape(pools.spec.columns, num_heads, -1)
            inner = _product("rnc,sc->rns", o, pools.a[...])
            inner = pools.in_own_columns(inner, self.adapters.slots[: len(o)])
            return y + _product("rns,snv->rnv", inner, b)

        with jax.named_scope("lora"):
            return lax.cond(self.adapters.form > 0, added, lambda: y)

    def slots_of(self, tokens: jax.Array) -> jax.Array:
        """Return the slots i32[n], -1 for none, of the adapters of the step's tokens with indices i32[n]."""
        return self.adapters.slots[tokens]

    def add_to_expanded(
        self, y: jax.Array, latents: jax.Array, slots: jax.Array, first: jax.Array, heads: int
    ) -> jax.Array:
        """Return y f32[R, heads * (H + rotated + Hv)], keys and values expanded from latents [R, C + rotated], plus
        what the adapters in slots i32[R] add to them.

        first: i32[], index on this device of the first of these heads.
        """
        pools = self.pools
        latent, columns = pools.latent, pools.spec.columns

        def added() -> jax.Array:
            of_keys, of_values = (
                lax.dynamic_slice_in_dim(b[...], first * size, heads * size, axis=1).reshape(columns, heads, size)
                for b, size in zip(pools.b, (latent.qk_nope_head_dim, latent.v_head_dim), strict=True)
            )
            nothing = jnp.zeros((columns, heads, latent.qk_rope_head_dim), of_keys.dtype)
            b = jnp.concatenate([of_keys, nothing, of_values], axis=2).reshape(columns, -1)
            inner = _product("rc,sc->rs", latents[:, : latent.kv_lora_rank], pools.a[...])
            return y + _product("rs,sh->rh", pools.in_own_columns(inner, slots), b)

        with jax.named_scope("lora"):
            return lax.cond(self.adapters.form > 0, added, lambda: y)
