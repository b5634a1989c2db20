"""Timeline: a record of the engine's last few thousand steps, in a ring buffer that is cheap to fill.

Times are time.monotonic seconds, which all processes of a machine share. `jaxengine/server/observe/chrome_trace.py`
draws a timeline.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledStep, StepResult
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.scheduler.batches.packing import StepInput
from jaxengine.scheduler.scheduler import Scheduler

NUM_STEPS = 4096
NUM_REQUESTS = 4096


@dataclass(slots=True)
class StepRecord:
    """Times and counts of one step.

    Attributes:
      number: number of the step, counted from the engine's start.
      start, scheduled, prepared, dispatched: when scheduling began, when it was done, when the step's message was
        written, and when the forward pass was dispatched.
      idle_since: when the device ran out of work, as far as the host can tell; None if it was still busy.
      waiting, arrived, updated: when the host began to wait for the sampled tokens, when it got them, and when it had
        updated the scheduler; 0 until then.
      bucket: the step's compiled shape.
      num_running, num_waiting: requests once the step was scheduled.
      num_new_tokens: tokens that requests got.
      num_padded: tokens of the compiled shape over all replicas; num_tokens of them are real.
      num_rows: rows of requests over all replicas.
      num_bytes: size of the step's message to the device.
      pages_used: referenced pages of all replicas.
      chunks: (request id, tokens) of prefill rows.
      admitted, preempted, first_tokens, finished: request ids.
      num_drafts, num_accepted: number of drafts in the step and of accepted ones.
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
    """Records of the latest steps and of the latest requests that have ended."""

    def __init__(self, num_steps: int = NUM_STEPS, num_requests: int = NUM_REQUESTS):
        """Create an empty timeline. num_steps, num_requests: how many steps and ended requests are kept."""
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
        """Append the record of a dispatched step, and return it.

        number: number of the step. times: the fields `start` to `dispatched` of StepRecord. idle_since: see StepRecord.
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
        """Complete a step's record with its result. times: `waiting`, `arrived` and `updated` of StepRecord."""
        record.waiting, record.arrived, record.updated = times
        record.num_new_tokens = result.num_new_tokens
        record.first_tokens = [request.request_id for request in result.first_tokens]
        record.finished = [request.request_id for request in result.finished]

    def in_flight(self) -> list[StepRecord]:
        """Return the records of steps whose tokens have not been collected, oldest first. Any thread may call this
        while the engine's thread is not stepping.
        """
        return [step for step in self._steps.copy() if not step.updated]

    def ended(self, request: Request) -> None:
        """Record the times and token counts of a request that has just ended."""
        self._ended.append(_life(request))

    def last(self, seconds: float, unfinished: list[Request]) -> dict[str, Any]:
        """Return a dict of JSON values about the last `seconds`: `now` and `since`, its end and begin; `steps`, the
        completed steps that began in it; and `requests`, those that ended in it and those in `unfinished`. Times are in
        seconds of time.monotonic.
        """
        now = time.monotonic()
        since = now - seconds
        steps = [_step(step) for step in self._steps if step.start >= since and step.updated]
        lives = [life for life in self._ended if life["finished"] >= since]
        return {"now": now, "since": since, "steps": steps, "requests": lives + [_life(each) for each in unfinished]}


def _life(request: Request) -> dict[str, Any]:
    """Return a request as JSON values: "id"; "arrival", "queued", "first_scheduled", "first_token" and "finished" in
    seconds of time.monotonic, None for an event that has not happened; the finish "reason" or None; and the numbers
    "num_prompt" and "num_cached" of tokens and "num_preemptions".
    """
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
    """Return the fields of a record by name as plain JSON values, the bucket as text."""
    values = {name: getattr(record, name) for name in StepRecord.__slots__}
    return {**values, "bucket": str(record.bucket)}
