"""Engine loop: schedule a step, dispatch it, and update the scheduler with its results. Other steps stay in flight.

A step is dispatched in two parts: its forward pass, then its sampler, which is held back while the tokens that it may
choose depend on tokens still being computed. No forward pass is dispatched before the previous step's sampler, so all
processes of an engine dispatch in one order. Optional capabilities are extensions. Only token ids occur here, no text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from jaxengine.engine.extension import Events, Inputs, Loop
from jaxengine.engine.extensions.build import Extensions
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.engine.slot_rows import SlotRows
from jaxengine.engine.stats.stats import BucketUse, RequestStats, StepStats
from jaxengine.engine.stats.timeline import Timeline
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.scheduler.base.request import FinishReason, Request, RequestStatus
from jaxengine.scheduler.scheduler import Scheduler

# How long the loop waits for extensions when it has nothing else to do. A new request may wait as long.
_IDLE_SECONDS = 0.005


class Engine:
    """Engine that runs requests to their end, step by step. Not thread-safe: one thread adds, aborts and steps.

    Attributes:
      extensions: optional capabilities. stats, request_stats, timeline: counts of steps and requests, latest steps.
      uncounted: requests that have ended but are not yet in `request_stats`; `record_finish` adds them there.
      busy_since: seconds of `clock` at which the first request arrived after a time without requests.
    """

    def __init__(self, runner: ModelRunner, inputs: Inputs | None = None, clock: Callable[[], float] = time.monotonic):
        """Build the loop of a started runner. inputs: prepares requests, None for token ids. clock: returns seconds."""
        self.runner, self._now = runner, clock
        self.extensions = Extensions(runner, inputs)
        config = runner.config.scheduler_config(runner.plan.num_pages, runner.num_ranks, runner.windows)
        self.scheduler = Scheduler(self.extensions.configure(config))
        self.stats = StepStats(buckets={bucket: BucketUse() for bucket in runner.buckets})
        self.request_stats, self.timeline = RequestStats(runner.config.max_model_len), Timeline()
        self.uncounted: set[Request] = set()
        self._max_in_flight = runner.config.max_in_flight
        self._in_flight: deque[InFlight] = deque()
        self._idle_since = self.busy_since = self._now()
        self._rows = SlotRows(runner, self.scheduler)
        self.extensions.attach(Loop(runner, self.scheduler, self._rows, self._in_flight))
        self._hooks, self._epilogue = self.extensions.hooks, self.extensions.epilogue

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work: unfinished requests or steps in flight; if paused, steps or expired requests."""
        if self.scheduler.paused and not self._in_flight:
            return self.scheduler.next_deadline < self._now()
        return self.scheduler.num_unfinished > 0 or bool(self._in_flight)

    def queue(self, requests: Sequence[Request]) -> None:
        """Prepare and queue a caller's n requests. If one is refused, abort those queued and raise its error."""
        added = []
        try:
            for request in requests:
                self.extensions.prepare(request)
                request.queued_time = self._now()
                if not self.has_unfinished:
                    self._idle_since = self.busy_since = request.queued_time
                self.scheduler.add_request(request)
                added.append(request)
        except Exception:
            for request in added:
                self.finish(request, FinishReason.ABORT)
            raise
        self.request_stats.observe_queued(added)
        self.extensions.queued(requests)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request at once unless it has ended. stop_reason: the stop string or token id that ended it, if any."""
        if request.status is not RequestStatus.FINISHED:
            self.scheduler.finish(request, reason, stop_reason)
            self._ended(request)

    def record_finish(
        self, request: Request, reason: FinishReason | None = None, num_output: int | None = None
    ) -> None:
        """Move a request from `uncounted` to the statistics. reason, num_output: what its caller got; None: its own."""
        if request in self.uncounted:
            self.uncounted.remove(request)
            self.stats.count_undelivered(self.request_stats.observe_end(request, reason, num_output))

    def step(self) -> EngineOutput:
        """Dispatch a step; collect the oldest if none was or enough are in flight, or wait briefly; return results."""
        with self.runner.compiles.watch():
            output = EngineOutput()
            for poll in self._hooks.poll:
                self._take(poll(), output)
            if (step := self._dispatch(output)) is not None:
                self._sample(step, output)
            if self._in_flight and (step is None or len(self._in_flight) == self._max_in_flight):
                self._collect(output)
            elif step is None and not (output.finished or output.refused):
                any(wait(_IDLE_SECONDS) for wait in self._hooks.wait)
            for request in output.finished:
                self._ended(request)
            return output

    def shutdown(self) -> None:
        """End the threads and processes that extensions have started."""
        self.extensions.shutdown()

    def _take(self, events: Events, output: EngineOutput) -> None:
        """Apply an extension's events: release ready requests, end rejected and ended ones and add them to `output`."""
        for request in events.ready:
            self.scheduler.release(request)
        for request, error in events.rejected:
            self.finish(request, FinishReason.ERROR, str(error))
        for request, reason, stop_reason in events.ended:
            if request.status is not RequestStatus.FINISHED:
                self.scheduler.finish(request, reason, stop_reason)
                output.finished.append(request)
        output.refused += events.rejected

    def _dispatch(self, output: EngineOutput) -> InFlight | None:
        """Schedule, dispatch and return a step, None without rows or if paused; add timeouts and events to `output`."""
        start = self._now()
        if self.scheduler.paused:
            output.finished += self.scheduler.expire(start)
            return None
        newest = self._in_flight[-1] if self._in_flight else None
        # When the device ran out of work, as far as the host can tell; None if it is busy.
        idle_since = self._idle_since if newest is None else start if newest.pending.is_ready() else None
        step, stats, dispatched = self.scheduler.schedule(start), self.stats, None
        output.finished += step.expired
        scheduled = self._now()
        stats.schedule_seconds += scheduled - start
        if step.num_rows:
            message = self.runner.packer.pack(step)
            prepared = self._now()
            for before_forward in self._hooks.before_forward:
                before_forward(step)
            pending = self.runner.execute(message)
            times = start, scheduled, prepared, self._now()
            stats.count_step(step, message.bucket, self.scheduler.ranks)
            self.request_stats.step_tokens.observe(step.num_tokens)
            record = self.timeline.dispatched(step, self.scheduler, message, stats.num_steps, times, idle_since)
            self._in_flight.append(dispatched := InFlight(step, pending, record))
            stats.idle_seconds += 0.0 if idle_since is None else times[-1] - idle_since
        for after_forward in self._hooks.after_forward:
            self._take(after_forward(dispatched), output)
        stats.dispatch_seconds += 0.0 if dispatched is None else self._now() - scheduled
        return dispatched

    def _sample(self, newest: InFlight, output: EngineOutput) -> None:
        """Dispatch an extension's epilogue, if any; else collect steps until the sampler can run, and dispatch that."""
        if self._epilogue is not None:
            return self._epilogue(newest.pending)
        step, hooks = newest.step, self._hooks
        for is_behind in (self._rows.is_behind, *hooks.is_behind):
            while is_behind(step):
                self._collect(output)
        for before_sample in hooks.before_sample:
            while not before_sample(step):
                self._take(before_sample.__self__.poll(), output)
        start = self._now()
        for sync in (self._rows.sync, *hooks.sync):
            sync(step)
        self.runner.sample(newest.pending)
        self.stats.dispatch_seconds += self._now() - start

    def _collect(self, output: EngineOutput) -> None:
        """Wait for the oldest step; update scheduler and statistics, run `collected` hooks, add results to `output`."""
        done, start = self._in_flight.popleft(), self._now()
        token_ids, counts = done.pending.token_ids(), done.pending.result("counts")
        arrived = self._now()
        done.seconds, self._idle_since = arrived - max(self._idle_since, done.record.dispatched), arrived
        self.stats.wait_seconds += arrived - start
        result = self.scheduler.update(done.step, token_ids, arrived, counts)
        for collected in self._hooks.collected:
            collected(done, result, output)
        output.emitted += result.emitted
        output.first_tokens += result.first_tokens
        output.finished += result.finished
        if self._epilogue is None:
            self.stats.count_generated(result.num_new_tokens)
        self.request_stats.observe_tokens(result)
        updated = self._now()
        self.stats.update_seconds += updated - arrived
        self.timeline.collected(done.record, result, (start, arrived, updated))

    def _ended(self, request: Request) -> None:
        """Run `ended` hooks and note the end. Record it now, too, if it is an abort or error, or text cannot end it."""
        for ended in (self._rows.ended, *self._hooks.ended):
            ended(request)
        request.finished_time = self._now()
        self.uncounted.add(request)
        if not request.text_ends or request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            self.record_finish(request)
        self.timeline.ended(request)
