"""Draft model or draft head on the devices of its target model: weights, KV pool and compiled programs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxengine.drafts.proposer import Drafts
from jaxengine.models.cache import KVPages
from jaxengine.models.params.declare import declared_params
from jaxengine.models.weights.formats.arrays import on_host
from jaxengine.runner.base.device_state import DeviceState
from jaxengine.runner.base.extension import StageExtension
from jaxengine.runner.base.memory import workspace_bytes
from jaxengine.runner.base.program import Program
from jaxengine.runner.executables.cache import ExecutableCache, Place
from jaxengine.runner.executables.layer_chain import Executable
from jaxengine.runner.extensions.drafts.programs import DraftPrograms
from jaxengine.runner.extensions.drafts.section import NAME
from jaxengine.runner.programs.program_needs import estimate_needs, held_by
from jaxengine.runner.programs.step import Forwarded
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.sharding.rules import part_bytes


class Drafter(StageExtension):
    """Stage extension that runs a draft model or head before and after the forward passes of a StageRunner.

    The leaves of the target model are passed with each call, because adapters change them.

    Attributes:
      programs: of the draft model or head.
      models: the draft model or head alone, abstract.
      params: leaves of the draft model, which new weights replace in place.
      executables: cache of its compiled programs.
    """

    name, prefix = NAME, "draft"
    reads_message = True

    def __init__(self, programs: DraftPrograms, params: Any, place: Place):
        """Store the programs and weights, and open the cache of executables; nothing is compiled. params: weights of
        the draft model or head, an nnx.State or its leaves, on the target's mesh.

        place: of the ExecutableCache, whose ConfigError is raised.
        """
        self.programs = programs
        self.models = [programs.model]
        devices = list(programs.target.mesh.devices.flat)
        self._backend = devices[0].platform
        self.params = jax.tree.leaves(params)
        self.executables = ExecutableCache(place, devices, family=type(programs.model))
        self._programs: dict[tuple[str, Bucket], Program] = {}
        self._compiled: dict[tuple[str, Bucket], Executable] = {}
        self._newest: tuple[Bucket, jax.Array] | None = None

    @property
    def caches(self) -> Sequence[ExecutableCache]:
        return [self.executables]

    @property
    def page_bytes(self) -> int:
        return self.programs.page_bytes

    @property
    def fills_after_sample(self) -> bool:
        """Whether the draft model is a head, which runs once a step's tokens have been sampled."""
        return self.programs.fills_after_sample

    @property
    def weight_bytes(self) -> int:
        """Bytes on one device of the draft model's weights."""
        return sum(map(part_bytes, self.params))

    def memory(self) -> Mapping[str, int]:
        return self.programs.memory()

    @property
    def workspace_bytes(self) -> int:
        """Workspace in bytes on one device of the program that needs most; all programs must have been compiled."""
        return max(workspace_bytes(compiled.memory_analysis()) for compiled in self._compiled.values())

    @property
    def program_bytes(self) -> int:
        how = self.executables, self.programs.description, self._backend
        return sum(held_by(self._programs[key], own, *how) for key, own in self._compiled.items())

    def estimate(self, params: Sequence[Any]) -> tuple[int, int]:
        """Estimate (bytes that all programs will hold, largest workspace in bytes) from the largest program before and
        after a forward pass, with and without drafts, which is compiled with a small pool unless its needs are stored.

        params: the leaves of the target model.
        """
        target = self.programs.target
        weights, kept = self.programs.weights(self.params, params), self.programs.kept_shapes(target.num_columns)
        wide = set(target.packer.buckets.wide)
        held, workspace = 0, 0
        for buckets in ([bucket for bucket in target.packer.buckets if bucket not in wide], sorted(wide)):
            for make in (self.programs.before, self.programs.after):
                if (program := make(max(buckets), weights, kept)) is not None:
                    own = estimate_needs(program, self.executables, self.programs.description, self._backend)
                    held, workspace = held + len(buckets) * own.held_of_few, max(workspace, own.workspace)
        return held, workspace

    def plan_pool(self, num_pages: int) -> None:
        """Store the shapes of the draft model's pool, of num_pages pages of a replica, and of its states of slots."""
        self._shapes = self.programs.kept_shapes(num_pages)

    def page_shapes(self, num_pages: int) -> KVPages:
        return self.programs.pages_of(self.programs.kept_shapes(num_pages))

    @property
    def pages(self) -> KVPages:
        """The draft model's pool as the newest step leaves it."""
        return self.programs.pages_of(self._kept)

    @pages.setter
    def pages(self, pages: KVPages) -> None:
        """Replace the draft model's pool with one of the same shapes."""
        self._kept = self.programs.with_pages(self._kept, pages)

    def describe_pages(self) -> str:
        """Return what the content of pages depends on: the programs' text of it, and the SHA-256, in hex, of the draft
        model's weights, all of which are read, without matrices of no expert: their number depends on the devices.
        """
        weights = hashlib.sha256()
        for param, array in zip(declared_params(self.programs.model), self.params, strict=True):
            own = on_host(array)[tuple(map(slice, param.own_shape))]
            weights.update(np.ascontiguousarray(own).tobytes())
        return f"{self.programs.pages_description} {weights.hexdigest()}"

    def begin(self, bucket: Bucket, params: Sequence[Any]) -> None:
        weights = self.programs.weights(self.params, params)
        for program in self.programs.of_bucket(bucket, weights, self._shapes).values():
            program.given_to(self.executables.begin, self.programs.description)

    def compile(self, bucket: Bucket, params: Sequence[Any]) -> None:
        weights = self.programs.weights(self.params, params)
        for when, program in self.programs.of_bucket(bucket, weights, self._shapes).items():
            self._programs[when, bucket] = program
            self._compiled[when, bucket] = program.given_to(self.executables.get, self.programs.description)

    def allocate(self) -> None:
        """Allocate the arrays that the draft model holds between steps: its pool and its states of slots. `plan_pool`
        must have been called.
        """
        start = self.programs.start(self._shapes)
        self._kept = start.given_to(self.executables.get, self.programs.description)()

    def release(self) -> None:
        """Free the pool and the states of slots."""
        self._kept = None

    def before_forward(
        self, bucket: Bucket, params: Sequence[Any], state: DeviceState, message: jax.Array
    ) -> Drafts | None:
        """Dispatch the draft program that precedes a bucket's forward pass, if any; return the drafts of a wide bucket,
        else None.

        params: the target model's leaves. state: DeviceState before the step. message: message of the step,
        i32[replicas, size] on the devices, which is stored for `after_sample`.
        """
        self._newest = bucket, message
        if ("before", bucket) not in self._compiled:
            return None
        weights = self.programs.weights(self.params, params)
        results = self._compiled["before", bucket](weights, self._kept, state, message)
        self._kept, drafts = (results, None) if bucket.width == 1 else results
        return drafts

    def after_sample(self, params: Sequence[Any], state: DeviceState, forwarded: Forwarded) -> None:
        """Dispatch the draft head's pass over the tokens just sampled; nothing for a draft model.

        params: the target model's leaves. state: DeviceState after the sampler. forwarded: the results that the forward
        pass has left.
        """
        assert self._newest is not None
        bucket, message = self._newest
        if ("after", bucket) in self._compiled:
            weights = self.programs.weights(self.params, params)
            step = forwarded.rows, forwarded.sections[NAME], message
            self._kept = self._compiled["after", bucket](weights, self._kept, state, *step)
