"""One pipeline stage on its devices: weights, KV pool, state of the slots, and one compiled step per bucket.

An engine without pipeline parallelism is one stage. Knows rows and messages, nothing of requests.
"""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxengine.runner.executables import ExecutableCache, compile_program
from jaxengine.runner.memory import device_memory, memory_in_use, workspace_bytes
from jaxengine.runner.step import StepOutput
from jaxengine.runner.step_programs import StepPrograms
from jaxengine.sampling import sampler
from jaxengine.sampling.logprobs import TokenLogprobs
from models.cache import make_kv
from scheduler.buckets import Bucket
from sharding.rules import named_sharding, part_bytes

logger = logging.getLogger(__name__)

# Entries of one message that brings page-table entries outside a step, requests whose parameters one brings, and
# requests whose masks one brings.
NUM_DELTAS = 1024
NUM_PARAM_ROWS = 8
NUM_MASK_ROWS = 16


class StageRunner:
    """Compiles on demand (`compile_step`), allocates when told the number of pages (`allocate`), then only executes."""

    def __init__(self, programs: StepPrograms, params: nnx.State, cache_dir: str | None):
        self.programs = programs
        devices = list(programs.mesh.devices.flat)
        self._several_processes = len({device.process_index for device in devices}) > 1
        if self._several_processes and devices[0].platform != "cpu" and cache_dir != "":
            logger.info("compiled steps over several processes are not kept on disk: tried on the CPU only")
            cache_dir = ""
        self.executables = ExecutableCache(cache_dir, devices)
        self._ranks = named_sharding(programs.mesh, ("batch",))
        self._params = jax.tree.leaves(params)
        self._steps: dict[Bucket, jax.stages.Compiled] = {}
        self._changes = {
            name: self.executables.get(
                f"{name} of {programs.model.stage}",
                function,
                (programs.state_shapes, *arguments),
                programs.state_shapes,
                donate=(0,),
            )
            for name, (function, arguments) in programs.state_changes(NUM_DELTAS, NUM_PARAM_ROWS, NUM_MASK_ROWS).items()
        }

    @property
    def device_memory(self) -> int:
        """Bytes of one device; devices that are parts of one host's memory share it evenly."""
        devices = self.programs.mesh.local_devices
        memory = device_memory(devices[0])
        return memory // jax.local_device_count() if devices[0].platform == "cpu" else memory

    @property
    def memory_in_use(self) -> int:
        """Bytes that one device holds now, as `device_memory` counts."""
        device = self.programs.mesh.local_devices[0]
        in_use = memory_in_use(device)
        return in_use // jax.local_device_count() if device.platform == "cpu" else in_use

    @property
    def weight_bytes(self) -> int:
        """Of one device."""
        return sum(map(part_bytes, self._params))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of one device that the largest step, which has been compiled, needs besides weights and pages."""
        return workspace_bytes(self._steps[max(self._steps)].memory_analysis()) + self._state_bytes

    def measure_workspace(self) -> int:
        """The same before the pool's size is known: it hardly depends on that, so a small pool stands in for it."""
        programs, bucket = self.programs, max(self.programs.packer.buckets)
        kv = programs.kv_shapes(programs.num_columns)
        arguments = programs.arguments(bucket, self._params, kv)

        def measure() -> int:
            lowered = jax.jit(programs.step(bucket, kv), donate_argnums=(1, 2)).lower(*arguments)
            analysis = compile_program(lowered, programs.mesh.devices.flat[0].platform).memory_analysis()
            assert analysis is not None, "this platform does not tell what a program needs"
            return workspace_bytes(analysis)

        return self.executables.get_number("workspace", arguments, programs.description, measure) + self._state_bytes

    def plan_pool(self, num_pages: int) -> None:
        """Decides the pool's size, pages of a layer and rank, and with it the steps' shapes."""
        self._kv_shapes = self.programs.kv_shapes(num_pages)

    def compile_step(self, bucket: Bucket) -> None:
        """Compiles or loads a bucket's step."""
        programs = self.programs
        output: Any = 0
        if programs.model.stage.is_last:
            output = StepOutput(_like(sampler.SampleOutput), _like(TokenLogprobs))
        self._steps[bucket] = self.executables.get(
            str(bucket),
            programs.step(bucket, self._kv_shapes),
            programs.arguments(bucket, self._params, self._kv_shapes),
            (self._kv_shapes, programs.state_shapes.slots, output),
            donate=(1, 2),
            description=programs.description,
        )

    def allocate(self) -> None:
        """Makes the pool and the state of the slots."""
        self._kv = make_kv(self._kv_shapes)
        self._state = self.programs.make_state()

    def execute(self, bucket: Bucket, message: np.ndarray, hidden: jax.Array | None) -> Any:
        """Dispatches the stage's part of a step: the next stage's hidden states, or the StepOutput of the last one."""
        if bucket not in self._steps:  # enforce_eager: compiled when it first occurs
            self.compile_step(bucket)
        arguments = (self._params, self._kv, *self._state, message)
        if hidden is not None:
            arguments = (*arguments, self._receive(hidden))
        self._kv, slots, output = self._steps[bucket](*arguments)
        self._state = self._state._replace(slots=slots)
        return output

    def change_state(self, name: str, *arguments: Any) -> None:
        """Runs one of `StepPrograms.state_changes`."""
        self._state = self._changes[name](self._state, *arguments)

    def expert_load(self) -> jax.Array | None:
        """u32[n, layers, E]: summed over n, the tokens that experts were picked for, modulo 2**32."""
        load = self._state.slots.expert_load
        return load if load is None or not self._several_processes else self.programs.gather_ranks(load)

    def _receive(self, hidden: jax.Array) -> jax.Array:
        """The hidden states of the stage before, [ranks * T, D], on this stage's devices."""
        if not self._several_processes:
            return jax.device_put(hidden, self._ranks)
        # Every stage has the same number of devices of each process, at the same places (jaxengine.runner.devices).
        assert isinstance(hidden.sharding, NamedSharding) and isinstance(hidden.sharding.mesh, Mesh)
        here = dict(zip(hidden.sharding.mesh.devices.flat, self.programs.mesh.devices.flat, strict=True))
        parts = [jax.device_put(shard.data, here[shard.device]) for shard in hidden.addressable_shards]
        return jax.make_array_from_single_device_arrays(hidden.shape, self._ranks, parts)

    @property
    def _state_bytes(self) -> int:
        return sum(map(part_bytes, jax.tree.leaves(self.programs.state_shapes)))


def _like(fields: Any) -> Any:
    """A value of a NamedTuple class, for its structure only."""
    return fields(*range(len(fields._fields)))
