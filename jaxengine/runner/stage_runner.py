"""One pipeline stage on its devices: weights, KV pool, state of the slots, and the compiled programs.

An engine without pipeline parallelism is one stage. Knows rows and messages, nothing of requests.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxengine.drafts.proposer import Drafts
from jaxengine.runner.drafter import Drafter
from jaxengine.runner.encoder import PLACE, EncoderInput, PlaceInput
from jaxengine.runner.encoder_programs import EncoderPrograms
from jaxengine.runner.executables import ExecutableCache
from jaxengine.runner.heads import HEADS
from jaxengine.runner.memory import StageNeeds, device_memory, memory_in_use, workspace_bytes
from jaxengine.runner.parts import LEAST_TOKENS, Executable
from jaxengine.runner.program import Program
from jaxengine.runner.program_needs import foresee, held_by
from jaxengine.runner.step import Forwarded
from jaxengine.runner.step_programs import StepPrograms, known_tokens
from models.weights.kv_scales import KVScales
from models.weights.lora_pools import Matrices, slot_values
from scheduler.buckets import Bucket
from sharding.rules import named_sharding, part_bytes

logger = logging.getLogger(__name__)


class StageRunner:
    """Compiles on demand, allocates when told the number of pages (`plan_pool`, `allocate`), then only executes.

    Attributes:
      kv_scales: what the pool's codes stand for, of all layers of the model; to be set before `allocate`.
      drafter: the draft model, if there is one.
    """

    def __init__(self, programs: StepPrograms, params: Any, cache_dir: str | None, drafter: Drafter | None = None):
        """params: the model's weights, an nnx.State or its leaves."""
        self.programs = programs
        self.drafter = drafter
        self.drafts: Drafts | None = None
        self.kv_scales: KVScales | None = None
        self._cache_dir = cache_dir
        self._backend = programs.mesh.devices.flat[0].platform
        devices = list(programs.mesh.devices.flat)
        self._several_processes = len({device.process_index for device in devices}) > 1
        if self._several_processes and devices[0].platform != "cpu" and cache_dir != "":
            logger.info("compiled steps over several processes are not kept on disk: tried on the CPU only")
            cache_dir = ""
        self.executables = ExecutableCache(cache_dir, devices, family=type(programs.model))
        self._ranks = named_sharding(programs.mesh, ("batch",))
        self._params = jax.tree.leaves(params)
        self._forwards: dict[Bucket, Executable] = {}
        self._heads: dict[tuple[str, int], Executable] = {}
        self._encoders: dict[int, Executable] = {}
        self._changes = {name: self._compile(change) for name, change in programs.state_changes().items()}
        write = programs.write_adapter(self._params) if programs.adapter_pools else None
        self._write_adapter = None if write is None else self._compile(write)

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
        return sum(map(part_bytes, self._params)) + (0 if self.drafter is None else self.drafter.weight_bytes)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device, in all layers of a group and in the draft model."""
        return self.programs.page_bytes + (0 if self.drafter is None else self.drafter.programs.page_bytes)

    @property
    def caches(self) -> list[ExecutableCache]:
        """Where its programs come from."""
        return [self.executables] if self.drafter is None else [self.executables, self.drafter.executables]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of one device that the largest forward pass and head, which have been compiled, need while they run."""
        forward = workspace_bytes(self._forwards[max(self._forwards)].memory_analysis())
        if self.drafter is not None:
            forward = max(forward, self.drafter.workspace_bytes)
        return forward + self._bytes_beside_forward

    @property
    def program_bytes(self) -> int:
        """Bytes of one device that all programs hold, which have been compiled."""
        programs, kv = self.programs, self._kv_shapes
        forwards = [self._held(programs.forward(key, self._params, kv), own) for key, own in self._forwards.items()]
        drafts = 0 if self.drafter is None else self.drafter.program_bytes
        return sum(forwards) + drafts + self._held_beside_forwards

    def foresee_needs(self) -> StageNeeds:
        """The most that programs will need, before the pool's size is known.

        A small pool stands in for it in the largest forward pass, and the others are taken to be as large.
        """
        programs = self.programs
        kv = programs.kv_shapes(programs.num_columns)
        program = programs.forward(max(programs.packer.buckets), self._params, kv)
        needs = foresee(program, self.executables, programs.description, self._backend)
        of_drafts, drafts = (0, 0) if self.drafter is None else self.drafter.foresee_needs(self._params)
        forward = max(needs.workspace, drafts)
        for name, size in programs.heads():
            self.compile_head(name, size)
        if programs.encoder is not None:
            for size in programs.encoder.layout.programs:
                self.compile_encoder(size)
        sizes = [bucket.num_tokens for bucket in programs.packer.buckets]
        held = sum(needs.held if size >= LEAST_TOKENS else needs.held_as_whole for size in sizes)
        held += of_drafts + self._held_beside_forwards
        return StageNeeds(held, forward + self._bytes_beside_forward, programs.state_bytes, self.encoder_bytes)

    def plan_pool(self, num_pages: int) -> None:
        """Decides the pool's size, pages of a layer and rank, and with it the shapes of forward passes."""
        self._kv_shapes = self.programs.kv_shapes(num_pages)
        if self.drafter is not None:
            self.drafter.plan_pool(num_pages)

    def compile_forward(self, bucket: Bucket) -> None:
        """Compiles or loads a bucket's forward pass, and what a draft model does before it."""
        if self.drafter is not None:
            self.drafter.compile(bucket, self._params)
        self._forwards[bucket] = self._compile(self.programs.forward(bucket, self._params, self._kv_shapes))

    def compile_head(self, name: str, size: int) -> None:
        """Compiles or loads a head, unless that has been done."""
        if (name, size) not in self._heads:
            self._heads[name, size] = self._compile(self.programs.head(name, size, self._params))

    def compile_encoder(self, size: int) -> None:
        """Compiles or loads one of EncoderLayout.programs, unless that has been done."""
        if size not in self._encoders:
            self._encoders[size] = self._compile(self._encoder_programs.program(size, self._params))

    def allocate(self) -> None:
        """Makes the pools and the state of the slots."""
        if self.drafter is not None:
            self.drafter.allocate()
        if self.programs.encoder is not None:
            self._encoder_rows = self._compile(self.programs.encoder.pool())()
        self._kv = self._compile(self.programs.pool(self._kv_shapes))()
        if self.kv_scales is not None:
            k, v = self.kv_scales.of_layers(self.programs.paged_layers)
            k_scale, v_scale = _on_heads(k, self._kv.k_scale), _on_heads(v, self._kv.v_scale)
            self._kv = replace(self._kv, k_scale=k_scale, v_scale=v_scale)
        self._state = self._compile(self.programs.state())()

    def with_programs(self, programs: StepPrograms) -> StageRunner:
        """Another one of the same weights, where nothing has been compiled."""
        return StageRunner(programs, self._params, self._cache_dir)

    def largest(self) -> tuple[np.ndarray, np.ndarray | None]:
        """The largest magnitudes of keys and of values that the pool holds, f32[layers with pages, K] each; None of
        values that lie in keys."""
        num_heads = self.programs.model.config.num_kv_heads
        found = self._compile(self.programs.largest(self._kv_shapes))(self._kv)
        # A head may be stored several times; every rank has pages of its own.
        k, v = (None if x is None else np.asarray(x)[..., :: x.shape[2] // num_heads].max(axis=0) for x in found)
        assert k is not None
        return k, v

    def forward(self, bucket: Bucket, message: np.ndarray, hidden: jax.Array | None) -> Any:
        """Dispatches the stage's part of a forward pass: hidden states for the next stage, or Forwarded."""
        if bucket not in self._forwards:  # enforce_eager: compiled when it first occurs
            self.compile_forward(bucket)
        if self.drafter is not None:
            # Sent once for the programs before, of and behind the forward pass.
            sent: Any = jax.device_put(message, self.programs.message_shape(bucket).sharding)
            self.drafts, message = self.drafter.precede(bucket, self._params, self._state, sent), sent
        last_token = known_tokens(self._state.tokens, bucket, self.drafts)
        arguments = (self._params, self._kv, self._state.slots, last_token, message)
        if hidden is not None:
            arguments = (*arguments, self._receive(hidden))
        elif bucket.sections:
            arguments = (*arguments, self._encoder_rows)
        self._kv, slots, output = self._forwards[bucket](*arguments)
        self._state = self._state._replace(slots=slots)
        return output

    def encode(self, pictures: EncoderInput) -> None:
        """Dispatches the encoding of pictures, whose embeddings the next forward pass finds in the pool."""
        size = pictures.patches.shape[1]
        self.compile_encoder(size)  # enforce_eager: when it first occurs
        self._encoder_rows = self._encoders[size](self._params, self._encoder_rows, *pictures)

    def place(self, embeddings: PlaceInput) -> None:
        """Dispatches the placing of embeddings that came as such."""
        self.compile_encoder(PLACE)
        self._encoder_rows = self._encoders[PLACE](self._encoder_rows, *embeddings)

    def run_head(self, name: str, size: int, forwarded: Forwarded) -> Any:
        """Dispatches a head of that size on what a forward pass left; its output."""
        head = HEADS[name]
        if (name, size) not in self._heads:  # enforce_eager
            self.compile_head(name, size)
        values = {"params": self._params, **self._state._asdict(), **forwarded._asdict()}
        *changed, output = self._heads[name, size](*[values[argument] for argument in head.arguments])
        self._state = self._state._replace(**dict(zip(head.changes, changed, strict=True)))
        if self.drafter is not None and "tokens" in head.changes:
            self.drafter.follow(self._params, self._state, forwarded)
        return output

    def change_state(self, name: str, *arguments: Any) -> None:
        """Runs one of STATE_CHANGES, if this stage has it."""
        if name in self._changes:
            self._state = self._changes[name](self._state, *arguments)

    def put_adapter(self, matrices: Matrices) -> list[jax.Array]:
        """What an adapter has of each pool here, on the devices; any thread may call it."""
        pools, spec = self.programs.adapter_pools, self.programs.model.build.lora
        assert spec is not None
        places = [self._params[pool.index].sharding for pool in pools]
        return jax.device_put([slot_values(pool, spec, matrices) for pool in pools], places)

    def write_adapter(self, slot: int, values: list[jax.Array]) -> None:
        """Dispatches that a slot of the pools holds what `put_adapter` gave."""
        assert self._write_adapter is not None
        indexes = [pool.index for pool in self.programs.adapter_pools]
        written = self._write_adapter([self._params[index] for index in indexes], np.int32(slot), values)
        for index, array in zip(indexes, written, strict=True):
            self._params[index] = array

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
    def encoder_bytes(self) -> int:
        """Bytes of one device that the embeddings of pictures take."""
        return 0 if self.programs.encoder is None else part_bytes(self.programs.encoder.rows)

    @property
    def _encoder_programs(self) -> EncoderPrograms:
        assert self.programs.encoder is not None
        return self.programs.encoder

    @property
    def _held_beside_forwards(self) -> int:
        changes = [self._held(change, self._changes[name]) for name, change in self.programs.state_changes().items()]
        heads = [self._held(self.programs.head(*key, self._params), head) for key, head in self._heads.items()]
        own = self._write_adapter
        write = 0 if own is None else self._held(self.programs.write_adapter(self._params), own)
        encoders = [
            self._held(self._encoder_programs.program(size, self._params), encoder)
            for size, encoder in self._encoders.items()
        ]
        return sum(changes) + sum(heads) + write + sum(encoders)

    def _held(self, program: Program, compiled: Executable) -> int:
        """Bytes that a compiled program holds."""
        return held_by(program, compiled, self.executables, self.programs.description, self._backend)

    @property
    def _bytes_beside_forward(self) -> int:
        """The state but for that of layers, and the most that a head of the step before and what it works on, and
        pictures that are being encoded, can hold meanwhile."""
        heads = [
            self.programs.forwarded_bytes(*key) + workspace_bytes(head.memory_analysis())
            for key, head in self._heads.items()
        ]
        encoders = [workspace_bytes(encoder.memory_analysis()) for encoder in self._encoders.values()]
        state = sum(map(part_bytes, jax.tree.leaves(self.programs.state_shapes)))
        return state - self.programs.state_bytes + max(heads, default=0) + max(encoders, default=0)

    def _compile(self, program: Program) -> Executable:
        return self.executables.get(
            program.name,
            program.function,
            program.arguments,
            program.results,
            donate=program.donate,
            description=self.programs.description,
        )


def _on_heads(scales: np.ndarray | None, like: jax.Array | None) -> jax.Array | None:
    """f32[layers, K] in the places of others, which may hold a head several times."""
    if scales is None or like is None:
        return None
    scales = np.repeat(scales, like.shape[1] // scales.shape[1], axis=1)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: scales[index])
