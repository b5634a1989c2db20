"""The policy: decodes first, then running prefills, then waiting requests, while tokens, slots and pages last.

A prefill chunk and a decode are one thing, a request with `num_scheduled_tokens` new tokens. The running decodes are
handled as arrays; Python objects are touched only for requests that start, end, prefill, are preempted or want every
token. Runs one step ahead of the device: `schedule` may be called before the tokens of the step before are known.
Knows nothing of devices, tokenizers or text.
"""

from __future__ import annotations

import heapq
import logging

import numpy as np

from scheduler.batch import Emitted, PageDeltas, ScheduledBatch, StepResult, features_of
from scheduler.config import SchedulerConfig
from scheduler.errors import RequestError
from scheduler.page_pool import PagePool
from scheduler.request import FinishReason, Request, RequestStatus
from scheduler.slots import Slots
from scheduler.waiting import WaitingQueue

logger = logging.getLogger(__name__)


class Scheduler:
    """Decides what each step computes. `schedule` -> the device -> `update`, in that order for every step."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.pool = PagePool(config.num_pages, enable_caching=config.enable_prefix_caching)
        self.slots = Slots(config.max_num_seqs, config.max_pages_per_seq)
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(config.policy)
        self._num_arrived = 0
        self._deadlines: list[tuple[float, int, Request]] = []
        # Requests preempted while a token of theirs was in flight, by the (slot, epoch) it will come back to.
        self._late: dict[tuple[int, int], Request] = {}
        self._deltas: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    @property
    def num_running(self) -> int:
        return self.slots.num_active

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
          RequestError: the id is taken, or the prompt leaves no room for a token. Nothing has changed then.
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
        length = request.num_prompt_tokens
        if not 1 <= length < config.max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens; allowed are 1 to {config.max_model_len - 1}, "
                f"one less than max_model_len",
                param="prompt",
                value=length,
            )
        if config.num_pages < -(-min(length + request.max_tokens, config.max_model_len) // config.page_size):
            raise RequestError(
                f"prompt of {length} tokens and max_tokens {request.max_tokens} need more than the pool's "
                f"{config.num_pages * config.page_size} tokens; lower max_tokens or raise kv_cache_memory_bytes",
                param="max_tokens",
                value=request.max_tokens,
            )
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        if request.deadline != float("inf"):
            heapq.heappush(self._deadlines, (request.deadline, request.arrival_index, request))
        self._waiting.push(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request in whatever state it is; its pages are free at once."""
        if request.status is RequestStatus.FINISHED:
            return
        if request.slot >= 0:
            self._release(request.slot)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._requests[request.request_id]

    def output_token_ids(self, request: Request) -> np.ndarray:
        """Output known so far, i32[n]."""
        return self.slots.output(request.slot) if request.slot >= 0 else request.output_token_ids

    def schedule(self, now: float = 0.0) -> ScheduledBatch:
        """The rows of the next step. An empty batch means that nothing can run before the next `update`."""
        expired = self._expire(now) if self._deadlines else []
        preemptions = self.num_preemptions
        self._deltas = []
        decodes = self._schedule_decodes()
        budget = self.config.max_num_batched_tokens - len(decodes)
        prefills = self._schedule_prefills(budget)
        preempted = self.num_preemptions != preemptions
        if preempted:
            decodes = decodes[self.slots.active[decodes]]
            prefills = [(slot, count) for slot, count in prefills if self.slots.active[slot]]
        for slot, count in prefills:
            self._register_prompt_pages(slot, int(self.slots.num_computed[slot]) + count)
        admitted: list[Request] = []
        if self.num_waiting and not preempted:
            budget -= sum(count for _, count in prefills)
            admitted = self._admit(budget, prefills, now)
        return self._commit(decodes, prefills, admitted, expired)

    def update(self, batch: ScheduledBatch, token_ids: np.ndarray) -> StepResult:
        """Takes in the tokens a step sampled, i32[num_rows] (rows that do not sample are ignored).

        A negative id says that the row's logits were not finite; its request ends with an error.
        """
        slots_ = self.slots
        rows = np.flatnonzero(batch.sample)
        current = slots_.epoch[batch.slots[rows]] == batch.epochs[rows]
        result = StepResult()
        if not current.all():
            for row in rows[~current].tolist():
                self._update_late(int(batch.slots[row]), int(batch.epochs[row]), row, int(token_ids[row]), result)
            rows = rows[current]
        slots, tokens = batch.slots[rows], token_ids[rows]
        result.num_new_tokens += len(rows)
        slots_.append_tokens(slots, tokens)
        known = slots_.num_known[slots]
        stopped = (slots_.stop_ids[slots] == tokens[:, None]).any(axis=1) & (known >= slots_.min_stop[slots])
        ended = stopped | (known >= slots_.limit[slots]) | (tokens < 0)
        first = known == slots_.num_prompt[slots] + 1
        for index in np.flatnonzero(ended | first | slots_.per_step[slots]).tolist():
            request, token = slots_.requests[slots[index]], int(tokens[index])
            assert request is not None
            if first[index]:
                result.first_tokens.append(request)
            if request.per_step:
                result.emitted.append(Emitted(request, int(rows[index]), token))
            if ended[index]:
                self._end(request, token, bool(stopped[index]))
                result.finished.append(request)
        return result

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes. Running requests keep their pages."""
        self.pool.reset_prefix_cache()

    def _expire(self, now: float) -> list[Request]:
        expired = []
        while self._deadlines and self._deadlines[0][0] < now:
            request = heapq.heappop(self._deadlines)[2]
            if request.status is not RequestStatus.FINISHED:
                self.finish(request, FinishReason.ABORT, "deadline")
                expired.append(request)
        return expired

    def _schedule_decodes(self) -> np.ndarray:
        """Slots that feed their last token, i32[n]; each has a page for it."""
        s = self.slots
        ready = s.active & (s.num_computed >= s.num_fed) & (s.num_tokens < s.limit)
        if s.wait_for_token.any():
            ready &= ~s.wait_for_token | (s.num_known == s.num_tokens)
        slots = np.flatnonzero(ready)
        needy = slots[s.num_computed[slots] == s.num_pages[slots] * self.config.page_size]
        while len(needy) > self.pool.num_free:
            self._preempt(s.last_in_line())
            needy = needy[s.active[needy]]
        if len(needy):
            pages = self.pool.allocate(len(needy))
            columns = s.num_pages[needy]
            s.page_table[needy, columns] = pages
            s.num_pages[needy] += 1
            self._deltas.append((needy.astype(np.int32), columns, pages))
        return slots[s.active[slots]]

    def _schedule_prefills(self, budget: int) -> list[tuple[int, int]]:
        """(slot, tokens) of running requests whose known tokens are not all computed."""
        s = self.slots
        slots = np.flatnonzero(s.active & (s.num_computed < s.num_fed))
        if not len(slots):
            return []
        order = np.lexsort((s.arrival_index[slots], s.priority[slots]))
        scheduled: list[tuple[int, int]] = []
        for slot in slots[order].tolist():
            if budget < 1:
                break
            if not s.active[slot]:
                continue
            computed = int(s.num_computed[slot])
            count = self._chunk(int(s.num_fed[slot]) - computed, budget)
            need = -(-(computed + count) // self.config.page_size) - int(s.num_pages[slot])
            while need > self.pool.num_free and s.active[slot]:
                self._preempt(s.last_in_line())
            if not s.active[slot]:
                break
            self._grow(slot, need)
            scheduled.append((slot, count))
            budget -= count
        return scheduled

    def _admit(self, budget: int, prefills: list[tuple[int, int]], now: float) -> list[Request]:
        """Gives slots to waiting requests in line order and appends their (slot, tokens) to `prefills`."""
        s, pool, page_size = self.slots, self.pool, self.config.page_size
        admitted: list[Request] = []
        while budget > 0 and s.num_free and (request := self._waiting.first()) is not None:
            known = request.known_token_ids()
            hits = self._cached_pages(request, known)
            cached = len(hits) * page_size
            count = self._chunk(len(known) - cached, budget)
            need = -(-(cached + count) // page_size) - len(hits)
            chunk_refused = not self.config.enable_chunked_prefill and count < len(known) - cached
            if chunk_refused or need > pool.num_free - pool.num_free_among(hits):
                break
            self._waiting.remove(request)
            limit = min(request.num_prompt_tokens + request.max_tokens, self.config.max_model_len)
            slot = s.take(request, known, cached, limit, features_of(request.params))
            pool.acquire(hits)
            if len(hits):
                self._deltas.append((*s.add_pages(slot, hits), hits))
            s.num_hashed[slot] = len(hits)
            self._grow(slot, need)
            self._register_prompt_pages(slot, cached + count)
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = cached
                request.first_scheduled_time = now
                if self.config.enable_prefix_caching:
                    self.num_prefix_queries += len(known)
                    self.num_prefix_hits += cached
            request.status = RequestStatus.RUNNING
            admitted.append(request)
            prefills.append((slot, count))
            budget -= count
        return admitted

    def _chunk(self, remaining: int, budget: int) -> int:
        limit = self.config.long_prefill_token_threshold or remaining
        return min(remaining, budget, limit)

    def _cached_pages(self, request: Request, known: np.ndarray) -> np.ndarray:
        """Pages that hold a prefix of `known`; at least one token is left to compute."""
        if not self.config.enable_prefix_caching:
            return np.empty(0, np.int32)
        hashes = request.extend_page_hashes(known, self.config.page_size)
        if request.params.prompt_logprobs is not None:
            return np.empty(0, np.int32)
        return self.pool.lookup(hashes[: (len(known) - 1) // self.config.page_size])

    def _grow(self, slot: int, count: int) -> None:
        if count > 0:
            pages = self.pool.allocate(count)
            self._deltas.append((*self.slots.add_pages(slot, pages), pages))

    def _register_prompt_pages(self, slot: int, num_computed: int) -> None:
        """Makes pages findable whose tokens this step computes; a step writes all its KV before any row reads it."""
        request = self.slots.requests[slot]
        assert request is not None
        first, last = int(self.slots.num_hashed[slot]), num_computed // self.config.page_size
        last = min(last, len(request.page_hashes))
        for index in range(first, last):
            self.pool.register(int(self.slots.page_table[slot, index]), request.page_hashes[index])
        self.slots.num_hashed[slot] = max(first, last)

    def _release(self, slot: int) -> None:
        """Frees a slot and its pages; full pages of generated tokens become findable now."""
        s = self.slots
        request = s.requests[slot]
        assert request is not None
        if self.config.enable_prefix_caching:
            # A token's KV exists once its step has been dispatched; the last sampled token may never be fed.
            written = int(min(s.num_computed[slot], s.num_known[slot]))
            if written // self.config.page_size > int(s.num_hashed[slot]):
                tokens = np.concatenate([request.prompt_token_ids, s.output(slot)])[:written]
                request.extend_page_hashes(tokens, self.config.page_size)
                self._register_prompt_pages(slot, written)
        pages = s.page_table[slot, : s.num_pages[slot]].copy()
        s.release(slot)
        self.pool.free(pages)

    def _preempt(self, slot: int) -> None:
        """Takes a slot's pages away; its request waits at the front of the line and is computed again."""
        s = self.slots
        request = s.requests[slot]
        assert request is not None
        if s.num_tokens[slot] > s.num_known[slot]:
            self._late[slot, int(s.epoch[slot])] = request
        self._release(slot)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._waiting.push(request)
        if self.num_preemptions % 50 == 0:
            logger.warning(
                "Request %s is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space. "
                "This can affect the end-to-end performance. Increase gpu_memory_utilization or tensor_parallel_size "
                "to provide more KV cache memory, or lower max_num_seqs or max_num_batched_tokens. "
                "total_num_cumulative_preemption=%d",
                request.request_id,
                self.num_preemptions + 1,
            )
        self.num_preemptions += 1

    def _update_late(self, slot: int, epoch: int, row: int, token: int, result: StepResult) -> None:
        """A token of a request that no longer holds the slot: kept if it was preempted, dropped if it ended."""
        request = self._late.pop((slot, epoch), None)
        if request is None or request.status is RequestStatus.FINISHED:
            return
        result.num_new_tokens += 1
        request.output_token_ids = np.append(request.output_token_ids, np.int32(token))
        num_output = len(request.output_token_ids)
        if num_output == 1:
            result.first_tokens.append(request)
        if request.per_step:
            result.emitted.append(Emitted(request, row, token))
        stopped = token in request.stop_token_ids and num_output >= max(1, request.params.min_tokens)
        length = request.num_prompt_tokens + num_output >= self.config.max_model_len
        if stopped or token < 0 or num_output >= request.max_tokens or length:
            self._end(request, token, stopped)
            result.finished.append(request)

    def _end(self, request: Request, token: int, stopped: bool) -> None:
        if token < 0:
            self.finish(request, FinishReason.ERROR, "logits are not finite")
        elif stopped:
            self.finish(request, FinishReason.STOP, None if token in request.eos_token_ids else token)
        else:
            self.finish(request, FinishReason.LENGTH)

    def _commit(
        self, decodes: np.ndarray, prefills: list[tuple[int, int]], admitted: list[Request], expired: list[Request]
    ) -> ScheduledBatch:
        """Counts the step as done and describes it."""
        s = self.slots
        if prefills:
            tail = np.array(prefills, np.int64)
            slots = np.concatenate([decodes, tail[:, 0]])
            counts = np.concatenate([np.ones(len(decodes), np.int32), tail[:, 1].astype(np.int32)])
        else:
            slots, counts = decodes, np.ones(len(decodes), np.int32)
        start = np.full(len(slots), -1, np.int32)
        sample = np.ones(len(slots), np.bool_)
        token_ids, next_tokens = [], []
        taken = {request.slot for request in admitted}
        for row, (slot, count) in enumerate(prefills, len(decodes)):
            known, computed = s.known[slot], int(s.num_computed[slot])
            assert known is not None
            token_ids.append(known[computed : computed + count])
            following = computed + count < s.num_prompt[slot]
            next_tokens.append(int(known[computed + count]) if following else -1)
            sample[row] = computed + count >= s.num_fed[slot]
            if slot in taken:
                start[row] = computed
        s.num_computed[slots] += counts
        s.num_tokens[slots] += sample
        return ScheduledBatch(
            slots=slots,
            num_scheduled=counts,
            start=start,
            sample=sample,
            epochs=s.epoch[slots],
            num_decode=len(decodes),
            token_ids=token_ids,
            next_tokens=next_tokens,
            deltas=PageDeltas.concatenate(self._deltas),
            admitted=admitted,
            expired=expired,
            features=int(np.bitwise_or.reduce(s.features[slots], initial=0)),
        )
