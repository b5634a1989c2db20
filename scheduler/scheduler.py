"""Scheduler: decides which waiting requests run next, and on which replica.

There is one queue of waiting requests, and one or more replicas that run them. The scheduler works ahead of the device:
`schedule` may be called before the tokens of earlier steps are known. Devices, tokenizers and text do not occur here.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import FinishReason, Request, RequestStatus, Wait
from jaxengine.scheduler.batches.batch import ScheduledStep, StepResult
from jaxengine.scheduler.pages.groups import most_pages_of
from jaxengine.scheduler.policy.fair import FairQueue
from jaxengine.scheduler.policy.waiting import WaitingQueue
from jaxengine.scheduler.rank import Offer, Rank
from jaxengine.scheduler.scheduler_extension import SchedulerExtension

logger = logging.getLogger(__name__)

_PREEMPTED = (
    "Request %s is preempted by PreemptionMode.%s mode because there is not enough KV cache space. "
    "This can affect the end-to-end performance. Increase gpu_memory_utilization or tensor_parallel_size "
    "to provide more KV cache memory, or lower max_num_seqs or max_num_batched_tokens. "
    "total_num_cumulative_preemption=%d"
)


class Scheduler:
    """Scheduler that decides what each step computes. For every step with rows call `schedule`, run the step on the
    device, then call `update`.

    All replicas share one queue. A request is assigned to a replica when it is admitted, not when it arrives. So the
    queue's order, with priorities and with preempted requests at the front, holds over all replicas, and no KV is
    moved. If the first request in the queue cannot run, no later one is admitted, so that it is not overtaken forever.

    Among the replicas that have a slot, tokens and pages for the first request, the one with the least work is chosen;
    if several are equal, the first. Its work is the number of tokens of its running requests, which every later step
    reads, plus the number of this request's tokens that its prefix cache lacks, which have to be computed.

    Attributes:
      config: limits and policy.
      ranks: the replicas.
      num_pages: pages of all replicas.
      num_preemptions, num_prefix_queries, num_prefix_hits: totals over all replicas; the last two in tokens.
      extensions: the optional capabilities that take part.
      paused: whether the scheduler's owner must schedule no step; `schedule` does not check it.

    Raises ValueError for a configuration without pages.
    """

    def __init__(self, config: SchedulerConfig):
        """Create and connect the replicas and the extensions. Raises ValueError for num_pages < 1."""
        self.config = config
        self.ranks = [Rank(config, index) for index in range(config.num_ranks)]
        self.num_pages = sum(rank.pool.num_pages for rank in self.ranks)
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._requests: dict[str, Request] = {}
        self._fair = FairQueue(config.num_ranks, config.max_num_seqs) if config.policy == "fair" else None
        self._waiting = WaitingQueue(config.policy) if self._fair is None else self._fair
        self._held: set[Request] = set()
        self._num_arrived = 0
        self._num_in_flight = 0
        self._deadlines: list[tuple[float, int, Request]] = []
        self.paused = False
        self.extensions: list[SchedulerExtension] = [options.extension() for options in config.extensions]
        for extension in self.extensions:
            extension.start(self.ranks)
        for index, rank in enumerate(self.ranks):
            rank.extend([extension.ranks[index] for extension in self.extensions if extension.ranks])

    def extension(self, name: str) -> Any:
        """Return the extension of the capability `name`. Raises StopIteration if the engine was started without it."""
        return next(extension for extension in self.extensions if extension.name == name)

    @property
    def num_running(self) -> int:
        """Number of requests with a slot, over all replicas."""
        return sum(rank.slots.num_active for rank in self.ranks)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot, in the queue or outside it."""
        return self._waiting.size + len(self._held)

    @property
    def is_fair(self) -> bool:
        """Whether the policy is "fair", so that requests have clients."""
        return self._fair is not None

    def num_waiting_of(self, client: str) -> int:
        """Return the number of a client's requests in the queue. Must only be called under the fair policy."""
        assert self._fair is not None
        return self._fair.num_waiting(client)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of prompt tokens of the waiting requests, including those held outside the queue."""
        return self._waiting.num_tokens + sum(request.num_prompt_tokens for request in self._held)

    @property
    def num_deferred(self) -> int:
        """Number of waiting requests that could not run even if slots, pages and tokens were free."""
        return len(self._held) + sum(request.wait is not Wait.NONE for request in self._waiting)

    @property
    def requests(self) -> Collection[Request]:
        """Requests that have not ended, in order of arrival."""
        return self._requests.values()

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    @property
    def num_free_pages(self) -> int:
        """Number of pages of all replicas without a reference, cached ones included."""
        return sum(rank.pool.num_free for rank in self.ranks)

    @property
    def page_usage(self) -> float:
        """Share of pages that are referenced, 0 to 1."""
        return 1.0 - self.num_free_pages / self.num_pages

    def add_request(self, request: Request) -> None:
        """Number a request (`arrival_index`) and add it to the queue. A request that waits for an extension
        (Wait.APART) is held outside the queue.

        Raises:
          RequestError: the id is in use, a priority or client is given that the policy does not use, the prompt is
            empty or leaves no room for a token, or the request may need more pages than a pool has. Nothing has
            changed then.
        """
        config = self.config
        if request.request_id in self._requests:
            raise RequestError(
                f"request_id {request.request_id!r} is in use", param="request_id", value=request.request_id
            )
        if request.priority and config.policy != "priority":
            raise RequestError(
                f"priority is {request.priority}; it needs scheduling_policy='priority'",
                param="priority",
                value=request.priority,
            )
        if request.client and self._fair is None:
            raise RequestError(
                f"client is {request.client!r}; it needs scheduling_policy='fair'",
                param="client",
                value=request.client,
            )
        length = request.num_prompt_tokens
        longest = config.max_model_len - min(1, request.max_tokens)
        if not 1 <= length <= longest:
            raise RequestError(
                f"the prompt has {length} tokens; allowed: 1 to {longest}, max_model_len less one to generate",
                param="prompt",
                value=length,
            )
        needed = most_pages_of(config, min(length + request.max_tokens, config.max_model_len))
        if config.num_pages < needed:
            raise RequestError(
                f"prompt of {length} tokens and max_tokens {request.max_tokens} need {needed} pages of a pool's "
                f"{config.num_pages}; lower max_tokens or raise kv_cache_memory_bytes",
                param="max_tokens",
                value=request.max_tokens,
            )
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        if request.deadline != float("inf"):
            heapq.heappush(self._deadlines, (request.deadline, request.arrival_index, request))
        self._enqueue(request)

    def hold(self, request: Request) -> None:
        """Take away the slot of a running request, set its status to PREEMPTED, and hold the request outside the queue
        until `release`, so that it blocks no other request.

        Its computed pages stay in the prefix cache. A token that a step in flight samples for it is dropped and sampled
        again later, so at most one of its tokens may be in flight.
        """
        self.ranks[request.rank].release(request.slot)
        request.status, request.wait = RequestStatus.PREEMPTED, Wait.APART
        self._enqueue(request)
        if self._fair is not None:
            self._fair.take_back_output(request)
            self._fair.stop(request)

    def release(self, request: Request) -> None:
        """Put a request that is held outside the queue into the queue. Do nothing for any other request."""
        if request in self._held:
            self._held.remove(request)
            request.wait = Wait.NONE
            self._enqueue(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request in any state for `reason`. Its slot and pages are freed at once, and its tokens in flight are
        dropped. Do nothing if it has already ended.

        stop_reason: the token or text that ended it, or a description of what went wrong; None otherwise.
        """
        if request.status is RequestStatus.FINISHED:
            return
        if request.slot >= 0:
            self.ranks[request.rank].release(request.slot)
            if self._fair is not None:
                self._fair.stop(request)
        elif request in self._held:
            self._held.remove(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._requests[request.request_id]

    def output_token_ids(self, request: Request) -> np.ndarray:
        """Return the request's output tokens known so far, i32[n]. For a running request this is a view of its slot's
        tokens, which is only valid until the request loses the slot.
        """
        if request.slot < 0:
            return request.output_token_ids
        return self.ranks[request.rank].slots.output(request.slot)

    @property
    def next_deadline(self) -> float:
        """Earliest deadline of an unfinished request, in seconds of the engine's clock; inf if there is none."""
        while self._deadlines and self._deadlines[0][2].status is RequestStatus.FINISHED:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def schedule(self, now: float = 0.0) -> ScheduledStep:
        """Return the next step, and count it as in flight if it has rows.

        Requests whose deadline has passed are ended first (`ScheduledStep.expired`). Then running requests are
        scheduled, some of which may be preempted for lack of pages. Then waiting requests are admitted, including those
        that extensions no longer hold, and extensions add their data. A step without rows means that nothing can run
        before the next `update`. now: seconds of the engine's clock.
        """
        expired = self.expire(now) if self._deadlines else []
        for rank in self.ranks:
            rank.begin(self._num_in_flight)
            for request in rank.preempted:
                self._requeue(request)
        self._release_ready()
        if self._waiting.size:
            num_held = len(self._held)
            expired += self._admit(now)
            if len(self._held) > num_held:
                self._release_ready()
        width = max([extension.decode_width() for extension in self.extensions], default=1)
        step = ScheduledStep([rank.commit() for rank in self.ranks], expired, width)
        for extension in self.extensions:
            extension.complete(step)
        if self._fair is not None:
            for index, batch in enumerate(step.batches):
                self._fair.charge_outputs(index, batch.slots[batch.sample])
        self._num_in_flight += step.num_rows > 0
        return step

    def update(
        self,
        step: ScheduledStep,
        token_ids: np.ndarray | Sequence[np.ndarray],
        now: float = 0.0,
        counts: np.ndarray | None = None,
    ) -> StepResult:
        """Apply the tokens that a step has sampled, finish the requests that they end, and return both as a StepResult.
        The step no longer counts as in flight. Raises ValueError unless token_ids has one entry for each replica.

        Args:
          step: result of `schedule`; steps must be updated in the order in which they were scheduled.
          token_ids: for each replica, ids by row, i32 [replicas, >= rows]; for a step whose width is more than 1
            i32 [replicas, >= rows, width]. Rows that do not sample are ignored. A negative id means that the row's
            logits were not finite; its request ends with an error.
          now: when the tokens arrived, in seconds of the engine's clock.
          counts: i32 [replicas, >= rows], how many tokens each row got in a step of width > 1; None for other steps.
        """
        self._num_in_flight -= 1
        result = StepResult()
        for index, (rank, batch, tokens) in enumerate(zip(self.ranks, step.batches, token_ids, strict=True)):
            if batch.num_rows:
                own_counts = None if counts is None else counts[index]
                if self._fair is not None and own_counts is not None:
                    own = rank.slots.epoch[batch.slots] == batch.epochs
                    more = np.repeat(batch.slots[own], own_counts[: batch.num_rows][own] - 1)
                    self._fair.charge_outputs(index, more)
                for end in rank.update(batch, tokens, result, now, own_counts):
                    self.finish(*end)
                    result.finished.append(end.request)
        return result

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes of all replicas. Running requests keep their pages."""
        for rank in self.ranks:
            rank.pages.reset_prefix_cache()

    def preempt_all(self, which: Callable[[Request], bool] | None = None) -> None:
        """Put running requests back into the queue. They will be computed again from their first token, except for what
        the prefix cache has. No step may be in flight. The scheduler's `num_preemptions` does not count them.

        which: selects the requests; None for all.
        """
        for rank in self.ranks:
            for request in rank.preempt_all(which):
                self._put_back(request)

    def replace_weights(self, digest: bytes) -> None:
        """Set the digest of the weights that all later steps use. Requests admitted from now on do not find cached
        pages that other weights have computed.
        """
        for rank in self.ranks:
            rank.weights_digest = digest

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadline is before `now`, as aborted with stop_reason "timeout", and return them, the
        earliest deadline first.
        `schedule` calls this too. now: seconds of the engine's clock.
        """
        expired = []
        while self._deadlines and self._deadlines[0][0] < now:
            request = heapq.heappop(self._deadlines)[2]
            if request.status is not RequestStatus.FINISHED:
                self.finish(request, FinishReason.ABORT, "timeout")
                expired.append(request)
        return expired

    def _admit(self, now: float) -> list[Request]:
        """Admit waiting requests to replicas, in queue order, until the first one does not fit any replica or must
        wait. Return the requests that failed.

        A request that an extension does not admit is held outside the queue. A request with a value that does not fit
        its column is logged, ended with an error, and returned. At its first admission a request gets num_cached_tokens
        and first_scheduled_time, and with prefix caching it counts in num_prefix_queries and num_prefix_hits. now: see
        `schedule`.
        """
        failed = []
        while (request := self._waiting.first()) is not None and request.wait is Wait.NONE:
            if not all(each.admits(request) for each in self.extensions):
                self._waiting.remove(request)
                request.wait = Wait.APART
                self._held.add(request)
                continue
            best = self._best_offer(request)
            if best is None:
                break
            rank, offer = best
            try:
                rank.admit(request, offer)
            except (OverflowError, TypeError, ValueError) as error:
                if request.slot >= 0:  # not the request's fault; the cache may now have pages that no step will fill
                    raise
                logger.exception("request %s cannot be admitted", request.request_id)
                self.finish(request, FinishReason.ERROR, f"{type(error).__name__}: {error}")
                failed.append(request)
                continue
            is_new = request.num_cached_tokens < 0
            self._waiting.start(request, len(offer.known) - offer.num_cached if is_new else 0)
            if is_new:
                request.num_cached_tokens = offer.num_cached
                request.first_scheduled_time = now
                if self.config.enable_prefix_caching:
                    self.num_prefix_queries += len(offer.known)
                    self.num_prefix_hits += request.num_cached_tokens
        return failed

    def _release_ready(self) -> None:
        """Put the requests that extensions no longer hold into the queue."""
        for extension in self.extensions:
            for request in extension.ready():
                self.release(request)

    def _best_offer(self, request: Request) -> tuple[Rank, Offer] | None:
        """Return the replica that would have the least work with a request, in tokens held there and to be computed
        (of equal ones the first), and its offer; None if no open replica can run the request now.
        """

        def work(candidate: tuple[Rank, Offer]) -> int:
            rank, offer = candidate
            return rank.num_tokens + len(offer.known) - offer.num_cached

        offers = [(rank, offer) for rank in self.ranks if rank.is_open and (offer := rank.offer(request)) is not None]
        return min(offers, key=work, default=None)

    def _enqueue(self, request: Request) -> None:
        """Add a request to the queue, or to those held outside it if it waits for an extension (Wait.APART)."""
        if request.wait is Wait.APART:
            self._held.add(request)
        else:
            self._waiting.push(request)

    def _requeue(self, request: Request) -> None:
        """Return a request that was preempted for lack of pages to its old position in the queue, notify extensions,
        and count the preemption. Log a warning for the first preemption and for every fiftieth after it.
        """
        self._put_back(request)
        modes = [mode for each in self.extensions if (mode := each.preempted(request))]
        if self.num_preemptions % 50 == 0:
            mode = modes[0] if modes else "RECOMPUTE"
            logger.warning(_PREEMPTED, request.request_id, mode, self.num_preemptions + 1)
        self.num_preemptions += 1

    def _put_back(self, request: Request) -> None:
        """Return a request that has lost its slot to its old position in the queue, or hold it outside (`_enqueue`).
        Under the fair policy its client has one running request less.
        """
        self._enqueue(request)
        if self._fair is not None:
            self._fair.stop(request)
