"""What adapters add to a product, for rows of different adapters at once: see models.lora for how they are stored.

The flat form: x meets the matrices A of all slots in one product, of which a row keeps the columns of its own slot, and
zeros meet the other slots' B. Reads all slots, whatever rows there are; copies and gathers nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.config.lora import LoraSpec
from models.lora import DeclaredPool, PoolArray, PoolDecl, modules_of
from models.weights.declare import Source
from pallas_kernels.matmul.dense import matmul


class LoraPools(nnx.Module):
    """The adapters' part of one product of `sources`, [in, out], with logical axes (in, out)."""

    def __init__(
        self, spec: LoraSpec, in_size: int, sources: tuple[Source, ...], *, axes: tuple[str, str], dtype: jnp.dtype
    ):
        modules = modules_of(sources)
        self.spec, self.num_modules = spec, len(modules)
        # Of each source, which module it is of.
        self.module = tuple(modules.index(source.name) for source in sources)
        shape = len(modules) * spec.columns, in_size
        self.a = PoolArray(jnp.zeros(shape, dtype), decl=PoolDecl((None, axes[0]), sources, None))
        self.b = nnx.List(
            [
                PoolArray(
                    jnp.zeros((spec.columns, source.num_contributed), dtype),
                    decl=PoolDecl((None, axes[1]), sources, part),
                )
                for part, source in enumerate(sources)
            ]
        )

    def add(self, y: jax.Array, x: jax.Array, in_use: jax.Array, slots: jax.Array) -> jax.Array:
        """The product y f32[R, out] of x with what adapters add; as it is where none are in use, bool[].

        A conditional around a whole layer would be one in the place of some four, but XLA then copies the KV pool.
        """
        return lax.cond(in_use, lambda: y + self(x, slots), lambda: y)

    def __call__(self, x: jax.Array, slots: jax.Array) -> jax.Array:
        """Rows x [R, in] of the adapters in slots i32[R], -1 for none -> f32[R, out]; zeros for those without one.

        Where the inputs are split over devices it is, like the product that it is added to, a part of a sum.
        """
        with jax.named_scope("lora"):
            own = slots[:, None] == jnp.arange(self.spec.columns, dtype=jnp.int32) // self.spec.max_lora_rank
            inner = matmul(x, self.a[...], contract=1).reshape(x.shape[0], self.num_modules, -1)
            inner = jnp.where(own[:, None], inner, 0).astype(x.dtype)
            parts = [matmul(inner[:, module], b[...]) for module, b in zip(self.module, self.b, strict=True)]
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def write_slot(
    pools: Sequence[DeclaredPool], spec: LoraSpec, arrays: list[jax.Array], slot: jax.Array, new: list[jax.Array]
) -> list[jax.Array]:
    """The arrays of pools with one adapter in a slot i32[]; new: what it has of each (models.weights.lora_pools)."""
    rank, written = spec.max_lora_rank, []
    for pool, array, part in zip(pools, arrays, new, strict=True):
        if pool.decl.part is None:
            for index in range(len(pool.decl.modules)):
                rows = lax.slice_in_dim(part, index * rank, (index + 1) * rank)
                array = lax.dynamic_update_slice_in_dim(array, rows, index * spec.columns + slot * rank, axis=0)
        else:
            array = lax.dynamic_update_slice_in_dim(array, part, slot * rank, axis=0)
        written.append(array)
    return written
