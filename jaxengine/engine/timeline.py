"""What the engine did, step by step, for the last few thousand steps: a ring that costs next to nothing to fill.

Times are seconds of the engine's clock (time.monotonic), which all processes of a machine share. How a timeline is
drawn is `jaxengine/server/observe/chrome_trace.py`'s affair.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from jaxengine.scheduler.batch import ScheduledStep, StepResult
from jaxengine.scheduler.buckets import Bucket
from jaxengine.scheduler.packing import StepInput
from jaxengine.scheduler.request import Request
from jaxengine.scheduler.scheduler import Scheduler

NUM_STEPS = 4096
NUM_REQUESTS = 4096


@dataclass(slots=True)
class StepRecord:
    """One step.

    Attributes:
      start, scheduled, prepared, dispatched: the host schedules, writes messages and slot rows, hands them over.
      idle_since: since when the device had had nothing to do, as far as the host saw; None if it was still at work.
      waiting, arrived, updated: the host waits for the sampled tokens, has them, has taken them in; 0 before.
      num_padded: tokens of the compiled shape, all ranks; num_tokens of them are real.
      num_bytes: of the step's message to the device.
      pages_used: referenced pages, all ranks.
      chunks: (request id, tokens) of rows that are no decodes.
      admitted, preempted, first_tokens, finished: request ids.
      num_drafts, num_accepted: of steps with drafts, how many there were and how many were right.
    """

    number: int
    start: float
    scheduled: float
    prepared: float
    dispatched: float
    idle_since: float | None
    bucket: Bucket
    num_tokens: int
    num_padded: int
    num_rows: int
    num_bytes: int
    num_running: int
    num_waiting: int
    pages_used: int
    chunks: list[tuple[str, int]]
    admitted: list[str]
    preempted: list[str]
    waiting: float = 0.0
    arrived: float = 0.0
    updated: float = 0.0
    num_new_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    first_tokens: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)


class Timeline:
    """Holds the last steps and the requests that ended last."""

    def __init__(self, num_steps: int = NUM_STEPS, num_requests: int = NUM_REQUESTS):
        self._steps: deque[StepRecord] = deque(maxlen=num_steps)
        self._ended: deque[dict[str, Any]] = deque(maxlen=num_requests)

    def dispatched(
        self,
        step: ScheduledStep,
        scheduler: Scheduler,
        message: StepInput,
        number: int,
        times: tuple[float, float, float, float],
        idle_since: float | None,
    ) -> StepRecord:
        """Records a step that was given to the device; returns its record.

        number: of the step; times: StepRecord's start to dispatched; idle_since: as there.
        """
        bucket = message.bucket
        chunks = []
        for rank, batch in zip(scheduler.ranks, step.batches, strict=True):
            if batch.num_rows > batch.num_decode:
                counts = batch.num_scheduled[batch.num_decode :].tolist()
                for slot, count in zip(batch.slots[batch.num_decode :].tolist(), counts, strict=True):
                    request = rank.slots.requests[slot]
                    assert request is not None
                    chunks.append((request.request_id, count))
        record = StepRecord(
            number,
            *times,
            idle_since,
            bucket,
            step.num_tokens,
            bucket.num_tokens * len(step.batches),
            step.num_rows,
            message.buffer.nbytes,
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_pages - scheduler.num_free_pages,
            chunks,
            [request.request_id for batch in step.batches for request in batch.admitted],
            [request.request_id for rank in scheduler.ranks for request in rank.preempted],
        )
        self._steps.append(record)
        return record

    def collected(self, record: StepRecord, result: StepResult, times: tuple[float, float, float]) -> None:
        """Completes a record; times are its waiting, arrived and updated."""
        record.waiting, record.arrived, record.updated = times
        record.num_new_tokens = result.num_new_tokens
        record.first_tokens = [request.request_id for request in result.first_tokens]
        record.finished = [request.request_id for request in result.finished]

    def in_flight(self) -> list[StepRecord]:
        """Steps whose tokens have not been taken in, oldest first; any thread may ask while the engine stands still."""
        return [step for step in self._steps.copy() if not step.updated]

    def ended(self, request: Request) -> None:
        self._ended.append(_life(request))

    def last(self, seconds: float, unfinished: list[Request]) -> dict[str, Any]:
        """Returns plain JSON values: `now`, `since`, the steps that began in the last `seconds` and are done, and the
        requests that ended in that time or are unfinished.
        """
        now = time.monotonic()
        since = now - seconds
        steps = [_step(step) for step in self._steps if step.start >= since and step.updated]
        lives = [life for life in self._ended if life["finished"] >= since]
        return {"now": now, "since": since, "steps": steps, "requests": lives + [_life(each) for each in unfinished]}


def _life(request: Request) -> dict[str, Any]:
    """Returns a request's times and numbers of tokens; None for what has not happened."""
    reason = request.finish_reason
    return {
        "id": request.request_id,
        "arrival": request.arrival_time,
        "queued": request.queued_time,
        "first_scheduled": request.first_scheduled_time,
        "first_token": request.first_token_time,
        "finished": request.finished_time,
        "reason": None if reason is None else reason.value,
        "num_prompt": request.num_prompt_tokens,
        "num_cached": max(0, request.num_cached_tokens),
        "num_preemptions": request.num_preemptions,
    }


def _step(record: StepRecord) -> dict[str, Any]:
    values = {name: getattr(record, name) for name in StepRecord.__slots__}
    return {**values, "bucket": str(record.bucket)}
