"""Stand-in for the device: takes a step's messages as a ModelRunner does, and answers after the seconds of the costs.

It reads only packed messages, like compiled steps, and the tokens of the trace.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.runner.compile_watch import CompileWatch
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.scheduler.batches.packing import Packer, StepInput
from jaxengine.scheduler.scheduler import Scheduler
from jaxengine.simulate.costs import Costs


class VirtualTime:
    """Clock of a simulation. now: its time in seconds, which the simulation sets."""

    def __init__(self) -> None:
        """Start the clock at 0."""
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the simulation's time in seconds."""
        return self.now


class SimulatedStep:
    """Dispatched step with the interface of PendingStep. Its tokens are known at once, and it is ready at a known time.

    Attributes:
      started, ready_at: simulated times in seconds at which its first stage begins and its last one ends.
      tokens: sampled tokens, i32[replicas, rows].
      attended: f64[2], keys and pairs of its rows, see `costs.Tiles.attended`.
      num_rows: largest number of rows of a replica.
      longest: tokens of its longest row.
      cold: see `Costs.seconds`.
    """

    started = ready_at = cold = 0.0
    longest = 0

    def __init__(self, runner: SimulatedRunner, tokens: np.ndarray):
        """Store the tokens of a step, i32[replicas, rows]. The runner sets the other attributes."""
        self._runner, self.tokens = runner, tokens
        self.attended = np.zeros(2)
        self.num_rows = 0

    def is_ready(self) -> bool:
        """Return whether the simulation's clock has reached `ready_at`."""
        return self._runner.time.now >= self.ready_at

    def token_ids(self) -> np.ndarray:
        """Return the tokens, i32[replicas, rows]; must be called once.

        Advances the clock to `ready_at` if that is later, and adds the host's work after a step to the host's pending
        work.
        """
        time, host = self._runner.time, self._runner.costs.host
        time.now = max(time.now, self.ready_at)
        self._runner.host_is_due(host.after + host.after_row * self.num_rows)
        return self.tokens

    def result(self, name: str) -> np.ndarray | None:
        """Return None: there are no drafts."""
        return None


