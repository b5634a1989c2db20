"""What adapters add to the products of experts, for rows of different adapters at once: see models.lora for how they
are stored.

A row is of one expert and of one adapter, so that of experts * slots pairs of matrices it meets one. Rows without an
adapter meet none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.adapters import Adapters
from models.config.lora import LoraSpec
from models.lora import PoolArray, PoolDecl, modules_of
from models.weights.declare import Source
from pallas_kernels.matmul.low_rank_groups import add_low_rank


class ExpertPools(nnx.Module):
    """The adapters' part of one grouped product of `sources`, [E, in, out], with logical axes (experts, in, out)."""

    def __init__(
        self,
        spec: LoraSpec,
        num_experts: int,
        in_size: int,
        sources: tuple[Source, ...],
        *,
        axes: tuple[str | None, ...],
        dtype: jnp.dtype,
    ):
        modules = modules_of(sources)
        self.spec = spec
        # Of each source, which module it is of.
        self.module = tuple(modules.index(source.name) for source in sources)
        slots, rank = spec.max_loras, spec.max_lora_rank
        of_a, of_b = (axes[0], None, None, axes[1]), (axes[0], None, None, axes[2])
        shape = num_experts, slots, len(modules) * rank, in_size
        self.a = PoolArray(jnp.zeros(shape, dtype), decl=PoolDecl(of_a, sources, None, num_experts))
        self.b = nnx.List(
            [
                PoolArray(
                    jnp.zeros((num_experts, slots, rank, source.num_contributed), dtype),
                    decl=PoolDecl(of_b, sources, part, num_experts),
                )
                for part, source in enumerate(sources)
            ]
        )

    def add(self, y: jax.Array, x: jax.Array, sizes: jax.Array, adapters: Adapters) -> jax.Array:
        """The grouped product y [M, out] of x [M, in], rows sorted by expert, with what adapters add, in y's dtype.

        sizes: i32[E], rows of each expert that is here. adapters: those of the rows. Without any in use, y as it is.

        Where the inputs are split over devices it is, like the product that it is added to, a part of a sum.
        """

        def added() -> jax.Array:
            with jax.named_scope("lora"):
                slots = self.spec.max_loras
                expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right").astype(jnp.int32)
                # Rows behind the last are of no expert.
                has_one = (adapters.slots >= 0) & (expert < sizes.size)
                group = jnp.where(has_one, expert * slots + adapters.slots, sizes.size * slots)
                a, *b = (pool[...].reshape(-1, *pool.shape[2:]) for pool in (self.a, *self.b))
                return add_low_rank(y, x, group, a, b, self.module)

        return lax.cond(adapters.form > 0, added, lambda: y)
