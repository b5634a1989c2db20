"""A draft model on the devices of the model that it drafts for: weights, its pool, and its compiled programs."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxengine.drafts.proposer import Drafts
from jaxengine.runner.device_state import DeviceState
from jaxengine.runner.draft_programs import DraftPrograms
from jaxengine.runner.executables import ExecutableCache
from jaxengine.runner.memory import workspace_bytes
from jaxengine.runner.program import Program
from jaxengine.runner.program_needs import foresee, held_by
from scheduler.buckets import Bucket
from sharding.rules import part_bytes


class Drafter:
    """Runs before each forward pass of a StageRunner, which decides sizes and order."""

    def __init__(self, programs: DraftPrograms, params: Any, cache_dir: str | None):
        """params: the draft model's weights, an nnx.State or its leaves."""
        self.programs = programs
        devices = list(programs.target.mesh.devices.flat)
        self._backend = devices[0].platform
        self.executables = ExecutableCache(cache_dir, devices, family=type(programs.model))
        self._params = jax.tree.leaves(params)
        self._compiled: dict[Bucket, jax.stages.Compiled] = {}

    @property
    def weight_bytes(self) -> int:
        """Of one device."""
        return sum(map(part_bytes, self._params))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of one device that the program which needs most needs while it runs; all have been compiled."""
        return max(workspace_bytes(compiled.memory_analysis()) for compiled in self._compiled.values())

    @property
    def program_bytes(self) -> int:
        """Bytes of one device that all programs hold, which have been compiled."""
        how = self.executables, self.programs.description, self._backend
        return sum(held_by(self._program(bucket), own, *how) for bucket, own in self._compiled.items())

    def foresee_needs(self) -> tuple[int, int]:
        """Bytes that all programs will hold, and that one will need while it runs: by the largest of each kind."""
        buckets, kv = self.programs.target.packer.buckets, self.programs.kv_shapes(self.programs.target.num_columns)
        wide = set(buckets.wide)
        held, workspace = 0, 0
        for kind in ([bucket for bucket in buckets if bucket not in wide], buckets.wide):
            program = self.programs.beside(max(kind), self._params, kv)
            own_held, own = foresee(program, self.executables, self.programs.description, self._backend)
            held, workspace = held + len(kind) * own_held, max(workspace, own)
        return held, workspace

    def plan_pool(self, num_pages: int) -> None:
        """Decides the pool's size, pages of a rank."""
        self._kv_shapes = self.programs.kv_shapes(num_pages)

    def compile(self, bucket: Bucket) -> None:
        """Compiles or loads what runs before a bucket's forward pass."""
        self._compiled[bucket] = self._get(self._program(bucket))

    def allocate(self) -> None:
        """Makes the pool."""
        self._kv = self._get(self.programs.pool(self._kv_shapes))()

    def precede(self, bucket: Bucket, state: DeviceState, message: np.ndarray) -> Drafts | None:
        """Dispatches what is done before a bucket's forward pass; the drafts of a wide one."""
        if bucket not in self._compiled:  # enforce_eager: compiled when it first occurs
            self.compile(bucket)
        run = self._compiled[bucket]
        assert state.tokens is not None
        if bucket.width == 1:
            self._kv = run(self._params, self._kv, state.slots, state.tokens.last_token, message)
            return None
        self._kv, drafts = run(self._params, self._kv, state.slots, state.tokens, state.sampling, message)
        return drafts

    def _program(self, bucket: Bucket) -> Program:
        return self.programs.beside(bucket, self._params, self._kv_shapes)

    def _get(self, program: Program) -> jax.stages.Compiled:
        how = {"donate": program.donate, "description": self.programs.description}
        return self.executables.get(program.name, program.function, program.arguments, program.results, **how)