class SimulatedRunner:
    """Part of a ModelRunner that the engine's loop uses, for text requests without sampling options.

    The other attributes are a ModelRunner's; its vocabulary has 2**31 tokens.

    Attributes:
      costs: seconds of steps.
      time: the simulation's clock, which dispatching, waiting and the host's work advance.
      scheduler: the engine's scheduler, to be set after construction.
      busy: seconds in which the first stage has computed.
    """

    def __init__(
        self, config: ResolvedConfig, packer: Packer, num_pages: int, windows: tuple[int | None, ...], costs: Costs
    ):
        """Create a runner without requests. config: resolved config; its record_trace is ignored. packer, windows:
        those of the engine's steps. num_pages: pages of each replica. `scheduler` must be set before `execute` is
        called.
        """
        self.config = config if config.record_trace is None else replace(config, record_trace=None)
        self.packer, self.costs = packer, costs
        self.num_ranks, self.windows = packer.num_ranks, windows
        self.plan = SimpleNamespace(num_pages=num_pages)
        self.extensions: dict[str, Any] = {}
        self.compiles = CompileWatch()
        self.vocab_size = 1 << 31
        self.time, self.busy = VirtualTime(), 0.0
        self.scheduler: Scheduler | None = None
        self._free_at: list[float] = []
        self._due = 0.0
        self._cold = 0.0
        self._rng = np.random.default_rng(0)
        self._texts: dict[str, np.ndarray] = {}
        self._num_computed = np.zeros(packer.num_slots, np.int64)
        # _outputs: all tokens of a slot's request, if its output tokens differ. _fill: the one token of other slots.
        self._outputs: dict[int, np.ndarray] = {}
        self._fill = np.ones(packer.num_slots, np.int64)

    @property
    def buckets(self):
        """Buckets of the packer."""
        return self.packer.buckets

    def expect(self, request: Request, tokens: np.ndarray) -> None:
        """Set the tokens of a request, i32[n]: those of its prompt, then those that steps will sample for it. Tokens
        beyond n equal the last one.
        """
        self._texts[request.request_id] = tokens

    def forget(self, request: Request) -> None:
        """Forget the tokens that `expect` has set for a request. Does nothing for an unknown one."""
        self._texts.pop(request.request_id, None)

    def host_is_due(self, seconds: float) -> None:
        """Add seconds to the host's pending work, by which the next `execute` advances the clock."""
        self._due += seconds

    def execute(self, step: StepInput) -> SimulatedStep:
        """Dispatch a step and return it with its tokens. Advances the clock by the host's pending work and the host's
        dispatch.

        Each stage starts the step as soon as it is free and the previous stage has finished it. A step takes as long as
        on its slowest replica, longer if the engine was idle before, times a factor that is drawn from the costs'
        spread, with a fixed seed. Adds the seconds of the first stage to `busy`.
        """
        scheduler, layout = self.scheduler, self.packer.layouts[step.bucket]
        assert scheduler is not None
        pending = SimulatedStep(self, np.ones((self.num_ranks, layout.num_seqs), np.int32))
        has_prompts, seconds = not step.bucket.decode_only, [0.0]
        on_device = paused = 0.0
        if self._free_at:
            idle = max(0.0, self.time.now - self._free_at[-1])
            self._cold, on_device, paused = self.costs.idle(self._cold, idle)
        pending.cold, self._cold = self._cold, self.costs.cold_after(self._cold, step.bucket)
        for rank, message in enumerate(step.buffer):
            num_rows = int(layout.view(message, "header")[0])
            if num_rows:
                own = self._run(rank, layout.view(message, "rows")[:, :num_rows], step.bucket, pending)
                seconds = own if len(own) > len(seconds) else list(map(max, own, seconds))
                pending.num_rows = max(pending.num_rows, num_rows)
        seconds[0] += on_device
        factor = self.costs.spread.factor(step.bucket, self._rng.random())
        seconds = [each * factor for each in seconds]
        host = self.costs.host
        dispatch = host.dispatch + host.dispatch_row * pending.num_rows + host.dispatch_prompts * has_prompts
        self.time.now += self._due + dispatch + host.dispatch_cold * pending.cold + paused
        self._due = 0.0
        self._free_at = self._free_at or [0.0] * len(seconds)
        at = pending.started = max(self.time.now, self._free_at[0])
        for stage, cost in enumerate(seconds):
            at = self._free_at[stage] = max(at, self._free_at[stage]) + cost
        self.busy += seconds[0]
        pending.ready_at = at
        return pending

    def _run(self, rank: int, rows: np.ndarray, bucket: Bucket, pending: SimulatedStep) -> list[float]:
        """Compute one replica's rows, i32[len(ROW_COLUMNS), n], at least one: write the tokens of those that sample
        into `pending.tokens`, add their keys and pairs to `pending.attended`, and update `pending.longest` and the
        lengths of their slots. A row with a start begins its slot's request. Returns the seconds of each stage.
        """
        local, counts, start, sample, _ = rows.astype(np.int64)
        tokens = pending.tokens[rank]
        slots = local + rank * self.buckets.max_num_seqs
        begun = start >= 0
        self._num_computed[slots[begun]] = start[begun]
        lengths = self._num_computed[slots] + counts
        self._num_computed[slots] = lengths
        for own, slot in zip(local[begun].tolist(), slots[begun].tolist(), strict=True):
            self._begin(rank, own, slot)
        chosen = sample > 0
        tokens[: len(local)][chosen] = self._fill[slots[chosen]]
        if self._outputs:
            for row in chosen.nonzero()[0].tolist():
                output = self._outputs.get(int(slots[row]))
                if output is not None:
                    tokens[row] = output[min(int(lengths[row]), len(output) - 1)]
        pending.longest = max(pending.longest, int(lengths.max()))
        pending.attended += self.costs.tiles.attended(bucket, counts, lengths)
        return list(self.costs.seconds(bucket, counts, lengths, pending.cold))

    def _begin(self, rank: int, own: int, slot: int) -> None:
        """Set the tokens that a slot's new request will get: its whole text if its output tokens differ from each
        other, otherwise one token. own: the slot on its replica. slot: the slot among those of all replicas. Does
        nothing further for an empty slot.
        """
        assert self.scheduler is not None
        request = self.scheduler.ranks[rank].slots.requests[own]
        self._outputs.pop(slot, None)
        if request is None:
            return
        text = self._texts[request.request_id]
        rest = text[request.num_prompt_tokens :]
        self._fill[slot] = text[-1]
        if len(rest) and (rest != text[-1]).any():
            self._outputs[slot] = text

    def sample(self, pending: SimulatedStep) -> None:
        """Do nothing: `execute` samples."""

    def set_params(self, rows: Any) -> None:
        """Do nothing."""

    def set_biases(self, biases: Any) -> None:
        """Do nothing."""

    def set_logprob_ids(self, rows: Any) -> None:
        """Do nothing."""

    def set_token_counts(self, sequences: Any) -> None:
        """Do nothing."""
