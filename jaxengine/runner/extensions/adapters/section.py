"""Adapters: LoRA matrices in pools on the devices, from which products read those of each token's slot."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.adapters import Adapters
from jaxengine.models.cache import platform_of
from jaxengine.models.layers.base.lora import FLAT, GROUPED, product_forms, write_slot
from jaxengine.models.lora import DeclaredPool, declared_pools
from jaxengine.models.weights.adapters.pools import AdapterTargets, Matrices, slot_shape, slot_values, targets_of
from jaxengine.runner.base.device_state import write_section
from jaxengine.runner.base.extension import (
    DeviceExtension,
    HostExtension,
    Kept,
    StageExtension,
    StageShape,
    StateChange,
)
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.base.program import Program, abstract_params, program_on
from jaxengine.runner.programs.state_changes import column_shapes
from jaxengine.scheduler.base.token_params import ADAPTER, FEW_ADAPTERS

NAME, CHANGE = "adapters", "adapters"


class AdaptersExtension(DeviceExtension):
    """Device extension of LoRA adapters. Its section of SlotState is i32[R], the pool slot of each slot's adapter, -1
    for none.

    Attributes:
      pools: the model's arrays that hold adapters.
    """

    name = NAME

    def __init__(self, shape: StageShape):
        super().__init__(shape)
        self.pools = list(declared_pools(shape.model))

    def slots(self) -> Any:
        return Kept((self.shape.num_slots,), jnp.int32, fill=-1)

    @property
    def changes(self) -> Mapping[str, StateChange]:
        return {CHANGE: StateChange(lambda state, *column: write_section(state, NAME, *column), column_shapes())}

    def programs(self, params: Sequence[Any]) -> Sequence[Program]:
        """Return the one program that writes an adapter into a pool slot: (the arrays of `pools`, slot i32[], the
        adapter's matrices for each) -> the arrays with the adapter in the slot. The arrays are donated.

        params: the model's leaves, arrays or shapes.
        """
        spec, shape = self.shape.model.build.lora, self.shape
        assert spec is not None
        arrays = [abstract_params(params)[pool.index] for pool in self.pools]
        new = [
            shape.shape(slot_shape(pool, spec), pool.dtype, array.sharding.spec)
            for pool, array in zip(self.pools, arrays, strict=True)
        ]
        arguments = arrays, shape.shape((), np.int32), new
        return [program_on(shape.mesh, self.write_name, partial(write_slot, self.pools, spec), arguments, arrays, (0,))]

    @property
    def write_name(self) -> str:
        """Name of the program that writes an adapter into a pool slot of this stage."""
        return f"adapter of {self.shape.model.stage}"

    def before_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with a section for products: each token's pool slot i32[T], -1 for no adapter, and the form
        in which adapters are applied: GROUPED with FEW_ADAPTERS, else FLAT; 0 in a step without any.
        """
        slot = jnp.where(step.is_token, step.rows.index[step.token_row], self.shape.num_slots)
        own = step.slots.sections[NAME].at[slot].get(mode="fill", fill_value=-1)
        form = jnp.where(step.features & FEW_ADAPTERS > 0, GROUPED, FLAT)
        return step.with_section(NAME, Adapters(own, jnp.where(step.features & ADAPTER > 0, form, 0)))

    def at_stage(self, stage: Any) -> StageExtension:
        return StagePools(stage, self)

    def on_host(self, runner: Any) -> HostExtension:
        return AdapterPools(runner)


class StagePools(StageExtension):
    """Stage extension that writes adapters into the pools of one stage, which are leaves of its model."""

    name = NAME

    def __init__(self, stage: Any, extension: AdaptersExtension):
        self._stage, self._extension = stage, extension

    @property
    def pools(self) -> list[DeclaredPool]:
        """Arrays of the stage's model that hold adapters, as declared."""
        return self._extension.pools

    def put(self, matrices: Matrices) -> list[jax.Array]:
        """Copy an adapter's part of each pool of this stage to the devices, and return it for `write`. Thread-safe."""
        pools, spec = self._extension.pools, self._stage.programs.model.build.lora
        shardings = [self._stage.params[pool.index].sharding for pool in pools]
        return jax.device_put([slot_values(pool, spec, matrices) for pool in pools], shardings)

    def write(self, slot: int, values: list[jax.Array]) -> None:
        """Dispatch the program that writes the arrays of `put` into a pool slot. The stage's pools are donated, and
        replaced in its params.
        """
        params, indices = self._stage.params, [pool.index for pool in self._extension.pools]
        write = self._stage.program(NAME, self._extension.write_name)
        written = write([params[index] for index in indices], np.int32(slot), values)
        for index, array in zip(indices, written, strict=True):
            params[index] = array


class AdapterPools(HostExtension):
    """Host extension that writes adapters into the pools of all stages, and sets which of them each slot uses."""

    def __init__(self, runner: Any):
        """Store the runner, and -1 (no adapter) as the known adapter of every slot."""
        super().__init__(runner)
        self._known = np.full(runner.num_ranks * runner.config.max_num_seqs, -1, np.int32)

    @property
    def targets(self) -> AdapterTargets:
        """Modules of the model, of all stages, that an adapter may change."""
        return targets_of([stage.programs.model for stage in self.runner.stages])

    @property
    def forms(self) -> list[dict[str, str]]:
        """Rows of a table for display: the form in which this platform computes each kind of product with adapters."""
        models = [stage.programs.model for stage in self.runner.stages]
        return product_forms(models, platform_of(self.runner.device))

    def put(self, matrices: Matrices) -> list[list[jax.Array]]:
        """Copy an adapter's matrices to the devices, wait for that, and return one list of arrays for each stage, for
        `write`. Thread-safe.
        """
        return jax.block_until_ready([stage.extensions[NAME].put(matrices) for stage in self.runner.stages])

    def write(self, slot: int, values: list[list[jax.Array]]) -> None:
        """Dispatch the writing of the arrays of `put` into a pool slot of every stage. Steps dispatched afterwards read
        them there.
        """
        for stage, own in zip(self.runner.stages, values, strict=True):
            stage.extensions[NAME].write(slot, own)

    @property
    def are_present(self) -> bool:
        """Whether the pools are on the devices: in a sleeping engine they are not."""
        arrays = [stage.params[pool.index] for stage in self.runner.stages for pool in stage.extensions[NAME].pools]
        return all(isinstance(each, jax.Array) for each in arrays)

    def set_rows(self, slots: list[int], adapters: list[int]) -> None:
        """Set the pool slot of the adapter that each of these slots uses, -1 for none; only changes are sent to the
        devices. Slots are numbered over all replicas.
        """
        self.runner.set_column(CHANGE, self._known, slots, adapters)

    def warm_up(self) -> None:
        """Run every forward pass with adapters once, and wait: the first run is slower, on a CPU by as much as
        a step.
        """
        lora = self.runner.stages[0].programs.model.build.lora
        forms = (ADAPTER, ADAPTER | FEW_ADAPTERS) if lora.may_group else (ADAPTER,)
        for bucket, features in itertools.product(self.runner.buckets, forms):
            jax.block_until_ready(self.runner.run_forward(bucket, self.runner.packer.nothing(bucket, features)))
