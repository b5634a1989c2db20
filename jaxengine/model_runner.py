"""The device side of the engine: weights, KV pool, slot state, and one compiled step per bucket.

Serving calls nothing but the executables made at start-up, and an executable refuses any other shape, so nothing can
compile while serving. Knows rows and messages; of requests only the sampling parameters of a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxengine import sampler
from jaxengine.compile_watch import CompileWatch
from jaxengine.config import Platform, ResolvedConfig
from jaxengine.executables import ExecutableCache, compile_program
from jaxengine.logprobs import TokenLogprobs
from jaxengine.memory import MemoryPlan, device_memory, plan_memory, workspace_bytes
from jaxengine.step import SlotState, StepOutput, init_state, write_page_deltas
from jaxengine.step_programs import StepPrograms
from models.causal_lm import CausalLM
from models.kv_cache import make_kv
from scheduler.buckets import Bucket
from scheduler.packing import StepInput, delta_chunks

# Requests whose parameters one message can bring, and page-table entries of one overflow message.
_PARAM_ROWS = 8
_OVERFLOW_DELTAS = 1024

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class PendingStep:
    """A dispatched step, its results possibly still being computed."""

    output: StepOutput
    bucket: Bucket
    num_rows: int

    def token_ids(self) -> np.ndarray:
        """i32[num_rows]; waits for the step."""
        return np.asarray(self.output.sample.token_ids)[: self.num_rows]

    def logprobs(self) -> sampler.SampleOutput:
        """The sampled rows' logprobs as numpy arrays."""
        return jax.tree.map(np.asarray, self.output.sample)

    def prompt_logprobs(self) -> TokenLogprobs:
        """The prompt tokens' logprobs as numpy arrays."""
        return jax.tree.map(np.asarray, self.output.prompt)


