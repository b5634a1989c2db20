"""Policy: which requests run next, and on which replica. One queue of waiting requests, one or more replicas that run
them.

The scheduler runs ahead of the device: `schedule` may be called before the tokens of earlier steps are known. It knows
no devices, tokenizers or text.
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
    """Scheduler that decides what each step computes. Call `schedule`, run the step on the device, and call `update`,
    in that order for every step with rows.

    All replicas share one queue, and a request gets its replica when it is admitted, not when it arrives. So no request
    waits for one replica while another idles, whatever lengths the requests turn out to have; the queue's order, with
    priorities and with preempted requests at the front, holds over all replicas; and nothing has to be moved, because a
    waiting request has no KV except what a prefix cache kept. (vLLM chooses on arrival, by 4 x waiting + running.) If
    the first request in the queue cannot run, none behind it is admitted, so that a long prompt is not overtaken for
    ever.

    Of the replicas that have a slot, tokens and pages for the first request, the one is chosen for which the tokens of
    its running requests plus those of this request that its prefix cache lacks are fewest; the first of equals. Both
    sums are work: held tokens are read by every later step and bound what fits, tokens not cached must be computed. So
    a cached prefix attracts a request unless that replica is more loaded than another by more than the prefix's length,
    and without one the replica with most room wins.

    Attributes:
      ranks: the replicas.
      num_pages: pages of all replicas.
      num_preemptions, num_prefix_queries, num_prefix_hits: over all replicas; the last two in tokens.
      extensions: the optional capabilities that take part.
      paused: whether the owner of the scheduler should schedule no step; `schedule` does not check it.

    Raises ValueError for a configuration without pages.
    """

    def __init__(self, config: SchedulerConfig):
        """Create the replicas and the extensions, and attach them to each other. Raises ValueError if num_pages is
        below 1.
        """
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
        """Return the extension of the capability `name`, which the engine must have been started with. Raises
        StopIteration for any other.
        """
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
        """Return the number of a client's requests in the queue. Only for the fair policy (AssertionError
        otherwise).
        """
        assert self._fair is not None
        return self._fair.num_waiting(client)

    @property
    def num_waiting_tokens(self) -> int:
        """Number of prompt tokens of the waiting requests."""
        return self._waiting.num_tokens + sum(request.num_prompt_tokens for request in self._held)

    @property
    def num_deferred(self) -> int:
        """Number of waiting requests that could not run even if there were room."""
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
        """Add a request to the queue and number it (`arrival_index`). A request that waits for an extension
        (Wait.APART) is held outside the queue.

        Raises:
          RequestError: the id is taken, the policy has no priorities or no clients, the prompt is empty or leaves no
            room for a token, or the request may need more pages than a pool has. Nothing has changed then.
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
        if config.num_pages < most_pages_of(config, min(length + request.max_tokens, config.max_model_len)):
            raise RequestError(
                f"prompt of {length} tokens and max_tokens {request.max_tokens} need more than a pool's "
                f"{config.num_pages * config.page_size} tokens; lower max_tokens or raise kv_cache_memory_bytes",
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
        """Take away the slot of a running request and hold it outside the queue until `release`, so that it blocks no
        other request.

        Its computed pages stay in the prefix cache. A token that a step in flight samples for it is dropped and sampled
        again, so at most one of its tokens may be in flight.
        """
        self.ranks[request.rank].release(request.slot)
        request.status, request.wait = RequestStatus.PREEMPTED, Wait.APART
        self._enqueue(request)
        if self._fair is not None:
            self._fair.take_back_output(request)
            self._fair.stop(request)

    def release(self, request: Request) -> None:
        """Put a request that is held outside the queue back into the queue. Does nothing for any other request."""
        if request in self._held:
            self._held.remove(request)
            request.wait = Wait.NONE
            self._enqueue(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request for `reason`, whatever its state. Its slot and pages are freed at once, and its tokens in
        flight are dropped. Does nothing if it has already ended.

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
        """Return the request's output tokens known so far, i32[n]."""
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

        Running requests come first, and may be preempted for lack of pages. Then waiting ones are admitted, including
        those that extensions no longer hold, and extensions add their data. A step without rows means that nothing can
        run before the next `update`. now: seconds of the engine's clock; requests whose deadline has passed are ended
        (`ScheduledStep.expired`).
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
        """Apply the tokens that a step sampled, finish the requests that they end, and return both as a StepResult. The
        step no longer counts as in flight. Raises ValueError unless token_ids has one entry for each replica.

        Args:
          step: from `schedule`; steps must be updated in their order.
          token_ids: for each replica, ids by row, i32 [replicas, >= rows]; for a step whose width is more than 1
            i32 [replicas, >= rows, width]. Rows that do not sample are ignored. A negative id means that the row's
            logits were not finite; its request ends with an error.
          now: when they came, in seconds of the engine's clock.
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
        """Put running requests back into the queue. They are computed again from their first token, except for what the
        prefix cache has. No step may be in flight. `num_preemptions` of the scheduler does not count them.

        which: selects the requests; None for all.
        """
        for rank in self.ranks:
            for request in rank.preempt_all(which):
                self._put_back(request)

    def replace_weights(self, digest: bytes) -> None:
        """Set the digest of the weights of all later steps. Requests admitted from now on do not find cached pages of
        other weights.
        """
        for rank in self.ranks:
            rank.weights_digest = digest

    def expire(self, now: float) -> list[Request]:
        """End the requests whose deadlines are before `now`, seconds of the engine's clock, as aborted with stop_reason
        "timeout", and return them. `schedule` does this, too.
        """
        expired = []
        while self._deadlines and self._deadlines[0][0] < now:
            request = heapq.heappop(self._deadlines)[2]
            if request.status is not RequestStatus.FINISHED:
                self.finish(request, FinishReason.ABORT, "timeout")
                expired.append(request)
        return expired

    def _admit(self, now: float) -> list[Request]:
        """Admit waiting requests to replicas, in queue order, until the first one fits nowhere or must wait.

        Requests that an extension does not admit are then held outside the queue. A request with a value that fits no
        column is logged and ended with an error; only these requests are returned. At its first admission a request
        gets num_cached_tokens and first_scheduled_time, and with prefix caching it counts in num_prefix_queries and
        num_prefix_hits. now: see `schedule`.
        """
        failed = []
        while (request := self._waiting.first()) is not None and request.wait is Wait.NONE:
            if not all(each.admits(request) for each in self.extensions):
                self._waiting.remove(request)
                request.wait = Wait.APART
                self._held.add(request)
                continue
            place = self._place(request)
            if place is None:
                break
            rank, offer = place
            try:
                rank.admit(request, offer)
            except (OverflowError, TypeError, ValueError) as error:
                if request.slot >= 0:  # no value of the request: pages may be in the cache that no step will fill
                    raise
                logger.exception("request %s cannot be taken in", request.request_id)
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
        """Put the requests that extensions no longer hold back into the queue."""
        for extension in self.extensions:
            for request in extension.ready():
                self.release(request)

    def _place(self, request: Request) -> tuple[Rank, Offer] | None:
        """Return the replica with the least work (`_work`) that can run a request now, with its offer; None if no
        replica can.
        """
        offers = [(rank, offer) for rank in self.ranks if rank.is_open and (offer := rank.offer(request)) is not None]
        return min(offers, key=self._work, default=None)

    def _work(self, place: tuple[Rank, Offer]) -> int:
        """Return the number of known tokens that the replica of `place` would hold with the new request, minus those of
        the request that are cached.
        """
        rank, offer = place
        return rank.num_tokens + len(offer.known) - offer.num_cached

    def _enqueue(self, request: Request) -> None:
        """Add a request to the queue, or to those held outside it if it waits for an extension (Wait.APART)."""
        if request.wait is Wait.APART:
            self._held.add(request)
        else:
            self._waiting.push(request)

    def _requeue(self, request: Request) -> None:
        """Put a request that was preempted for lack of pages back to its old position in the queue, tell the
        extensions, count the preemption, and log a warning for the first preemption and every fiftieth after it.
        """
        self._put_back(request)
        modes = [mode for each in self.extensions if (mode := each.preempted(request))]
        if self.num_preemptions % 50 == 0:
            mode = modes[0] if modes else "RECOMPUTE"
            logger.warning(_PREEMPTED, request.request_id, mode, self.num_preemptions + 1)
        self.num_preemptions += 1

    def _put_back(self, request: Request) -> None:
        """Put a request that has lost its slot back to its old position in the queue, or outside it (`_enqueue`). Under
        the fair policy its client has one running request less.
        """
        self._enqueue(request)
        if self._fair is not None:
            self._fair.stop(request)
