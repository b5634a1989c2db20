"""LoRA additions to a product, for rows of different adapters at once; jaxengine.models.lora describes their storage.

There are two forms, of which the host chooses one for each step; a program has both where there is room for many
adapters, unless its rows are too few to have most of them. Flat: x is multiplied with the matrices A of all slots in
one product, of which a row keeps the columns of its own slot, and zeros meet the other slots' B. It reads all slots,
whatever rows there are; it copies and gathers nothing. Grouped: a kernel that reads only the slots that rows use
(jaxengine.pallas_kernels.matmul.lora).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.adapters import Adapters, are_few
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.lora import DeclaredPool, PoolArray, PoolDecl, declared_pools, modules_of
from jaxengine.models.params.declare import Source
from jaxengine.pallas_kernels.matmul.dense import matmul
from jaxengine.pallas_kernels.matmul.lora import LoraVisits, grouped_form, has_lora_product, lora_product, lora_visits

# Values of Adapters.form.
FLAT, GROUPED = 1, 2


class LoraPools(nnx.Module):
    """Pools with all adapters' matrices for one product [in, out] whose output is made of `sources`, with logical axes
    (in, out). They are zeros at first.

    Attributes:
      may_group: whether the product has the grouped form where the platform has one.
    """

    may_group: ClassVar[bool] = True

    def __init__(
        self,
        spec: LoraSpec,
        in_size: int,
        sources: tuple[Source, ...],
        *,
        axes: tuple[str, str | None],
        dtype: jnp.dtype,
    ):
        modules = modules_of(sources)
        self.spec, self.num_modules = spec, len(modules)
        # For each source, the index of its module.
        self.module = tuple(modules.index(source.name) for source in sources)
        shape = len(modules) * spec.columns, in_size
        self.a = PoolArray(
            jnp.zeros(shape, dtype), decl=PoolDecl((None, axes[0]), sources, None, may_group=self.may_group)
        )
        self.b = nnx.List(
            [
                PoolArray(
                    jnp.zeros((spec.columns, source.num_contributed), dtype),
                    decl=PoolDecl((None, axes[1]), sources, part),
                )
                for part, source in enumerate(sources)
            ]
        )

    def add(self, y: jax.Array, x: jax.Array, slots: jax.Array, adapters: Adapters) -> jax.Array:
        """Return the product y f32[R, out] plus the contributions of the adapters in slots i32[R] (-1 for none) to rows
        x [R, in]; y unchanged if no row of the step has an adapter.

        adapters: those of the step, of which only the form and the visits are used; the slots of x's rows are `slots`.
        """
        flat, forms = (lambda: y + self.flat(x, slots)), [lambda: y]
        if adapters.visits is None:
            forms += [flat]
        else:
            grouped = partial(self._add_grouped, y, x, slots, adapters.visits)
            forms += [grouped] if are_few(len(x), self.spec.max_loras) else [flat, grouped]
        return lax.switch(adapters.form, forms)  # one past the last is the last

    def _add_grouped(self, y: jax.Array, x: jax.Array, slots: jax.Array, visits: LoraVisits) -> jax.Array:
        """Return the result of `add` computed in the grouped form.

        visits: those of the step's rows; they are computed anew if x has another number of rows, as with those of all
        replicas.
        """
        with jax.named_scope("lora"):
            if len(visits.slot_index) != len(x):
                visits = lora_visits(slots, num_slots=self.spec.max_loras, rank=self.spec.max_lora_rank)
            bs = [b[...] for b in self.b]
            options = {"modules": self.module, "rank": self.spec.max_lora_rank}
            return lora_product(y, x, self.a[...], bs, visits, **options)

    def flat(self, x: jax.Array, slots: jax.Array) -> jax.Array:
        """Return the contribution f32[R, out] of adapters in slots i32[R] to rows x [R, in], computed in the flat form;
        zeros for rows without an adapter (-1).

        If the inputs are split over devices the result is a partial sum, like the product that it is added to.
        """
        with jax.named_scope("lora"):
            own = slots[:, None] == jnp.arange(self.spec.columns, dtype=jnp.int32) // self.spec.max_lora_rank
            inner = matmul(x, self.a[...], contract=1).reshape(x.shape[0], self.num_modules, -1)
            inner = jnp.where(own[:, None], inner, 0).astype(x.dtype)
            parts = [matmul(inner[:, module], b[...]) for module, b in zip(self.module, self.b, strict=True)]
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def with_visits(adapters: Adapters | None, spec: LoraSpec | None, platform: str) -> Adapters | None:
    """Return a step's adapters with the visits that the grouped form needs; `adapters` unchanged if it or `spec` is
    None, or if programs on `platform` lack that form.

    The visits are zeros in a step that uses another form. adapters: None for a step without adapters. spec: None for a
    model without pools. platform: a row of the kernel registry.
    """
    if adapters is None or spec is None or not groups_on(spec, platform):
        return adapters

    def made(slots: jax.Array) -> LoraVisits:
        return lora_visits(slots, num_slots=spec.max_loras, rank=spec.max_lora_rank)

    # Rows that are fewer than the limit of `are_few` have no flat form to choose.
    needed = adapters.form > 0 if are_few(len(adapters.slots), spec.max_loras) else adapters.form == GROUPED

    def none(slots: jax.Array) -> LoraVisits:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(made, slots))

    with jax.named_scope("lora_visits"):
        return adapters._replace(visits=lax.cond(needed, made, none, adapters.slots))


def groups_on(spec: LoraSpec, platform: str) -> bool:
    """Return whether programs for `platform`, a row of the kernel registry, have the grouped form in addition to the
    flat one.
    """
    return spec.may_group and has_lora_product(platform)


def product_forms(models: Sequence[Any], platform: str) -> list[dict[str, str]]:
    """Return, for display, the LoRA forms of each product of a model: rows {"modules": names, "forms": text} in the
    order of the layers, with one row for the same product of all layers.

    models: the abstract models of the stages, in order. platform: a row of the kernel registry. The list is empty if
    the models have no pools for adapters.
    """
    rows: dict[str, str] = {}
    for model in models:
        spec, pools = model.build.lora, list(declared_pools(model))
        for a in (pool for pool in pools if pool.decl.part is None):
            names = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in a.decl.modules))
            if names in rows:
                continue
            rows[names] = "flat" if a.decl.num_experts is None else "grouped by expert, xla"
            if a.decl.num_experts is None and a.decl.may_group and groups_on(spec, platform):
                of_b = [pool for pool in pools if pool.decl.part is not None and pool.decl.sources == a.decl.sources]
                size, *widths = (model.mesh.part_of(pool.shape, pool.decl.axes)[1] for pool in (a, *of_b))
                own = grouped_form(platform, size, widths, spec.max_lora_rank, a.dtype)
                rows[names] = f"flat, {own}"
    return [{"modules": names, "forms": forms} for names, forms in rows.items()]


def write_slot(
    pools: Sequence[DeclaredPool], spec: LoraSpec, arrays: list[jax.Array], slot: jax.Array, new: list[jax.Array]
) -> list[jax.Array]:
    """Return the arrays of `pools` with one adapter written to slot i32[].

    arrays, new: for each of `pools`, in order, the pool's array, and the adapter's part of it, padded to the pool's
    rank (jaxengine.models.weights.adapters.pools).
    """
    rank, written = spec.max_lora_rank, []
    for pool, array, part in zip(pools, arrays, new, strict=True):
        if pool.decl.num_experts is not None:
            array = lax.dynamic_update_slice_in_dim(array, part, slot, axis=1)
        elif pool.decl.part is None:
            for index in range(len(pool.decl.modules)):
                rows = lax.slice_in_dim(part, index * rank, (index + 1) * rank)
                array = lax.dynamic_update_slice_in_dim(array, rows, index * spec.columns + slot * rank, axis=0)
        else:
            array = lax.dynamic_update_slice_in_dim(array, part, slot * rank, axis=0)
        written.append(array)
    return written
