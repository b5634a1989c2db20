"""Device side of the engine: ModelRunner, which executes steps on all pipeline stages of a model.

Serving calls only executables that were made at start-up. An executable refuses any other shape: nothing compiles while
serving. Slots are numbered over all replicas: replica * max_num_seqs + the replica's own slot number. This module
handles rows and messages; all that it gets of a request are the sampling parameters of its slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import numpy as np

from jaxengine.config.engine_config import ConfigError, ResolvedConfig
from jaxengine.models.cache import product_platform_of
from jaxengine.models.quantization.base.table import weight_rows
from jaxengine.runner.base.extension import Epilogue
from jaxengine.runner.base.memory import MemoryPlan, StageNeeds, heap_bytes, plan_stages, return_free_memory, trim_heap
from jaxengine.runner.compile_watch import CompileWatch
from jaxengine.runner.executables.cache import compiling_ahead
from jaxengine.runner.peers import ALONE, Peers
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.runner.programs.state_changes import (
    BIAS_ROWS,
    COUNTS_ROWS,
    LOGPROB_ID_ROWS,
    NUM_COLUMN_ROWS,
    NUM_DELTAS,
    NUM_LOGPROB_ID_ROWS,
    NUM_LONG_ROWS,
    NUM_PARAM_ROWS,
    PAGE_DELTAS,
    PARAMETERS,
    rows_name,
)
from jaxengine.runner.programs.step import Forwarded
from jaxengine.runner.stage_runner import StageRunner, memory_needs
from jaxengine.runner.warm_up import Progress, num_compile_threads, warm_up
from jaxengine.sampling.state import NEUTRAL
from jaxengine.scheduler.base.token_params import MAX_LOGPROB_TOKEN_IDS
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.scheduler.batches.packing import StepInput, delta_chunks

# Fewer long rows are cheaper one by one, since a message of several is padded to NUM_LONG_ROWS.
MIN_LONG_ROWS = 3


class ModelRunner:
    """Runner that compiles at construction and then only executes. Each process of an engine has one.

    Attributes:
      config: the resolved configuration.
      plan: memory plan of a device. Its pages are those of the stage with the least room for them; its other parts are
        those of the stage that holds most.
      compiles: counter of XLA compilations while the engine serves.
      stages: the pipeline stages in order; `last` is the last one, which samples.
      peers: the engine's other processes.
      packer: packs the messages of steps.
      vocab_size, suppressed_tokens: those of the model's configuration.
      num_ranks: number of replicas.
      windows: for each cache group, how many keys must be kept for a token; None for all.
      weight_rows: for each kind of weight, how it is stored and multiplied.
      extensions: HostExtensions of the optional capabilities that the engine was started with, by name.
    """

    def __init__(
        self,
        stages: Sequence[StageRunner],
        config: ResolvedConfig,
        *,
        progress: Progress | None = None,
        peers: Peers = ALONE,
    ):
        """Compile all programs and allocate memory, and wait until every process has done so. With enforce_eager most
        programs are compiled at their first use instead.

        stages: in order. config: resolved. progress(done, total, what): called for each program. peers: the engine's
        other processes. Raises ConfigError if there is not enough memory, ClusterError if a process is lost.
        """
        self.config = config
        self.packer = stages[0].programs.packer
        self.compiles = CompileWatch()
        model = stages[0].programs.model.config
        self.vocab_size, self.suppressed_tokens = model.vocab_size, model.suppressed_tokens
        self.num_ranks = stages[0].programs.model.mesh.num_ranks
        self.windows = stages[0].programs.windows
        self.stages, self.last, self.peers = stages, stages[-1], peers
        products = product_platform_of(self.device)
        self.weight_rows = weight_rows([stage.programs.model for stage in stages], products)
        for each in [each for stage in stages for each in stage.extensions.values() if each.models]:
            self.weight_rows += weight_rows(list(each.models), products, prefix=f"{each.prefix}: ")
        endings = {bucket: self.last.programs.last_epilogue(bucket) for bucket in self.buckets}
        self._endings = {bucket: (name, self._size(name, bucket)) for bucket, name in endings.items()}
        self._has_bias = np.zeros(self.num_ranks * config.max_num_seqs, np.bool_)
        found = {each.name: each for stage in reversed(stages) for each in stage.programs.extensions}
        self.extensions: dict[str, Any] = {}
        for name, each in found.items():
            if (on_host := each.on_host(self)) is not None:
                self.extensions[name] = on_host
        return_free_memory()
        before = self.memory_in_use()
        shown, late = progress or (lambda done, total, what: None), config.enforce_eager
        threads = num_compile_threads(self.device.platform) if peers is ALONE and not late else 0
        with compiling_ahead([cache for stage in stages for cache in stage.caches], threads) as ahead:
            plan = self._plan_memory(memory_needs(stages, config, self._likely_pages()))
            facts = [(stage.programs.description, sorted(stage.executables.unused)) for stage in stages]
            programs = hashlib.sha256(repr(facts).encode()).hexdigest()
            self.plan = replace(plan, num_pages=peers.agree(plan.num_pages, programs))
            warm_up(stages, self.plan.num_pages, shown, late=late, ahead=ahead)
        return_free_memory()
        if not config.enforce_eager:
            self.plan = self._plan_as_compiled(before)
        for stage in stages:
            stage.allocate()
        for each in () if config.enforce_eager else self.extensions.values():
            each.warm_up()
        trim_heap()
        peers.await_ready()

    @property
    def buckets(self):
        """All step shapes that are compiled, a Buckets."""
        return self.packer.buckets

    @property
    def device(self) -> Any:
        """First device of the first stage."""
        return self.stages[0].programs.mesh.devices.flat[0]

    @property
    def epilogues(self) -> dict[str, Epilogue]:
        """Programs that may run after a step's forward pass, by name."""
        return self.last.programs.epilogues

    def extension(self, name: str) -> Any:
        """Return the HostExtension of a capability. Raises KeyError if the engine was started without it."""
        return self.extensions[name]

    @property
    def num_compiled(self) -> int:
        """Number of programs compiled so far, over all stages."""
        return sum(cache.num_compiled for stage in self.stages for cache in stage.caches)

    @property
    def num_loaded(self) -> int:
        """Number of programs loaded from the cache of executables so far, over all stages."""
        return sum(cache.num_loaded for stage in self.stages for cache in stage.caches)

    @property
    def on_cpu(self) -> bool:
        """Whether the devices share the host's memory (CPU devices)."""
        return self.device.platform == "cpu"

    def memory_in_use(self) -> int:
        """Return the bytes that a device of the first stage holds now. If devices share the host's memory, each counts
        for an equal share of it.
        """
        return self.stages[0].memory_in_use

    def execute(self, step: StepInput) -> PendingStep:
        """Write the page-table entries for which a step's message has no room, dispatch its forward pass, and return
        the pending step without waiting.
        """
        for deltas in delta_chunks(step.overflow, NUM_DELTAS, self.num_ranks * self.packer.num_table_rows):
            self.change_state(PAGE_DELTAS, deltas)
        return self.forward(step.bucket, step.buffer)

    def forward(self, bucket: Bucket, message: np.ndarray) -> PendingStep:
        """Dispatch the forward pass of a message, i32[replicas, size], here and in the engine's other processes, and
        return the pending step without waiting.
        """
        # Engines of several processes have no wide buckets (jaxengine.config.features.speculation).
        sizes = {"num_tokens": bucket.num_tokens, "num_seqs": bucket.num_seqs}
        forwarded = self._everywhere("forward", (message,), lambda: self.run_forward(bucket, message), **sizes)
        return PendingStep(bucket, forwarded, self.fetch, self.last.given)

    def sample(self, pending: PendingStep) -> None:
        """Dispatch the epilogue that ends a step, its sampler or what replaces it, here and in the engine's other
        processes. The step then has `sampled` and no longer `forwarded`.

        It must be called before the next forward pass is dispatched, which reads the sampled tokens.
        """
        pending.sampled = self._run_epilogue(*self._endings[pending.bucket], pending)
        pending.forwarded = None

    def run_epilogue(self, name: str, pending: PendingStep) -> Any:
        """Dispatch the epilogue `name` on the results of the newest forward pass, here and in the engine's other
        processes, and return its output on the devices. pending: the step of that forward pass, which is not changed.
        """
        return self._run_epilogue(name, self._size(name, pending.bucket), pending)

    def _size(self, name: str, bucket: Bucket) -> int:
        """Return the compiled size (number of rows) of the epilogue `name` for a bucket, which it must support."""
        size = self.epilogues[name].size_of(self.buckets, bucket)
        assert size is not None
        return size

    def _run_epilogue(self, name: str, size: int, pending: PendingStep) -> Any:
        """Dispatch the epilogue `name` for `size` rows in all processes, and return its output on the devices."""
        forwarded = pending.forwarded
        assert forwarded is not None
        return self._everywhere(name, (), lambda: self.last.run_epilogue(name, size, forwarded))

    def _everywhere(self, op: str, arrays: Sequence[np.ndarray], function: Callable[[], Any], **fields: Any) -> Any:
        """Call `function`, which dispatches the operation `op` in this process, and return its result. The other
        processes, if any, execute the same operation with these arrays and fields.
        """
        return function() if self.peers is ALONE else self.peers.call(op, arrays, function, **fields)

    def change_state(self, name: str, *arguments: Any) -> None:
        """Run the state change `name` with these arguments on the stages that have it, here and in the engine's other
        processes.
        """
        self._everywhere(
            "change", arguments, lambda: [stage.change_state(name, *arguments) for stage in self.stages], name=name
        )

    def set_params(self, rows: list[tuple[int, np.ndarray]]) -> None:
        """Write sampling parameters to the devices: (slot over all replicas, packed int32 from `row_words`)."""
        self.change_slots(PARAMETERS, rows, NUM_PARAM_ROWS, len(NEUTRAL))

    def set_logprob_ids(self, rows: list[tuple[int, tuple[int, ...]]]) -> None:
        """Write the ids of the tokens whose logprobs slots report to the devices: (slot over all replicas, at most
        MAX_LOGPROB_TOKEN_IDS ids).

        Slots that report no logprobs by id keep the ids of earlier requests, which are not read.
        """
        width = MAX_LOGPROB_TOKEN_IDS
        padded = [
            (slot, np.pad(np.array(ids, np.int32), (0, width - len(ids)), constant_values=-1)) for slot, ids in rows
        ]
        self.change_slots(LOGPROB_ID_ROWS, padded, NUM_LOGPROB_ID_ROWS, width)

    def set_biases(self, biases: list[tuple[int, np.ndarray | None]]) -> None:
        """Write additive logit biases of slots to the devices: (slot over all replicas, f32[V]), or None instead of the
        array for no bias, which is only sent if the slot had one.

        V may be the size of the model's vocabulary or of the padded one. A bias of -inf forbids a token.
        """
        rows = []
        for slot, row in biases:
            if row is not None or self._has_bias[slot]:
                self._has_bias[slot] = row is not None
                rows.append((slot, np.zeros(0, np.float32) if row is None else row))
        self.change_rows(BIAS_ROWS, rows, self.last.programs.vocab_size)

    def set_token_counts(self, sequences: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """Count the tokens in prompts and outputs of slots, and write the counts, which penalties use, to the devices.
        sequences: (slot over all replicas, prompt i32[n], output i32[m]).
        """
        rows = ((slot, self._counts(prompt, output)) for slot, prompt, output in sequences)
        self.change_rows(COUNTS_ROWS, rows, self.last.programs.vocab_size)

    def change_rows(self, name: str, rows: Iterable[tuple[int, np.ndarray]], width: int) -> None:
        """Replace long rows of slots with the state change `name`: NUM_LONG_ROWS at a time, or one by one if fewer than
        MIN_LONG_ROWS remain (see `state_changes.long_rows`).

        rows: (slot over all replicas, row [at most width]); a shorter row is padded with zeros to `width`.
        """
        rows = iter(rows)
        while chunk := list(islice(rows, NUM_LONG_ROWS)):
            size = NUM_LONG_ROWS if len(chunk) >= MIN_LONG_ROWS else 1
            self.change_slots(rows_name(name, size), chunk, size, width)

    def change_slots(self, name: str, rows: Sequence[tuple[int, np.ndarray]], size: int, width: int) -> None:
        """Run the state change `name`, which takes `size` slots and their rows [size, width], as often as needed for
        all rows.

        rows: pairs (slot over all replicas, row [at most width]), whose rows all have one dtype. Shorter rows are
        padded with zeros.
        """
        for first in range(0, len(rows), size):
            slots = np.full(size, len(self._has_bias), np.int32)
            values = np.zeros((size, width), rows[0][1].dtype)
            for index, (slot, row) in enumerate(rows[first : first + size]):
                slots[index], values[index, : len(row)] = slot, row
            self.change_state(name, slots, values)

    def set_column(self, name: str, known: np.ndarray, slots: list[int], values: list[int]) -> None:
        """Send the devices one int32 for each slot whose value differs from the one that they have.

        name: name of the state change. known: i32[slots of all replicas], the values that the devices have; updated in
        place. slots, values: distinct slots over all replicas and their new values, in two lists of equal length.
        """
        changed = [(slot, value) for slot, value in zip(slots, values, strict=True) if known[slot] != value]
        for first in range(0, len(changed), NUM_COLUMN_ROWS):
            rows = np.full((2, NUM_COLUMN_ROWS), len(known), np.int32)
            for index, (slot, value) in enumerate(changed[first : first + NUM_COLUMN_ROWS]):
                rows[:, index] = slot, value
                known[slot] = value
            self.change_state(name, *rows)

    def run_forward(self, bucket: Bucket, message: np.ndarray) -> Forwarded:
        """Dispatch the forward pass through all stages in this process only, and return the last stage's Forwarded with
        the sections of the earlier stages.
        """
        hidden, earlier = None, []
        for stage in self.stages[:-1]:
            hidden, sections = stage.forward(bucket, message, hidden)
            earlier.append(sections)
        output = self.last.forward(bucket, message, hidden)
        return output._replace(earlier=tuple(earlier)) if earlier else output

    def fetch(self, array: jax.Array) -> np.ndarray:
        """Wait for a result and return it as a numpy array."""
        return np.asarray(array) if self.peers is ALONE else self.peers.run(lambda: np.asarray(array))

    def _counts(self, prompt: np.ndarray, output: np.ndarray) -> np.ndarray:
        """Return i32[V]: for each token, 2 * (times in the output) + (1 if it is in the prompt)."""
        counts = 2 * np.bincount(output, minlength=self.vocab_size).astype(np.int32)
        counts[prompt] |= 1
        return counts

    def _plan_memory(self, needs: Sequence[StageNeeds]) -> MemoryPlan:
        """Return the memory plan of the stage that has room for the fewest pages. needs: memory needs of each stage.

        Raises ConfigError if not even one request of max_model_len fits into a stage.
        """
        sizes = [stage.sizes for stage in self.stages]
        shared = jax.local_device_count() if self.on_cpu else 0
        return plan_stages(self.config, sizes, needs, windows=self.windows, shared=shared)

    def _likely_pages(self) -> int | None:
        """Return the pages of a replica's pool if memory does not limit them, so that they do not depend on what
        programs need; None if it may, and with enforce_eager.
        """
        try:
            plan = self._plan_memory([StageNeeds(0, 0)] * len(self.stages))
        except ConfigError:
            return None
        return plan.num_pages if plan.by_need and not self.config.enforce_eager else None

    def _plan_as_compiled(self, before: int) -> MemoryPlan:
        """Return a copy of the plan with the actual memory of the compiled programs, of the stage that holds most. The
        number of pages is unchanged.

        before: bytes of a device in use before any program was compiled. They are only used on CPUs, where the growth
        of the process shows the memory of programs.
        """
        plans = []
        in_use = self.memory_in_use()  # before programs are asked for their sizes, which takes memory
        for stage in self.stages:
            weights, workspace = stage.weight_bytes, stage.workspace_bytes
            heap = heap_bytes(stage.kept_bytes, jax.local_device_count() if self.on_cpu else 0)
            if self.on_cpu:
                process, programs = max(0, before - weights), max(0, in_use - before)
            else:
                process, programs = 0, stage.program_bytes
            sizes = {"weights": weights, "programs": programs, "workspace": workspace}
            sizes |= {"process": process, "heap": heap}
            plans.append(replace(self.plan, **sizes, extensions=stage.programs.memory(stage.extensions.values())))
        return max(plans, key=lambda plan: plan.planned)
