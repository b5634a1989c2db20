"""Schedule of one replica ("rank"): its pages, its slots, and its rows of the next step.

Decodes come first, then running prefills, then the requests that the scheduler admits, until tokens, slots or pages run
out. A prefill chunk and a decode are the same thing: a request with `num_scheduled` new tokens. Decodes are handled as
arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.request import Request, RequestStatus
from jaxengine.scheduler.base.token_params import PROMPT_FEATURES
from jaxengine.scheduler.batches.batch import PageDeltas, ScheduledBatch, StepResult
from jaxengine.scheduler.batches.results import End, Results
from jaxengine.scheduler.batches.slots import Slots
from jaxengine.scheduler.extension import RankExtension
from jaxengine.scheduler.pages.groups import PageTables, most_pages_of
from jaxengine.scheduler.pages.snapshots import Hits


class Offer(NamedTuple):
    """Cached pages and work of a waiting request on a replica, if the request were admitted now.

    Attributes:
      known: i32 [n], the request's known tokens.
      hits: cached pages that hold a prefix of them.
      num_cached: number of tokens of that prefix.
      count: number of tokens that the next step would compute.
    """

    known: np.ndarray
    hits: Hits
    num_cached: int
    count: int


class Rank:
    """Scheduler of one replica's batches. For each step call `begin`, then `admit` any number of times, then `commit`,
    and `update` once its tokens are known.

    Attributes:
      config: limits and policy.
      index: number of the replica.
      pages: page tables of its slots. pool: the pool of their pages.
      slots: its running requests.
      budget: tokens that the step being scheduled can still take; 0 after a preemption, so that none is admitted.
      preempted: requests that lost their slot in this step.
      decodes: i64 [n], slots that feed their last sampled token in this step.
      weights_digest: digest of the weights that compute requests admitted from now on, see Request.
    """

    def __init__(self, config: SchedulerConfig, index: int = 0):
        """Begin without requests, with an empty pool of config.num_pages pages. Raises ValueError for num_pages < 1."""
        self.config = config
        self.index = index
        self.pages = PageTables(config)
        self.pool = self.pages.pool
        self.slots = Slots(config.max_num_seqs)
        self._extensions: list[RankExtension] = []
        self.budget = 0
        self.preempted: list[Request] = []
        self.weights_digest = b""
        self._results = Results(self.slots, index, config.max_model_len)
        self._num_steps = 0
        # num_scheduled, start and sample of a batch of max_num_seqs decodes; smaller batches take slices.
        self._decode_columns = [
            np.full(config.max_num_seqs, fill, dtype) for fill, dtype in ((1, np.int32), (-1, np.int32), (1, np.bool_))
        ]
        for column in self._decode_columns:
            column.flags.writeable = False
        # The step being scheduled.
        self.decodes = np.empty(0, np.int64)
        self._prefills: list[tuple[int, int]] = []
        self._admitted: list[Request] = []
        # Free pages that running requests still need for tokens that are already known.
        self._num_promised = 0

    def extend(self, extensions: Sequence[RankExtension]) -> None:
        """Add extensions, which take part from the next step on."""
        self._extensions += extensions

    @property
    def num_tokens(self) -> int:
        """Number of known tokens of this replica's running requests, whether computed or not."""
        return int(self.slots.num_tokens[self.slots.active].sum())

    def count_token_slots(self) -> tuple[int, int]:
        """Return the number of token slots in the pages that running requests hold, over all cache groups, and how many
        of these slots hold no computed token.
        """
        s, pages, page_size = self.slots, self.pages, self.config.page_size
        active = np.flatnonzero(s.active)
        empty = page_size * int(pages.num_columns[active].sum()) - int(s.num_computed[active].sum())
        return page_size * pages.count_held(active), pages.num_groups * empty

    @property
    def is_open(self) -> bool:
        """Whether the step being scheduled has tokens left and the replica has a free slot."""
        return self.budget > 0 and self.slots.num_free > 0

    def begin(self, num_in_flight: int) -> None:
        """Start a step with the rows of running requests: decodes, then prefill chunks. Allocate their pages, and
        register in the prefix cache the pages that the chunks fill.

        Pages that sliding windows have left are freed first. If there are too few pages, requests are preempted
        (`preempted`), and `budget` becomes 0. num_in_flight: number of steps whose tokens are not known yet.
        """
        self._num_steps += 1
        self._admitted, self.preempted = [], []
        for extension in self._extensions:
            extension.begin()
        # Prefills free the pages that their windows have left here; decodes do so when they grow.
        for slot, _ in self._prefills:
            self.pages.give_back(slot, int(self.slots.num_computed[slot]))
        decodes = self._schedule_decodes(num_in_flight)
        self.budget = self.config.max_num_batched_tokens - len(decodes)
        # A running request that does not decode has known tokens left to compute, or its last token is in flight.
        prefills = self._schedule_prefills() if len(decodes) < self.slots.num_active else []
        if self.preempted:
            decodes = decodes[self.slots.active[decodes]]
            prefills = [(slot, count) for slot, count in prefills if self.slots.active[slot]]
            self.budget = 0
        for slot, count in prefills:
            self._register_pages(slot, int(self.slots.num_computed[slot]) + count, count)
        self.decodes, self._prefills = decodes, prefills
        # Without prefills there are none left, or the step had no tokens for them, or an extension has deferred them.
        is_waiting = prefills or (self._extensions and len(decodes) < self.slots.num_active)
        self._num_promised = sum(self._num_missing(slot) for slot in self._unfed().tolist()) if is_waiting else 0

    def offer(self, request: Request) -> Offer | None:
        """Return what an open replica can do for a waiting request. None if it has too few free pages, if the step has
        no tokens left (without enable_chunked_prefill: too few for the whole prompt), or if an extension defers the
        request. Reserves nothing, but sets the request's weights digest and page digests.

        There must be pages for all known tokens of the request, in addition to those that running requests still need
        for theirs.
        """
        request.compute_with(self.weights_digest)
        known = request.known_token_ids()
        hits = self.pages.lookup(self.findable(request, known) if self.config.enable_prefix_caching else ())
        cached = hits.num_columns * self.config.page_size
        count = self._chunk(request, cached, len(known) - cached, hits)
        if not count or (count < len(known) - cached and not self.config.enable_chunked_prefill):
            return None
        need = most_pages_of(self.config, len(known)) - sum(map(len, hits.pages))
        return Offer(known, hits, cached, count) if self.pages.can_take(hits, need + self.num_reserved) else None

    def admit(self, request: Request, offer: Offer) -> None:
        """Give a request a slot, and the pages and tokens of an offer, and set its rank and its status, RUNNING.

        offer: result of the method `offer`; nothing may have changed since it was made. Raises OverflowError, TypeError
        or ValueError, with no slot taken, if a value of the request does not fit its column. If the request has a slot
        after an error, the replica is in an undefined state.
        """
        s, (known, hits, cached, count) = self.slots, offer
        limit = min(request.num_prompt_tokens + request.max_tokens, self.config.max_model_len)
        request.rank = self.index
        slot = s.take(request, known, cached, limit)
        request.status = RequestStatus.RUNNING
        self.pages.begin(slot, hits)
        self.pages.grow(slot, cached + count)
        for extension in self._extensions:
            extension.reserve(request, cached, count)
            extension.admit(request, len(known), hits)
        self._register_pages(slot, cached + count, count)
        self._admitted.append(request)
        self._prefills.append((slot, count))
        self.budget -= count
        if cached + count < len(known):
            self._num_promised += self._num_missing(slot)

    @property
    def num_decodes(self) -> int | None:
        """Number of decodes of the step being scheduled; None if the step has other rows as well."""
        return None if self._prefills else len(self.decodes)

    @property
    def num_reserved(self) -> int:
        """Number of free pages that admission leaves to running requests: those for their known tokens, and one more
        column for each request that may outgrow the columns that it has.

        Without them a request might be admitted only to be preempted as soon as a decode begins a new page.
        """
        s = self.slots
        may_grow = s.active & (s.limit > self.pages.num_columns * self.config.page_size)
        return self._num_promised + self.pages.num_to_grow(np.flatnonzero(may_grow))

    def commit(self) -> ScheduledBatch:
        """End the step being scheduled and return its batch, which must then be dispatched. Extensions complete the
        batch; its tokens count as computed from now on. In Slots.num_tokens a decode row counts as many tokens as it
        computes, and another row that samples counts one.
        """
        s, batch = self.slots, self._batch()
        for extension in self._extensions:
            extension.complete(batch)
        slots, num_decode = batch.slots, batch.num_decode
        s.num_computed[slots] += batch.num_scheduled
        s.num_tokens[slots[:num_decode]] += batch.num_scheduled[:num_decode]
        if num_decode < batch.num_rows:
            s.num_tokens[slots[num_decode:]] += batch.sample[num_decode:]
        return batch

    def _batch(self) -> ScheduledBatch:
        """Return the batch of the scheduled step: decodes of one token each, then prefill chunks, shortest first. The
        batch takes the page tables' deltas. With several micro-batches the step's number is written to Slots.last_step.
        """
        s, decodes = self.slots, self.decodes
        # Long chunks come last because the model may attend to them in another way
        # (jaxengine.models.layers.attention.mla_expanded).
        prefills = sorted(self._prefills, key=lambda chunk: chunk[1])
        num_decode, num_rows = len(decodes), len(decodes) + len(prefills)
        ones, unset, chosen = self._decode_columns
        slots, counts, start, sample = decodes, ones[:num_rows], unset[:num_rows], chosen[:num_rows]
        if prefills:
            tail = np.array(prefills, np.int64)
            slots, counts, start, sample = np.concatenate([decodes, tail[:, 0]]), *map(np.copy, (counts, start, sample))
            counts[num_decode:] = tail[:, 1]
        decode_token_ids = None
        if self.config.num_micro_batches > 1:
            decode_token_ids = s.last_token_ids(decodes)
            s.last_step[slots] = self._num_steps
        token_ids, next_tokens, unused = [], [], PROMPT_FEATURES
        admitted = {request.slot for request in self._admitted} if prefills else ()
        for row, (slot, count) in enumerate(prefills, num_decode):
            known, computed = s.known[slot], int(s.num_computed[slot])
            assert known is not None
            token_ids.append(known[computed : computed + count])
            following = computed + count < s.num_prompt[slot]
            next_tokens.append(int(known[computed + count]) if following else -1)
            if computed + 1 < s.num_prompt[slot]:
                unused &= ~int(s.features[slot])
            sample[row] = computed + count >= s.num_fed[slot]
            if slot in admitted:
                start[row] = computed
        return ScheduledBatch(
            slots=slots,
            num_scheduled=counts,
            start=start,
            sample=sample,
            epochs=s.epoch[slots],
            num_rows=num_rows,
            num_tokens=int(counts.sum()) if prefills else num_decode,
            num_decode=num_decode,
            decode_token_ids=decode_token_ids,
            token_ids=token_ids,
            next_tokens=next_tokens,
            deltas=PageDeltas.concatenate(self.pages.take_deltas()),
            admitted=self._admitted,
            features=int(np.bitwise_or.reduce(s.features[slots], initial=0)) & ~unused,
        )

    def update(
        self,
        batch: ScheduledBatch,
        token_ids: np.ndarray,
        result: StepResult,
        now: float,
        counts: np.ndarray | None = None,
    ) -> list[End]:
        """Apply the sampled tokens of a batch and add them to `result`. Return the requests that they end, which the
        caller must finish. Batches must be updated in the order of their steps. Arguments: see `Results.take`.
        """
        return self._results.take(batch, token_ids, counts, result, now)

    def release(self, slot: int) -> None:
        """Free a running request's slot and pages, and what extensions hold for it. The request keeps its output and
        its status.

        With prefix caching, all full pages of its computed tokens are first registered in the cache, including those of
        generated tokens.
        """
        s = self.slots
        request = s.requests[slot]
        assert request is not None
        if self.config.enable_prefix_caching:
            # A token's KV counts as written once its step is dispatched. The last sampled token may never be fed.
            written = int(min(s.num_computed[slot], s.num_known[slot]))
            if not self.pages.is_registered(slot, written):
                tokens = s.known_token_ids(slot)[:written]
                request.extend_page_hashes(tokens, self.config.page_size)
                self._register_pages(slot, written)
        s.release(slot)
        self.pages.release(slot)
        for extension in self._extensions:
            extension.release(slot)

    def preempt_all(self, which: Callable[[Request], bool] | None = None) -> list[Request]:
        """Preempt running requests, between two steps and with no step in flight, and return them in the order of their
        slots; they have to wait again. which: selects the requests; None for all.
        """
        self.preempted = []
        for slot in self.slots.active.nonzero()[0].tolist():
            request = self.slots.requests[slot]
            if which is None or (request is not None and which(request)):
                self._preempt(slot)
        return self.preempted

    def _schedule_decodes(self, num_in_flight: int) -> np.ndarray:
        """Return the slots that decode in this step, i64 [n] ascending, after allocating a page of every group for each
        slot that needs one: all that can, or with micro-batches a share of them (`_next_share`).

        If there are too few pages, those behind the windows of these slots are freed, and requests are preempted, the
        last in order first. num_in_flight: number of steps whose tokens are not known yet.
        """
        s = self.slots
        ready = s.active & (s.num_computed >= s.num_fed) & (s.num_tokens < s.limit)
        slots = ready.nonzero()[0] if self.config.num_micro_batches == 1 else self._next_share(ready, num_in_flight)
        pages, computed = self.pages, s.num_computed[slots]
        needy = slots[computed == pages.num_columns[slots] * self.config.page_size]
        if len(needy) and len(needy) * pages.num_groups > self.pool.num_free:
            for slot in needy.tolist():  # pages that other requests share do not become free
                pages.give_back(slot, int(s.num_computed[slot]))
        while len(needy) and len(needy) * pages.num_groups > self.pool.num_free:
            self._preempt(s.last_in_order())
            needy = needy[s.active[needy]]
        if len(needy):
            pages.grow_by_one(needy)
        return slots[s.active[slots]] if self.preempted else slots

    def _next_share(self, ready: np.ndarray, num_in_flight: int) -> np.ndarray:
        """Return the slots that decode in the next of several micro-batches (num_micro_batches > 1), i64 [n] ascending:
        of the slots whose last token is known, those that have waited longest.

        ready: bool [max_num_seqs], slots that could decode. num_in_flight: number of steps whose tokens are not known.

        The available decodes are spread over the steps that can be dispatched before the next one returns. No step
        takes more than an even share of all decodes.
        """
        s, num_steps = self.slots, self.config.num_micro_batches
        slots = np.flatnonzero(ready & (s.num_known == s.num_tokens))
        count = min(
            -(-int(np.count_nonzero(ready)) // num_steps),
            -(-len(slots) // max(1, num_steps - num_in_flight)),
        )
        return np.sort(slots[np.argsort(s.last_step[slots], kind="stable")[:count]])

    def _schedule_prefills(self) -> list[tuple[int, int]]:
        """Return (slot, number of tokens to compute) for running requests that still have known tokens to compute, in
        queue order until the budget is used up. Allocates their pages, calls the extensions' `reserve`, and reduces
        `budget`.

        If there are too few pages, requests are preempted, the last in order first. The list may still contain
        preempted requests, which the caller must remove.
        """
        s, slots = self.slots, self._unfed()
        if not len(slots):
            return []
        order = np.lexsort((s.arrival_index[slots], s.priority[slots]))
        scheduled: list[tuple[int, int]] = []
        for slot in slots[order].tolist():
            if self.budget < 1:
                break
            if not s.active[slot]:
                continue
            request, computed = s.requests[slot], int(s.num_computed[slot])
            count = self._chunk(request, computed, int(s.num_fed[slot]) - computed)
            if not count:  # deferred
                continue
            need = self.pages.num_missing(slot, computed + count)
            while need > self.pool.num_free and s.active[slot]:
                self._preempt(s.last_in_order())
            if not s.active[slot]:
                break
            self.pages.grow(slot, computed + count)
            for extension in self._extensions:
                extension.reserve(request, computed, count)
            scheduled.append((slot, count))
            self.budget -= count
        return scheduled

    def _unfed(self) -> np.ndarray:
        """Return the slots that do not decode yet, i64 [n]: some of the tokens that were known when their request took
        the slot have not been computed.
        """
        s = self.slots
        return (s.active & (s.num_computed < s.num_fed)).nonzero()[0]

    def _num_missing(self, slot: int) -> int:
        """Return how many more pages the known tokens of a slot will take at most (`most_pages_of`)."""
        held = self.pages.count_held(np.array([slot]))
        return most_pages_of(self.config, int(self.slots.num_fed[slot])) - held

    def _chunk(self, request: Request, start: int, remaining: int, hits: Hits | None = None) -> int:
        """Return how many of the `remaining` tokens of a request, from `start` on, the step computes. The budget,
        long_prefill_token_threshold (0 for no limit) and every extension limit the number; it is 0 if an extension
        defers the request. hits: see RankExtension.chunk.
        """
        count = min(remaining, self.budget, self.config.long_prefill_token_threshold or remaining)
        for extension in self._extensions:
            count = extension.chunk(request, start, count, hits)
        return count

    def findable(self, request: Request, known: np.ndarray) -> Sequence[bytes]:
        """Return the digests of the leading pages of a request's tokens, `known` i32 [n], that may be taken from a
        cache. At least one token is left to compute, and no more than `most_cached` tokens may come from a cache.
        """
        hashes = request.extend_page_hashes(known, self.config.page_size)
        most = request.params.most_cached
        most = len(known) - 1 if most is None else min(most, len(known) - 1)
        return hashes[: most // self.config.page_size]

    def _register_pages(self, slot: int, num_computed: int, count: int = 0) -> None:
        """Register in the prefix cache the pages that the slot's first `num_computed` tokens fill.

        count: how many of these tokens the step being scheduled computes. Unless it is 0, the extensions' `register` is
        called.
        """
        request = self.slots.requests[slot]
        assert request is not None
        self.pages.register(slot, request.page_hashes, num_computed)
        if count:
            for extension in self._extensions:
                extension.register(request, num_computed, count)

    def _preempt(self, slot: int) -> None:
        """Take away a running request's slot and pages, set its status to PREEMPTED, count the preemption, and append
        the request to `preempted`. If some of its tokens are in flight, it must wait for them before it can run again.
        """
        s = self.slots
        request = s.requests[slot]
        assert request is not None
        if s.num_tokens[slot] > s.num_known[slot]:
            self._results.expect_late(request)
        self.release(slot)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.preempted.append(request)
