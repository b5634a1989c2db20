"""The loop: schedule, execute, update. Ahead of the device by one step, or by one for each pipeline stage.

A step is dispatched in two parts: its forward pass, and its sampler, which waits where what may be chosen depends on
tokens that are still being computed or on masks; these are made while the forward pass runs. No forward pass is
dispatched before the sampler of the one before it, so every process of an engine dispatches in the same order.

Knows token ids only; text is the output processor's.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from functools import partial

import numpy as np

from jaxengine.drafts.registry import proposer_of
from jaxengine.engine.in_flight import InFlight, scored_prompts
from jaxengine.engine.output import EngineOutput
from jaxengine.engine.slot_rows import SlotRows
from jaxengine.engine.stats import BucketUse, MediaStats, RequestStats, StepStats
from jaxengine.engine.step_media import prepare_media
from jaxengine.engine.timeline import Timeline
from jaxengine.grammars.request_masks import RequestMasks
from jaxengine.runner.extensions.adapters.store import AdapterStore
from jaxengine.runner.model_runner import ModelRunner
from scheduler.batch import ScheduledStep
from scheduler.buckets import Bucket
from scheduler.errors import RequestError
from scheduler.request import Adapter, FinishReason, Request, RequestStatus, Wait
from scheduler.scheduler import Scheduler
from scheduler.token_params import MASK

# How long the loop waits for masks where there is nothing else to do: new requests wait so long too.
_IDLE_SECONDS = 0.005
# How long a sampler waits for masks. A request whose mask takes longer gives up its slot, so that the others go on.
_MASK_SECONDS = 0.05


class Engine:
    """Runs requests to their end. Not thread-safe: one thread adds, aborts and steps.

    Attributes:
      stats, request_stats, media_stats, bucket_use, timeline: what was counted about steps and requests.
      untold: requests that have ended and are counted once it is known what their text says (`count_end`).
      adapters: that requests may name; None without room for any.
      busy_since: when the first request came after a time without any.
    """

    def __init__(self, runner: ModelRunner, masks: RequestMasks | None = None):
        """masks: of requests with structured outputs; None without a tokenizer."""
        self.runner = runner
        self.masks = masks
        config = runner.config.scheduler_config(runner.plan.num_pages, runner.num_ranks, runner.windows)
        proposer = None
        if (drafts := runner.config.speculative_config) is not None:
            proposer = proposer_of(drafts)
            # Where stages follow each other the host knows all tokens of a row that it schedules.
            draft = proposer.propose_one if proposer is not None and config.num_micro_batches > 1 else None
            forced = None if masks is None else masks.forced
            guided = drafts.guides(runner.config.pipeline_parallel_size, runner.config.max_in_flight)
            config = replace(config, guesses=drafts.guesses, draft=draft, forced=forced, guided=guided)
        self.scheduler = Scheduler(config)
        self.stats = StepStats()
        self.request_stats = RequestStats(runner.config.max_model_len)
        self.media_stats = MediaStats()
        self.bucket_use = {bucket: BucketUse() for bucket in runner.buckets}
        self.timeline = Timeline()
        self._max_in_flight = runner.config.max_in_flight
        self._in_flight: deque[InFlight] = deque()
        self._idle_since = self.busy_since = time.monotonic()
        self.untold: set[Request] = set()
        self.adapters = AdapterStore(runner) if runner.config.enable_lora else None
        self._rows = SlotRows(runner, self.scheduler, masks, proposer)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` still has something to do or to collect."""
        return self.scheduler.num_unfinished > 0 or bool(self._in_flight)

    def add_request(self, request: Request) -> None:
        """Queues a request; raises RequestError if it cannot be served."""
        if request.params.grammar is not None:
            request.wait = Wait.MASK
        if request.lora is not None:
            self.require_adapters().find(request)
        request.queued_time = time.monotonic()
        if not self.has_unfinished:
            self._idle_since = self.busy_since = request.queued_time
        self.scheduler.add_request(request)
        if request.wait is Wait.MASK:
            assert self.masks is not None  # SamplingParams.verify_against saw that there is a tokenizer
            self.masks.add(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request at once, in whatever state it is."""
        if request.status is not RequestStatus.FINISHED:
            self.scheduler.finish(request, reason, stop_reason)
            self._ended(request)

    def count_end(self, request: Request, reason: FinishReason | None = None, num_output: int | None = None) -> None:
        """Counts a request of `untold` by what its caller was told: as it ended here, or so, after so many tokens."""
        if request not in self.untold:
            return
        self.untold.remove(request)
        assert request.finish_reason is not None
        num_known = min(len(request.output_token_ids), request.max_tokens)
        num_output = num_known if num_output is None else num_output
        self.stats.count_untold(num_known - num_output)
        self.request_stats.observe_end(request, reason or request.finish_reason, num_output)

    def step(self) -> EngineOutput:
        """Dispatches the next step; takes in the oldest in flight once there are enough of them, or none to add.

        Where every request waits for its mask, it waits a moment for them.
        """
        with self.runner.compiles.watch():
            output = EngineOutput()
            self._take_masks(output)
            self._take_adapters(output)
            step = self._dispatch(output)
            self._take_adapters(output)
            if step is not None:
                self._sample(step, output)
            if self._in_flight and (step is None or len(self._in_flight) == self._max_in_flight):
                self._collect(self._in_flight.popleft(), output)
            elif self.masks is not None and self.masks.awaits:
                if step is None and not (output.finished or output.refused):
                    self.masks.wait(_IDLE_SECONDS)
            elif step is None and self.adapters is not None and self.adapters.is_uploading:
                self.adapters.wait(_IDLE_SECONDS)
            for request in output.finished:
                self._ended(request)
            return output

    def shutdown(self) -> None:
        """Ends the processes that compute masks."""
        if self.masks is not None:
            self.masks.shutdown()
        if self.adapters is not None:
            self.adapters.shutdown()

    def require_adapters(self) -> AdapterStore:
        """The adapters; RequestError where the engine has no room for any."""
        if self.adapters is None:
            raise RequestError("the engine was started without enable_lora", param="lora_name")
        return self.adapters

    def unload_adapter(self, name: str) -> None:
        """Lets no further request name an adapter; those that do run to their ends. Raises RequestError."""
        self.require_adapters().remove(name, self.scheduler.adapters, self._adapters_in_use)

    def _adapters_in_use(self) -> set[Adapter]:
        """Those of unfinished requests."""
        return {each.adapter for each in self.scheduler.requests if each.adapter is not None}

    def _take_masks(self, output: EngineOutput) -> None:
        """Lets requests run whose masks have come, and ends those that their grammars end."""
        if self.masks is None:
            return
        events = self.masks.take()
        for request in events.ready:
            self.scheduler.release(request)
        for request, error in events.refused:
            self.finish(request, FinishReason.ERROR, str(error))
        for request, reason, stop_reason in events.ended:
            if request.status is not RequestStatus.FINISHED:
                self.scheduler.finish(request, reason, stop_reason)
                output.finished.append(request)
        output.refused += events.refused

    def _take_adapters(self, output: EngineOutput) -> None:
        """Brings adapters to the devices that requests wait for, and ends those whose adapters cannot be used."""
        if self.adapters is None:
            return
        failed = self.adapters.advance(self.scheduler.adapters, self._adapters_in_use)
        for request, error in failed:
            self.finish(request, FinishReason.ERROR, str(error))
        output.refused += failed

    def _dispatch(self, output: EngineOutput) -> InFlight | None:
        """Puts the next step's forward pass in flight; None if nothing can run now."""
        start = time.monotonic()
        idle_since = self._device_idle_since(start)
        step = self.scheduler.schedule(start)
        output.finished += step.expired
        scheduled = time.monotonic()
        self.stats.schedule_seconds += scheduled - start
        if not step.num_rows:
            return None
        message = self.runner.packer.pack(step)
        prepared = time.monotonic()
        if self.adapters is not None:
            self.adapters.set_rows(step, self.scheduler.config.max_num_seqs)
        if "pictures" in self.runner.extensions:
            prepare_media(self.runner, step, self.scheduler.config.max_num_seqs, self.media_stats)
        pending = self.runner.execute(message)
        dispatched = time.monotonic()
        self._count(step, message.bucket)
        record = self.timeline.dispatched(
            step,
            self.scheduler,
            message.bucket,
            number=self.stats.num_steps,
            times=(start, scheduled, prepared, dispatched),
            idle_since=idle_since,
            num_bytes=message.buffer.nbytes,
        )
        done = InFlight(step, pending, record, scored_prompts(step, self.scheduler.ranks))
        self._in_flight.append(done)
        if done.prompts:
            self.runner.extension("scores").score(pending)
        if idle_since is not None:
            self.stats.idle_seconds += dispatched - idle_since
        self.stats.dispatch_seconds += time.monotonic() - scheduled
        return done

    def _sample(self, newest: InFlight, output: EngineOutput) -> None:
        """Dispatches the sampler of the step in flight last, once it is known what may be chosen; or what pools."""
        step = newest.step
        if "pooling" in self.runner.extensions:
            self.runner.extension("pooling").pool(newest.pending)
            return
        while self._rows.is_behind(step):
            self._collect(self._in_flight.popleft(), output)
        if step.features & MASK:
            self._await_masks(step, output)
        start = time.monotonic()
        self._rows.sync(step)
        self.runner.sample(newest.pending)
        self.stats.dispatch_seconds += time.monotonic() - start

    def _await_masks(self, step: ScheduledStep, output: EngineOutput) -> None:
        """Waits for the masks of a step; requests whose masks take too long, or that have ended, are left out of it."""
        assert self.masks is not None
        deadline = time.monotonic() + _MASK_SECONDS
        while missing := self._rows.without_mask(step):
            left = deadline - time.monotonic()
            if left <= 0:
                for request in missing:
                    self.scheduler.hold(request)
                return
            self.masks.wait_for(missing, left)
            self._take_masks(output)

    def _collect(self, done: InFlight, output: EngineOutput) -> None:
        start = time.monotonic()
        token_ids, drafts = done.pending.token_ids(), self.runner.extensions.get("drafts")
        verified = None if drafts is None else drafts.verified(done.pending)
        arrived = time.monotonic()
        if self.scheduler.config.widths:
            self._judge_drafts(done, verified, arrived - max(self._idle_since, done.record.dispatched))
        self._idle_since = arrived
        self.stats.wait_seconds += arrived - start
        counts = None if verified is None else verified[0]
        result = self.scheduler.update(done.step, token_ids, arrived, counts)
        output.emitted += done.with_results(result.emitted, self.runner)
        if self.masks is not None:
            for request, token_id in result.followed:
                if request.params.grammar is not None:
                    self._advance(self.masks, request, token_id)
        output.prompt_scores += done.prompt_scores(self.runner)
        output.first_tokens += result.first_tokens
        output.finished += result.finished
        if "pooling" not in self.runner.extensions:
            self.stats.count_generated(result.num_new_tokens)
        for intervals in result.intervals:
            self.request_stats.observe_intervals(intervals)
        for request in result.first_tokens:
            self.request_stats.observe_first_token(request)
        updated = time.monotonic()
        self.stats.update_seconds += updated - arrived
        self.timeline.collected(done.record, result, (start, arrived, updated))

    def _judge_drafts(self, done: InFlight, verified: tuple[np.ndarray, np.ndarray] | None, seconds: float) -> None:
        """Counts what became of the drafts of a step that took so long, and tells who chooses how many there are."""
        step = done.step
        if step.num_rows > sum(batch.num_decode for batch in step.batches):
            return
        accepted = np.zeros(step.num_rows, np.int64)
        if verified is not None:
            counts, drafts = (
                np.concatenate([each[: batch.num_rows] for each, batch in zip(told, step.batches, strict=True)])
                for told in verified
            )
            # What must be right says nothing of what may be.
            guessed = ~np.concatenate([batch.is_forced for batch in step.batches])
            self.stats.drafts.num_forced += int(drafts[~guessed].sum())
            drafts, accepted = drafts[guessed], counts[guessed] - 1
            self.stats.drafts.count(drafts, accepted)
            done.record.num_drafts, done.record.num_accepted = int(drafts.sum()), int(accepted.sum())
        self.scheduler.draft_width.observe(step.width, max(batch.num_rows for batch in step.batches), accepted, seconds)

    def _device_idle_since(self, now: float) -> float | None:
        """Since when the device has had nothing to do, as far as the host can tell; None if it is at work."""
        if not self._in_flight:
            return self._idle_since
        return now if self._in_flight[-1].pending.is_ready() else None

    def _ended(self, request: Request) -> None:
        if self.masks is not None:
            self.masks.drop(request)
        request.finished_time = time.monotonic()
        self.untold.add(request)
        if not request.text_ends or request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self.count_end(request)
        self.timeline.ended(request)

    def _advance(self, masks: RequestMasks, request: Request, token_id: int) -> None:
        if request.status is not RequestStatus.FINISHED:
            newest = self._in_flight[-1] if self._in_flight else None
            masks.advance(request, token_id, partial(self._rows.guess, newest))
        elif token_id < 0 and not self._rows.allows_any(request, masks.row(request, len(request.output_token_ids) - 1)):
            request.stop_reason = "no token is allowed by structured_outputs and the other parameters together"

    def _count(self, step: ScheduledStep, bucket: Bucket) -> None:
        stats, num_tokens = self.stats, step.num_tokens
        padding = bucket.num_tokens * len(step.batches) - num_tokens
        for counts in (stats, self.bucket_use[bucket]):
            counts.num_steps += 1
            counts.num_tokens += num_tokens
            counts.num_padding_tokens += padding
        self.request_stats.step_tokens.observe(num_tokens)
        for rank in self.scheduler.ranks:
            held, empty = rank.count_token_slots()
            stats.page_slots_used += held - empty
            stats.page_slots_empty += empty
