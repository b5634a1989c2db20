"""LoRA additions to the products of experts, for rows of different adapters at once; jaxengine.models.lora describes
their storage.

A row has one expert and one adapter, hence one of the experts * slots pairs of matrices. Rows without an adapter have
none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.adapters import Adapters
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.lora import PoolArray, PoolDecl, modules_of
from jaxengine.models.params.declare import Source
from jaxengine.pallas_kernels.matmul.low_rank_groups import add_low_rank


class ExpertPools(nnx.Module):
    """Pools with all adapters' matrices for one grouped product [E, in, out] whose output is made of `sources`, with
    logical axes (experts, in, out). They are zeros at first. num_experts: number of experts, and E.
    """

    def __init__(
        self,
        spec: LoraSpec,
        num_experts: tuple[int, int],
        in_size: int,
        sources: tuple[Source, ...],
        *,
        axes: tuple[str | None, ...],
        dtype: jnp.dtype,
    ):
        modules = modules_of(sources)
        self.spec = spec
        # For each source, the index of its module.
        self.module = tuple(modules.index(source.name) for source in sources)
        of_a, of_b = (axes[0], None, None, axes[1]), (axes[0], None, None, axes[2])
        (count, stored), slots, rank = num_experts, spec.max_loras, spec.max_lora_rank
        shape = stored, slots, len(modules) * rank, in_size
        self.a = PoolArray(jnp.zeros(shape, dtype), decl=PoolDecl(of_a, sources, None, count))
        self.b = nnx.List(
            [
                PoolArray(
                    jnp.zeros((stored, slots, rank, source.num_contributed), dtype),
                    decl=PoolDecl(of_b, sources, part, count),
                )
                for part, source in enumerate(sources)
            ]
        )

    def add(self, y: jax.Array, x: jax.Array, sizes: jax.Array, adapters: Adapters) -> jax.Array:
        """Return the grouped product y [M, out] of x [M, in], rows sorted by expert, plus the contributions of the
        rows' adapters, in y's dtype; y unchanged if no adapter is in use.

        sizes: i32[E], rows of each expert on this device. adapters: those of the rows. If the inputs are split over
        devices the result is a partial sum, like the product that it is added to.
        """

        def added() -> jax.Array:
            with jax.named_scope("lora"):
                slots = self.spec.max_loras
                expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(x.shape[0]), side="right").astype(jnp.int32)
                # Rows after the last group belong to no expert.
                has_one = (adapters.slots >= 0) & (expert < sizes.size)
                group = jnp.where(has_one, expert * slots + adapters.slots, sizes.size * slots)
                a, *b = (pool[...].reshape(-1, *pool.shape[2:]) for pool in (self.a, *self.b))
                return add_low_rank(y, x, group, a, b, self.module)

        return lax.cond(adapters.form > 0, added, lambda: y)
