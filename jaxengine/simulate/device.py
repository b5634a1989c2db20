"""Stand-in for the device: takes a step's messages as a ModelRunner does, and answers after the seconds of the costs.

It reads nothing but packed messages, as compiled steps do, and the tokens of the trace.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
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
    """Clock of a simulation. now: its time in seconds."""

    def __init__(self) -> None:
        """Start the clock at 0."""
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the simulation's time, seconds."""
        return self.now


class SimulatedStep:
    """Dispatched step, as PendingStep: its tokens are known at once, and it is ready at a time.

    Attributes:
      started, ready_at: when its first stage began, and when its last one is done.
      attended: keys and pairs of its rows, as of `costs.Tiles.attended`.
      longest: tokens of its longest row.
      since_prompts: as of `Costs.seconds`.
    """

    started = ready_at = 0.0
    longest, since_prompts = 0, inf

    def __init__(self, runner: SimulatedRunner, tokens: np.ndarray):
        """Hold the tokens, i32[replicas, rows], of a step; the runner fills in the rest."""
        self._runner, self.tokens = runner, tokens
        self.attended = np.zeros(2)
        self.num_rows = 0

    def is_ready(self) -> bool:
        """Return whether the simulation's clock has reached `ready_at`."""
        return self._runner.time.now >= self.ready_at

    def token_ids(self) -> np.ndarray:
        """Return the tokens, i32[replicas, rows]. Moves the clock on to `ready_at`, if that is later, and adds the
        host's work after a step to what is due.
        """
        time, host = self._runner.time, self._runner.costs.host
        time.now = max(time.now, self.ready_at)
        self._runner.host_is_due(host.after + host.after_row * self.num_rows)
        return self.tokens

    def result(self, name: str) -> np.ndarray | None:
        """Return None: there are no drafts whose counts could be asked for."""
        return None


class SimulatedRunner:
    """The parts of a ModelRunner that the engine's loop uses, for text requests without options of sampling.

    Attributes:
      time: the simulation's clock, which dispatching, waiting and the host's work move on.
      scheduler: the engine's, which is made after this.
      busy: seconds in which the first stage computed.
    """

    def __init__(
        self, config: ResolvedConfig, packer: Packer, num_pages: int, windows: tuple[int | None, ...], costs: Costs
    ):
        """config: resolved. packer, windows: of the engine's steps. num_pages: of each replica.

        `scheduler` must be set before `execute`.
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
        self._since_prompts = inf
        self._texts: dict[str, np.ndarray] = {}
        self._num_computed = np.zeros(packer.num_slots, np.int64)
        # Of a slot whose tokens differ: the whole text. Of all others: their one token.
        self._outputs: dict[int, np.ndarray] = {}
        self._fill = np.ones(packer.num_slots, np.int64)

    @property
    def buckets(self):
        """The packer's buckets."""
        return self.packer.buckets

    def expect(self, request: Request, tokens: np.ndarray) -> None:
        """Set the tokens of a request, i32[n]: its prompt's, then those that it gets; further ones equal the last."""
        self._texts[request.request_id] = tokens

    def forget(self, request: Request) -> None:
        """Drop what `expect` has noted."""
        self._texts.pop(request.request_id, None)

    def host_is_due(self, seconds: float) -> None:
        """Add seconds to the host's work, by which the next `execute` moves the clock on."""
        self._due += seconds

    def execute(self, step: StepInput) -> SimulatedStep:
        """Dispatch a step and return it, with its tokens; the clock goes on by the host's work until then.

        Each stage computes the step as soon as it is free and the stage before is done. A step costs what its slowest
        replica takes. Adds the seconds of the first stage to `busy`.
        """
        scheduler, layout = self.scheduler, self.packer.layouts[step.bucket]
        assert scheduler is not None
        pending = SimulatedStep(self, np.ones((self.num_ranks, layout.num_seqs), np.int32))
        has_prompts, seconds = not step.bucket.decode_only, [0.0]
        pending.since_prompts = inf if has_prompts else self._since_prompts
        self._since_prompts = 0 if has_prompts else self._since_prompts + 1
        for rank, message in enumerate(step.buffer):
            num_rows = int(layout.view(message, "header")[0])
            if num_rows:
                own = self._run(rank, layout.view(message, "rows")[:, :num_rows], step.bucket, pending)
                seconds = own if len(own) > len(seconds) else list(map(max, own, seconds))
                pending.num_rows = max(pending.num_rows, num_rows)
        host = self.costs.host
        dispatch = host.dispatch + host.dispatch_row * pending.num_rows + host.dispatch_prompts * has_prompts
        self.time.now += self._due + dispatch
        self._due = 0.0
        self._free_at = self._free_at or [0.0] * len(seconds)
        at = pending.started = max(self.time.now, self._free_at[0])
        for stage, cost in enumerate(seconds):
            at = self._free_at[stage] = max(at, self._free_at[stage]) + cost
        self.busy += seconds[0]
        pending.ready_at = at
        return pending

    def _run(self, rank: int, rows: np.ndarray, bucket: Bucket, pending: SimulatedStep) -> list[float]:
        """Compute one replica's rows, i32[len(ROW_COLUMNS), n]: write the tokens that they sample into
        `pending.tokens`, add their keys and pairs to `pending.attended`, and note the lengths of their slots.

        Returns the seconds of each stage.
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
        return list(self.costs.seconds(bucket, counts, lengths, pending.since_prompts))

    def _begin(self, rank: int, own: int, slot: int) -> None:
        """Note which request's tokens a slot gets: one by one where they differ, else all at once.

        own: the slot on its replica; slot: among all replicas. An empty slot gets nothing.
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
        """Do nothing: `execute` has sampled."""

    def set_params(self, rows: Any) -> None:
        """Do nothing: parameters change no token of a trace."""

    def set_biases(self, biases: Any) -> None:
        """Do nothing, as `set_params`."""

    def set_logprob_ids(self, rows: Any) -> None:
        """Do nothing, as `set_params`."""

    def set_token_counts(self, sequences: Any) -> None:
        """Do nothing, as `set_params`."""
