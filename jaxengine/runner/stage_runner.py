"""StageRunner: one pipeline stage on its devices, with its weights, KV pool, slot state and compiled programs.

An engine without pipeline parallelism has one stage. This module handles rows and messages, never requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.models.weights.views.kv_scales import KVScales
from jaxengine.runner.base.device_state import SlotState
from jaxengine.runner.base.extension import StageExtension
from jaxengine.runner.base.memory import (
    StageNeeds,
    StageSizes,
    device_limit,
    device_memory,
    give_back_zeros,
    kept_bytes,
    kept_of_step,
    memory_in_use,
    workspace_bytes,
)
from jaxengine.runner.base.program import Program
from jaxengine.runner.executables.cache import ExecutableCache, Place
from jaxengine.runner.executables.layer_chain import FEW_TOKENS, Executable, num_blocks
from jaxengine.runner.programs.program_needs import estimate_needs, held_by
from jaxengine.runner.programs.step import Forwarded
from jaxengine.runner.programs.step_programs import StepPrograms
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.sharding.rules import named_sharding, part_bytes

logger = logging.getLogger(__name__)

# XLA:CPU hangs if many more launches than this are in flight on several devices of one process and it has fewer than
# twice as many threads as devices.
MAX_LAUNCHES_AHEAD = 16


class StageRunner:
    """Runner of one stage. It compiles on demand. Memory is allocated once the number of pages is known (`plan_pool`,
    then `allocate`); after that it only executes.

    Attributes:
      programs: the programs that it compiles.
      params: the model's leaves.
      executables: cache of the programs that depend on the model.
      kv_scales: scales of an 8-bit pool for all layers of the model; must be set before `allocate`.
      extensions: StageExtensions, by name.
      given: arrays that extensions have provided for the newest forward pass, by name.
    """

    def __init__(
        self, programs: StepPrograms, params: Any, cache_dir: Place, extensions: Sequence[StageExtension] = ()
    ):
        """Store the weights, open the caches of executables, and compile or load the state changes.

        params: the model's weights, an nnx.State or its leaves. cache_dir: location of the ExecutableCache, whose
        ConfigError is raised; on GPUs of several processes nothing is stored, which is logged. extensions:
        StageExtensions that have weights of their own.
        """
        self.programs = programs
        self.given: dict[str, Any] = {}
        self.kv_scales: KVScales | None = None
        self._cache_dir = cache_dir
        self._backend = programs.mesh.devices.flat[0].platform
        devices = list(programs.mesh.devices.flat)
        self._waiting: list[tuple[str, tuple[Any, ...]]] | None = None  # state changes until pools are there again
        self._num_changes, self._several_on_cpu = 0, self._backend == "cpu" and len(devices) > 1
        self._several_processes = len({device.process_index for device in devices}) > 1
        if self._several_processes and devices[0].platform == "gpu" and cache_dir != "":
            # On GPUs each process measures a part of the kernels and waits for the others' results. A process that
            # loads its program from disk would not answer those that compile, and without that exchange two might
            # choose different kernels for the same product.
            logger.info("compiled steps over several processes are not kept on disk on GPUs")
            cache_dir = ""
        self.params = jax.tree.leaves(params)
        self.executables = ExecutableCache(cache_dir, devices, family=type(programs.model))
        self._shared = ExecutableCache(cache_dir, devices)
        self._ranks = named_sharding(programs.mesh, ("batch",))
        self._forwards: dict[Bucket, Executable] = {}
        self._made: dict[tuple[Bucket, int | None], Executable] = {}  # compiled for an estimate, by pages of the pool
        self._epilogues: dict[tuple[str, int], Executable] = {}
        self._programs: dict[tuple[str, str], Executable] = {}
        self._changes = {name: self.compiled(change) for name, change in programs.state_changes().items()}
        found = [at_stage for each in programs.extensions if (at_stage := each.at_stage(self)) is not None]
        self.extensions = {each.name: each for each in (*found, *extensions)}
        self._reads_message = any(each.reads_message for each in self.extensions.values())

    @property
    def device_memory(self) -> int:
        """Memory of one device in bytes; if devices share the host's, an equal share of it, rounded down."""
        devices = self.programs.mesh.local_devices
        memory = device_memory(devices[0])
        return memory // jax.local_device_count() if devices[0].platform == "cpu" else memory

    @property
    def sizes(self) -> StageSizes:
        """Sizes in bytes, on one device of the stage, that are known before the memory plan is made."""
        limit = device_limit(self.programs.mesh.local_devices[0])
        return StageSizes(self.device_memory, self.weight_bytes, self.page_bytes, limit)

    @property
    def memory_in_use(self) -> int:
        """Bytes that one device holds now; if devices share the host's memory, an equal share, rounded down."""
        device = self.programs.mesh.local_devices[0]
        in_use = memory_in_use(device)
        return in_use // jax.local_device_count() if device.platform == "cpu" else in_use

    @property
    def weight_bytes(self) -> int:
        """Bytes on one device of the weights, including extensions' weights."""
        return sum(map(part_bytes, self.params)) + sum(each.weight_bytes for each in self.extensions.values())

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device, in all layers of a group and in extensions."""
        return self.programs.page_bytes + sum(each.page_bytes for each in self.extensions.values())

    @property
    def caches(self) -> list[ExecutableCache]:
        """ExecutableCaches of the stage and its extensions."""
        return [self.executables, self._shared, *(own for each in self.extensions.values() for own in each.caches)]

    @property
    def workspace_bytes(self) -> int:
        """Workspace in bytes on one device: that of the largest forward pass or extension's program, plus the slot
        state and what the largest epilogue needs. These programs must have been compiled.
        """
        forward = workspace_bytes(self._forwards[max(self._forwards)].memory_analysis())
        forward = max([forward, *(each.workspace_bytes for each in self.extensions.values())])
        return forward + self._bytes_beside_forward

    @property
    def kept_bytes(self) -> int:
        """Bytes of one device's blocks that the C library keeps after a step on a CPU, after the one where it keeps
        most. All programs must have been compiled.
        """
        steps = []
        for bucket, each in self._forwards.items():
            blocks = num_blocks(each)
            kept = kept_bytes(workspace_bytes(each.memory_analysis()), self._bytes_of_results(bucket), blocks)
            steps.append(kept_of_step(kept, self._kept_of_epilogues, blocks))
        steps += [kept_bytes(each.workspace_bytes) for each in self.extensions.values()]
        steps += [kept_bytes(workspace_bytes(each.memory_analysis())) for each in self._programs.values()]
        return max(steps)

    @property
    def program_bytes(self) -> int:
        """Bytes on one device that all programs hold. They must have been compiled."""
        programs, kv = self.programs, self._kv_shapes
        forwards = [
            self.held(programs.forward(bucket, self.params, kv), each) for bucket, each in self._forwards.items()
        ]
        of_extensions = sum(each.program_bytes for each in self.extensions.values())
        return sum(forwards) + of_extensions + self._held_beside_forwards

    def estimate_needs(self, num_pages: int | None = None) -> StageNeeds:
        """Return an upper estimate of the memory that programs will need, in bytes on one device, before the pool's
        size is known.

        Compiles or loads epilogues and extensions' programs. The largest forward pass is compiled unless its needs are
        stored; the other forward passes are assumed to be as large. num_pages: the probable pages of a replica's pool,
        with which it is compiled. If the pool gets them, it need not be compiled again. None for a small pool.
        """
        programs = self.programs
        kv = programs.kv_shapes(num_pages or programs.num_columns)
        bucket = max(programs.packer.buckets)

        def keep(compiled: Executable) -> None:
            self._made = {(bucket, num_pages): compiled}

        self.begin_others()
        program = programs.forward(bucket, self.params, kv)
        needs = estimate_needs(program, self.executables, programs.description, self._backend, keep)
        of_extensions = [each.estimate(self.params) for each in self.extensions.values()]
        forward = max([needs.workspace, *(workspace for _, workspace in of_extensions)])
        for name, size in programs.epilogue_sizes():
            self.compile_epilogue(name, size)
        for name, program in self.own_programs():
            self.program(name, program)
        sizes = [bucket.num_tokens for bucket in programs.packer.buckets]
        held = sum(needs.held if size >= FEW_TOKENS else needs.held_of_few for size in sizes)
        held += sum(extra for extra, _ in of_extensions) + self._held_beside_forwards
        kept = kept_bytes(forward, self._bytes_of_results(bucket), needs.num_blocks)
        kept = kept_of_step(kept, self._kept_of_epilogues, needs.num_blocks)
        extensions = programs.memory(self.extensions.values())
        return StageNeeds(held, forward + self._bytes_beside_forward, extensions, kept)

    def plan_pool(self, num_pages: int) -> None:
        """Store the pool's size in pages per layer and replica, on which the shapes of forward passes depend, also in
        the extensions; drop passes that were compiled for another size.
        """
        self._kv_shapes = self.programs.kv_shapes(num_pages)
        self._made = {key: compiled for key, compiled in self._made.items() if key[1] == num_pages}
        for each in self.extensions.values():
            each.plan_pool(num_pages)

    def begin_forward(self, bucket: Bucket) -> None:
        """Begin to compile or load what `compile_forward` does (ExecutableCache.begin)."""
        for each in self.extensions.values():
            each.begin(bucket, self.params)
        if not any(key[0] == bucket for key in self._made):
            self._begin(self.programs.forward(bucket, self.params, self._kv_shapes))

    def compile_forward(self, bucket: Bucket) -> None:
        """Compile or load a bucket's forward pass and the programs that extensions run before and after it."""
        for each in self.extensions.values():
            each.compile(bucket, self.params)
        made = next((self._made.pop(key) for key in list(self._made) if key[0] == bucket), None)
        self._forwards[bucket] = self.compiled(self.programs.forward(bucket, self.params, self._kv_shapes), made)

    def begin_others(self) -> None:
        """Begin to compile or load the epilogues and `own_programs` that have not been (ExecutableCache.begin)."""
        for name, size in self.programs.epilogue_sizes():
            if (name, size) not in self._epilogues:
                self._begin(self.programs.epilogue(name, size, self.params))
        for extension, name in self.own_programs():
            if (extension, name) not in self._programs:
                self._begin(self._own_program(extension, name))

    def compile_epilogue(self, name: str, size: int) -> None:
        """Compile or load an epilogue of this size, unless this has been done."""
        if (name, size) not in self._epilogues:
            self._epilogues[name, size] = self.compiled(self.programs.epilogue(name, size, self.params))

    def own_programs(self) -> list[tuple[str, str]]:
        """Return (extension's name, program's name) for each program that extensions run in addition to steps."""
        return [(each.name, own.name) for each in self.programs.extensions for own in each.programs(self.params)]

    def program(self, extension: str, name: str) -> Executable:
        """Return the executable of one of `own_programs`, which is compiled or loaded at the first call. Raises
        KeyError or StopIteration for unknown names.
        """
        if (extension, name) not in self._programs:
            self._programs[extension, name] = self.compiled(self._own_program(extension, name))
        return self._programs[extension, name]

    def allocate(self) -> None:
        """Allocate the pools (`allocate_pools`) and the slot state."""
        self.allocate_pools()
        self._state = self.compiled(self.programs.state())()

    def release_pools(self) -> None:
        """Free the pools and, of the slot state, the sections that go with them (DeviceExtension.is_pool). No step may
        be in flight.
        """
        self._kv, self._waiting = None, self._waiting or []
        freed = {each.name for each in self.programs.extensions if each.is_pool}
        kept = {name: section for name, section in self.slots.sections.items() if name not in freed}
        self.slots = self.slots._replace(sections=kept)
        for each in self.extensions.values():
            each.release()

    def allocate_pools(self) -> None:
        """Allocate empty pools of the size given to `plan_pool`, and the extensions' arrays, for the first time or
        after `release_pools`, and wait for them. Make the state changes that came meanwhile. An 8-bit pool gets
        `kv_scales` if they are set. Raises jax's RuntimeError if there is not enough memory.
        """
        for each in self.extensions.values():
            each.allocate()
        self._kv: Any = self.compiled(self.programs.pool(self._kv_shapes))()
        if self.kv_scales is not None and self.programs.paged_layers:
            k, v = self.kv_scales.of_layers(self.programs.paged_layers)
            k_scale, v_scale = _on_heads(k, self._kv.k_scale), _on_heads(v, self._kv.v_scale)
            self._kv = replace(self._kv, k_scale=k_scale, v_scale=v_scale)
        jax.block_until_ready(self._kv)  # so that a lack of memory is reported here
        give_back_zeros(self._kv.data)
        if self._waiting is not None:
            empty = self.compiled(self.programs.state())().slots.sections
            self.slots = self.slots._replace(sections=jax.block_until_ready(empty | self.slots.sections))
            changes, self._waiting = self._waiting, None
            try:
                while changes:
                    self.change_state(changes[0][0], *changes[0][1])
                    del changes[0]
            finally:
                self._waiting = changes or None  # after an error, until pools are there once more

    def with_programs(self, programs: StepPrograms) -> StageRunner:
        """Return another StageRunner with the same weights and the same kernels to leave out, but these programs, of
        which only the state changes have been compiled or loaded. It has no extensions with weights of their own.
        """
        other = StageRunner(programs, self.params, self._cache_dir)
        other.executables.unused = self.executables.unused
        return other

    def largest(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the largest magnitudes of keys and of values in the pools of all replicas, each f32[layers with pages,
        KV heads]. The latter is None if values are stored within keys. Compiles or loads a program, and waits for the
        steps in flight.
        """
        num_heads = self.programs.model.config.num_kv_heads
        found = self.compiled(self.programs.largest(self._kv_shapes))(self._kv)
        # A KV head may be stored several times. The maximum is over the replicas.
        k, v = (None if x is None else np.asarray(x)[..., :: x.shape[2] // num_heads].max(axis=0) for x in found)
        assert k is not None
        return k, v

    def forward(self, bucket: Bucket, message: np.ndarray, hidden: jax.Array | None) -> Any:
        """Dispatch the stage's part of a forward pass, and return its result: Forwarded in the last stage, otherwise
        StageOutput.

        The pool and the slot state are donated and replaced; `given` becomes the arrays that extensions provide for
        this pass. message: i32[replicas, size]. hidden: the previous stage's hidden states; None in the first stage. A
        pass that was not compiled at start-up is compiled first.
        """
        if bucket not in self._forwards:  # enforce_eager
            self.compile_forward(bucket)
        if self._reads_message:  # sent once for the forward pass and the programs before and after it
            message = jax.device_put(message, self.programs.message_shape(bucket).sharding)
        self.given = {}
        for each in self.extensions.values():
            if (arrays := each.before_forward(bucket, self.params, self._state, message)) is not None:
                self.given[each.name] = arrays
        last_token = None if self._state.tokens is None else self._state.tokens.last_token
        arguments = (self.params, self._kv, self._state.slots, last_token, message, self.given)
        if hidden is not None:
            arguments = (*arguments, self._receive(hidden))
        self._kv, slots, output = self._forwards[bucket](*arguments)
        self._state = self._state._replace(slots=slots)
        return output

    def run_epilogue(self, name: str, size: int, forwarded: Forwarded) -> Any:
        """Dispatch an epilogue of this size on the results of the newest forward pass, and return its output on the
        devices.

        The state that it changes is donated and replaced. The extensions' `before_epilogue` runs before it, and their
        `after_sample` after an epilogue that changes the token state. An epilogue that was not compiled at start-up is
        compiled first. Raises KeyError for a name that this stage lacks.
        """
        epilogue = self.programs.epilogues[name]
        if (name, size) not in self._epilogues:  # enforce_eager
            self.compile_epilogue(name, size)
        for each in self.extensions.values():
            each.before_epilogue(name, self._state, forwarded)
        results = {"rows": forwarded.rows, "logits": forwarded.logits, **forwarded.sections}
        values = {"params": self.params, **self._state._asdict(), **results}
        *changed, output = self._epilogues[name, size](*[values[argument] for argument in epilogue.arguments])
        self._state = self._state._replace(**dict(zip(epilogue.changes, changed, strict=True)))
        if "tokens" in epilogue.changes:
            for each in self.extensions.values():
                each.after_sample(self.params, self._state, forwarded)
        return output

    def change_state(self, name: str, *arguments: Any) -> None:
        """Run a state change on the stage's state, which is donated and replaced. Do nothing if the stage does not have
        the change. On several CPU devices, wait after every MAX_LAUNCHES_AHEAD changes. Without pools the change waits
        for them.

        arguments: numpy arrays with the shapes and dtypes for which the change was compiled.
        """
        if name not in self._changes:
            return
        if self._waiting is not None:
            self._waiting.append((name, tuple(np.array(each) for each in arguments)))
            return
        self._state = self._changes[name](self._state, *arguments)
        self._num_changes += 1
        if self._several_on_cpu and self._num_changes % MAX_LAUNCHES_AHEAD == 0:
            jax.block_until_ready(self._state)

    @property
    def pages(self) -> Any:
        """KV pool as the newest forward pass leaves it."""
        return self._kv

    @pages.setter
    def pages(self, kv: Any) -> None:
        """Replace the KV pool with one of the same shapes."""
        self._kv = kv

    @property
    def slots(self) -> SlotState:
        """Slot state as the newest forward pass leaves it."""
        return self._state.slots

    @slots.setter
    def slots(self, slots: SlotState) -> None:
        """Replace the slot state with one of the same shapes."""
        self._state = self._state._replace(slots=slots)

    def everywhere(self, x: jax.Array) -> jax.Array:
        """Return x [replicas, ...], which is sharded by replica, so that this process can read it: replicated on every
        device if there are several processes, otherwise unchanged.
        """
        return self.programs.gather_ranks(x) if self._several_processes else x

    def _receive(self, hidden: jax.Array) -> jax.Array:
        """Copy the previous stage's hidden states, [replicas * T, D], to this stage's devices."""
        if not self._several_processes:
            return jax.device_put(hidden, self._ranks)
        # In every stage, each process has the same number of devices at the same indices
        # (jaxengine.runner.start.devices).
        assert isinstance(hidden.sharding, NamedSharding) and isinstance(hidden.sharding.mesh, Mesh)
        here = dict(zip(hidden.sharding.mesh.devices.flat, self.programs.mesh.devices.flat, strict=True))
        parts = [jax.device_put(shard.data, here[shard.device]) for shard in hidden.addressable_shards]
        return jax.make_array_from_single_device_arrays(hidden.shape, self._ranks, parts)

    def _own_program(self, extension: str, name: str) -> Program:
        """Return an extension's Program. Raises KeyError or StopIteration for unknown names."""
        programs = self.programs.extension(extension).programs(self.params)
        return next(program for program in programs if program.name == name)

    @property
    def _held_beside_forwards(self) -> int:
        """Bytes on one device that compiled state changes, epilogues and extensions' programs hold."""
        programs = self.programs
        changes = [self.held(change, self._changes[name]) for name, change in programs.state_changes().items()]
        epilogues = [self.held(programs.epilogue(*key, self.params), each) for key, each in self._epilogues.items()]
        of_extensions = [self.held(self._own_program(*key), each) for key, each in self._programs.items()]
        return sum(changes) + sum(epilogues) + sum(of_extensions)

    def held(self, program: Program, compiled: Executable) -> int:
        """Return the bytes on one device that a compiled program holds."""
        return held_by(program, compiled, *self._place(program), self._backend)

    @property
    def _bytes_beside_forward(self) -> int:
        """Bytes on one device that may be in use while a forward pass runs, without its own: the slot state, the
        previous step's epilogue with its inputs, and a program of an extension.
        """
        epilogues = [
            self.programs.forwarded_bytes(*key) + workspace_bytes(epilogue.memory_analysis())
            for key, epilogue in self._epilogues.items()
        ]
        of_extensions = [workspace_bytes(program.memory_analysis()) for program in self._programs.values()]
        return self.programs.slot_bytes + max(epilogues, default=0) + max(of_extensions, default=0)

    @property
    def _kept_of_epilogues(self) -> int:
        """Most bytes kept after an epilogue: `kept_bytes` of its workspace, and the results of a forward pass that it
        takes. 0 without epilogues.
        """
        kept = (
            self.programs.forwarded_bytes(*key) + kept_bytes(workspace_bytes(epilogue.memory_analysis()))
            for key, epilogue in self._epilogues.items()
        )
        return max(kept, default=0)

    def _bytes_of_results(self, bucket: Bucket) -> int:
        """Bytes on one device of a forward pass's results, without the donated ones."""
        return sum(map(part_bytes, jax.tree.leaves(self.programs.forwarded(bucket))))

    def compiled(self, program: Program, made: Executable | None = None) -> Executable:
        """Compile or load a program of this stage, at every call, and return the executable. Raises the errors of
        ExecutableCache.get. made: as there.
        """
        cache, description = self._place(program)
        return program.given_to(cache.get, description, made=made)

    def _begin(self, program: Program) -> None:
        """Begin to compile or load a program of this stage, so that `compiled` finds it (ExecutableCache.begin)."""
        cache, description = self._place(program)
        program.given_to(cache.begin, description)

    def _place(self, program: Program) -> tuple[ExecutableCache, str]:
        """Return the cache that has a program, and the description that is part of the program's key in it. Programs
        that do not depend on the model are in a shared cache.
        """
        if program.of_model:
            return self.executables, self.programs.description
        return self._shared, self.programs.shared_description


def memory_needs(
    stages: Sequence[StageRunner], config: ResolvedConfig, num_pages: int | None = None
) -> list[StageNeeds]:
    """Return the estimated memory needs of each stage's programs on a device, before the pools' sizes are known.

    If options fix the number of pages, and without enforce_eager, nothing is compiled and programs count as 0. The
    needs are then only the memory of extensions. num_pages: as in StageRunner.estimate_needs.
    """
    skip = config.fixes_pages and not config.enforce_eager
    held = [stage.programs.memory(stage.extensions.values()) for stage in stages]
    return [
        StageNeeds(0, 0, own) if skip else stage.estimate_needs(num_pages)
        for stage, own in zip(stages, held, strict=True)
    ]


def _on_heads(scales: np.ndarray | None, like: jax.Array | None) -> jax.Array | None:
    """Return scales f32[layers, K] as an array with the shape and sharding of `like`, the pool's scales, in which a KV
    head may be stored several times; None if either is None.
    """
    if scales is None or like is None:
        return None
    scales = np.repeat(scales, like.shape[1] // scales.shape[1], axis=1)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: scales[index])
