"""Routed experts: returns, for each request, which experts computed each of its tokens.

A token found in the prefix cache is not computed again: its experts are those of the step that filled its page. So the
host keeps the experts of every page of the pool, by page id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxengine.engine.extension import NO_EVENTS, Events, Loop, LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput, Found
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledBatch, ScheduledStep, StepResult
from jaxengine.scheduler.rank import Rank

NAME = "routed_experts"
_NO_PAGES = np.empty(0, np.int32)


@dataclass(eq=False, slots=True)
class _Progress:
    """Progress of returning the experts of one request.

    Attributes:
      num_found: number of leading tokens whose experts have been returned, or that the request does not ask for.
      position: position after the last token of the newest collected step.
    """

    num_found: int
    position: int = 0


@dataclass(eq=False, slots=True)
class _Rows:
    """Tokens of one request in a step.

    Attributes:
      request, progress: the request, and how far its experts have been returned.
      rank: index of the request's replica.
      row: index of the request's row in the replica's batch.
      token: index of the request's first token in the batch.
      count: number of the request's tokens.
      position: position of the first token in the request; None for a decode, which follows the request's newest step.
      first_column, pages: first page-table column of these tokens, and the page ids from that column on.
      hits: page ids of the prefix-cache hit, from column 0 on; empty except in a request's first step in its slot.
      is_held: whether the request has lost its slot since the forward pass.
    """

    request: Request
    progress: _Progress
    rank: int
    row: int
    token: int
    count: int
    position: int | None
    first_column: int
    pages: np.ndarray
    hits: np.ndarray
    is_held: bool = False


class RoutedExperts(LoopExtension):
    """Loop extension that returns the routed experts of all tokens to all requests, each token once.

    A preempted or held request is computed again from its first token. It keeps the experts with which its tokens were
    sampled; those of the second computation are left out. Steps are collected in order, so a page's experts are read
    after all steps that wrote them, and before any that overwrites them.
    """

    def __init__(self) -> None:
        """Begin without requests."""
        self._rows: dict[InFlight, list[_Rows]] = {}
        self._progress: dict[Request, _Progress] = {}

    def attach(self, loop: Loop) -> None:
        """Store the engine's parts, and reserve host memory for the experts of all pages if prefix caching is on and a
        cache group keeps all pages of a prefix.
        """
        super().attach(loop)
        runner, config = loop.runner, loop.runner.config
        self._device = device = runner.extension(NAME)
        self._page_size = config.block_size
        # Number of tokens, drafts of steps in flight, that the scheduler may count as computed and that get rejected.
        self._most_behind = config.max_in_flight * (max(loop.scheduler.config.widths, default=1) - 1)
        # A cache group that has the pages of all of a prefix; None if there is none, or without prefix caching.
        whole = [group for group, window in enumerate(runner.windows) if window is None]
        self._group = whole[0] if whole and config.enable_prefix_caching else None
        self._pages: np.ndarray | None = None
        if self._group is not None:
            # np.empty: the system allocates only the memory that is written.
            slots = runner.num_ranks, runner.plan.num_pages, self._page_size
            self._pages = np.empty((*slots, device.num_layers, device.num_per_token), device.dtype)

    def prepare(self, request: Request) -> None:
        """Exclude the request from prefix-cache hits, by `reads_prompt` of its params, if the experts of pages are not
        kept: without prefix caching, and if all layers have windows.
        """
        if self._group is None:
            request.params = replace(request.params, reads_prompt=True)

    def queued(self, requests: Sequence[Request]) -> None:
        """Begin to return experts to these requests, from token routed_experts_prompt_start on."""
        for request in requests:
            self._progress[request] = _Progress(request.params.routed_experts_prompt_start)

    def after_forward(self, step: InFlight | None) -> Events:
        """Record the tokens and pages of the step, and keep its experts on the devices until `collected`. Returns no
        events.
        """
        if step is not None:
            batches = zip(self.loop.scheduler.ranks, step.step.batches, strict=True)
            self._rows[step] = [rows for rank, batch in batches for rows in self._rows_of(rank, batch)]
            self._device.keep(step.pending)
        return NO_EVENTS

    def sync(self, step: ScheduledStep) -> None:
        """Mark requests that have lost their slots since the newest step's forward pass as held.

        Of the tokens that the step computed for such a request, only the first is certain to be part of it, and its
        sampled tokens are dropped.
        """
        newest = next(reversed(self._rows))
        for each in self._rows[newest]:
            each.is_held = each.request.slot < 0

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Fetch the step's experts, store them by page, and add those that unfinished requests lack to output.found.
        Experts of rejected drafts are left out.
        """
        every, counts = self._rows.pop(step), step.pending.result("counts")
        experts = self._device.fetch(step.pending)
        for each in every:
            if each.position is None:
                each.position = each.progress.position
                # Experts of rejected drafts were computed, too, and follow those of the accepted ones.
                each.count = 1 if each.is_held else each.count if counts is None else int(counts[each.rank, each.row])
            each.progress.position = each.position + each.count
        self._write(every, experts)
        for each in every:
            if each.request in self._progress:
                self._return_new(each, experts[each.rank], output)

    def ended(self, request: Request) -> None:
        self._progress.pop(request, None)

    def _rows_of(self, rank: Rank, batch: ScheduledBatch) -> list[_Rows]:
        """Return the tokens, one entry per request, of a replica's batch that has just been scheduled, with the pages
        that have them and, of admitted requests, those of the cached prefix.
        """
        slots, found, size = rank.slots, [], self._page_size
        ends, counts = slots.num_computed[batch.slots].tolist(), batch.num_scheduled.tolist()
        admitted = set(map(id, batch.admitted))
        token, pages, hits = 0, _NO_PAGES, _NO_PAGES
        # A copy, by indexing with an array: slots get other pages before the step is collected.
        tables = None if self._pages is None else rank.pages.table[self._group, batch.slots]
        for row, slot in enumerate(batch.slots.tolist()):
            request, count = slots.requests[slot], counts[row]
            assert request is not None
            position = ends[row] - count
            first = max(0, position - (self._most_behind if row < batch.num_decode else 0)) // size
            if tables is not None:
                pages = tables[row, first : (ends[row] - 1) // size + 1]
                hits = tables[row, : position // size] if id(request) in admitted else _NO_PAGES
            known = None if row < batch.num_decode else position
            own = self._progress[request]
            found.append(_Rows(request, own, rank.index, row, token, count, known, first, pages, hits))
            token += count
        return found

    def _write(self, rows: list[_Rows], experts: np.ndarray) -> None:
        """Store the experts [replicas, T, L, k] of a step at the pages of its tokens, all rows at once. Does nothing if
        experts are not kept by page.
        """
        if self._pages is None or not rows:
            return
        table = [
            (each.rank, each.token, each.position, each.first_column, each.count, len(each.pages)) for each in rows
        ]
        ranks, tokens, positions, columns, counts, lengths = np.array(table).T
        row = np.repeat(np.arange(len(rows)), counts)
        offsets = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
        positions = positions[row] + offsets
        # Index of each token's page among the pages of all rows, concatenated.
        indices = (np.cumsum(lengths) - lengths - columns)[row] + positions // self._page_size
        pages = np.concatenate([each.pages for each in rows])[indices]
        self._pages[ranks[row], pages, positions % self._page_size] = experts[ranks[row], tokens[row] + offsets]

    def _return_new(self, rows: _Rows, experts: np.ndarray, output: EngineOutput) -> None:
        """Add to `output` the experts of those tokens of a request that have not been returned yet, first those of a
        prefix-cache hit, and update its progress. For a held request (`is_held`) the step's own are left out.

        rows: the request's tokens in the step. experts: [T, L, k], experts of the tokens of the request's replica.
        """
        request, progress, first = rows.request, rows.progress, rows.position
        assert first is not None
        parts = []
        if progress.num_found < first and len(rows.hits):
            assert self._pages is not None
            cached = self._pages[rows.rank, rows.hits]
            parts.append(cached.reshape(-1, *cached.shape[2:])[progress.num_found : first])
            progress.num_found = first
        end, skipped = first + rows.count, progress.num_found - first
        if not rows.is_held and skipped < rows.count:
            assert skipped >= 0
            parts.append(experts[rows.token + skipped : rows.token + rows.count].copy())
            progress.num_found = end
        output.found += [Found(request, NAME, part) for part in parts]