class ModelRunner:
    """Compiles at construction, then only executes.

    Attributes:
      plan: what the memory is used for.
      compiles: what XLA compiled while the engine was serving.
      executables: what start-up compiled and loaded.
    """

    def __init__(
        self,
        model: CausalLM,
        params: nnx.State,
        config: ResolvedConfig,
        platform: Platform,
        *,
        progress: Progress | None = None,
    ):
        """model is abstract, params its weights, config resolved; progress(done, total, what) is called per program."""
        self.config = config
        self._programs = programs = StepPrograms(model, config, platform)
        self.packer = programs.packer
        self.executables = ExecutableCache(config.compile_cache_dir)
        self.compiles = CompileWatch()
        self.vocab_size = model.config.vocab_size
        self._params = jax.tree.leaves(params)
        self.plan = self._plan_memory()
        self._kv_shapes = programs.kv_shapes(self.plan.num_pages)
        self._steps: dict[Bucket, jax.stages.Compiled] = {}
        self._warm_up(progress or (lambda done, total, what: None))
        self._kv = make_kv(model, self.plan.num_pages, **programs.paging)
        self._state = init_state(config.max_num_seqs, programs.num_columns, self.vocab_size)
        self._has_bias = np.zeros(config.max_num_seqs, np.bool_)

    @property
    def buckets(self):
        return self.packer.buckets

    def execute(self, step: StepInput, num_rows: int) -> PendingStep:
        """Dispatches a step; does not wait for it."""
        for deltas in delta_chunks(step.overflow, _OVERFLOW_DELTAS, self.buckets.max_num_seqs):
            self._state = self._write_deltas(self._state, deltas)
        compiled = self._steps.get(step.bucket)
        if compiled is None:  # enforce_eager: compiled when it first occurs
            compiled = self._steps[step.bucket] = self._compile_step(step.bucket)
        self._kv, self._state, output = compiled(self._params, self._kv, self._state, step.buffer)
        return PendingStep(output, step.bucket, num_rows)

    def set_params(self, rows: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """Stores sampling parameters: (slot, ints, floats) as `sampler.param_columns` gives them."""
        for first in range(0, len(rows), _PARAM_ROWS):
            chunk = rows[first : first + _PARAM_ROWS]
            slots = np.full(_PARAM_ROWS, self.buckets.max_num_seqs, np.int32)
            ints = np.zeros((_PARAM_ROWS, 3), np.int32)
            floats = np.zeros((_PARAM_ROWS, 6), np.float32)
            for index, (slot, slot_ints, slot_floats) in enumerate(chunk):
                slots[index], ints[index], floats[index] = slot, slot_ints, slot_floats
            self._state = self._write_params(self._state, slots, ints, floats)

    def set_bias(self, slot: int, row: np.ndarray | None) -> None:
        """Sets a slot's additive logit bias, f32[V]; None for no bias."""
        if row is None and not self._has_bias[slot]:
            return
        self._has_bias[slot] = row is not None
        row = np.zeros(self.vocab_size, np.float32) if row is None else row
        self._state = self._set_bias_row(self._state, np.int32(slot), row)

    def set_token_counts(self, slot: int, prompt: np.ndarray, output: np.ndarray) -> None:
        """Tells penalties what a slot's prompt and output hold so far."""
        counts = 2 * np.bincount(output, minlength=self.vocab_size).astype(np.int32)
        counts[prompt] |= 1
        self._state = self._set_counts_row(self._state, np.int32(slot), counts)

    def _plan_memory(self) -> MemoryPlan:
        weights = sum(array.nbytes for array in self._params)
        state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._programs.state_shapes))
        return plan_memory(
            self.config,
            total=device_memory(jax.devices()[0]),
            weights=weights,
            workspace=self._measure_workspace() + state,
            page_bytes=self._programs.page_bytes,
        )

    def _measure_workspace(self) -> int:
        """Temporary bytes of the largest step. They hardly depend on the pool, so a small one stands in for it."""
        programs, bucket = self._programs, max(self.buckets)
        arguments = programs.arguments(bucket, self._params, programs.kv_shapes(programs.num_columns))

        def measure() -> int:
            lowered = jax.jit(programs.step(bucket), donate_argnums=(1, 2)).lower(*arguments)
            analysis = compile_program(lowered, jax.default_backend()).memory_analysis()
            assert analysis is not None, "this platform does not tell what a program needs"
            return workspace_bytes(analysis)

        return self.executables.get_number("workspace", arguments, programs.description, measure)

    def _compile_step(self, bucket: Bucket) -> jax.stages.Compiled:
        programs = self._programs
        output: Any = StepOutput(_like(sampler.SampleOutput), _like(TokenLogprobs))
        return self.executables.get(
            str(bucket),
            programs.step(bucket),
            programs.arguments(bucket, self._params, self._kv_shapes),
            (self._kv_shapes, programs.state_shapes, output),
            donate=(1, 2),
            description=programs.description,
        )

    def _warm_up(self, progress: Progress) -> None:
        """Makes every executable serving can need, smallest steps last so that the costly ones show early."""
        int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
        rows, vocab = _PARAM_ROWS, self.vocab_size

        def shape(*dims: int, dtype: np.dtype = int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dims, dtype)

        self._write_deltas = self._state_program("page deltas", write_page_deltas, shape(3, _OVERFLOW_DELTAS))
        self._write_params = self._state_program(
            "parameters",
            _on_sampling(sampler.write_params),
            shape(rows),
            shape(rows, 3),
            shape(rows, 6, dtype=float32),
        )
        self._set_bias_row = self._state_program(
            "bias row", _on_sampling(sampler.set_bias_row), shape(), shape(vocab, dtype=float32)
        )
        self._set_counts_row = self._state_program(
            "counts row", _on_sampling(sampler.set_counts_row), shape(), shape(vocab)
        )
        buckets = [] if self.config.enforce_eager else sorted(self.buckets, reverse=True)
        for index, bucket in enumerate(buckets):
            progress(index, len(buckets), str(bucket))
            self._steps[bucket] = self._compile_step(bucket)
        progress(len(buckets), len(buckets), "ready")

    def _state_program(self, name: str, function: Callable, *arguments: Any) -> jax.stages.Compiled:
        shapes = self._programs.state_shapes
        return self.executables.get(name, function, (shapes, *arguments), shapes, donate=(0,))


def _like(fields: Any) -> Any:
    """A value of a NamedTuple class, for its structure only."""
    return fields(*range(len(fields._fields)))


def _on_sampling(function: Callable) -> Callable:
    """A change of the sampling parameters as a change of the slot state."""

    def apply(state: SlotState, *arguments: jax.Array) -> SlotState:
        return state._replace(sampling=function(state.sampling, *arguments))

    return apply
