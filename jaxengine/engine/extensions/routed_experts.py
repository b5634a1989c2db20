"""Routed experts: which experts computed each token, for its request, and for those that find its page in the cache.

A token that comes from the prefix cache is not computed again: its experts are those of the step that filled the page.
They are kept on the host for every page of the pool, at the page's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxengine.engine.extension import NO_EVENTS, Events, Loop, LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput, Found
from jaxengine.scheduler.batch import ScheduledBatch, ScheduledStep, StepResult
from jaxengine.scheduler.rank import Rank
from jaxengine.scheduler.request import Request

NAME = "routed_experts"
_NO_PAGES = np.empty(0, np.int32)


@dataclass(eq=False, slots=True)
class _Progress:
    """Progress of a request: tokens that it has had, and that steps have computed.

    Attributes:
      num_found: its first tokens, whose experts it has had.
      position: of the token after those of the newest step that has come.
    """

    num_found: int
    position: int = 0


@dataclass(eq=False, slots=True)
class _Rows:
    """Tokens of one request in a step.

    Attributes:
      row: in the rank's batch; token: the first one there; count: how many.
      position: of the first one in the request; None of a decode, which follows the request's newest step.
      first_column: of the page table, of which `pages` are those that the tokens lie in.
      hits: pages of the tokens that came from the prefix cache, from the first column on; none but in the first step
        with a slot.
      is_held: the request has lost its slot since the forward pass.
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
    """The experts of all tokens, for all requests.

    A request that was preempted or held is computed again from its first token; it has had the experts that its tokens
    were chosen with, and those of the second time are left out. Steps come in order, so pages are read after all steps
    that wrote what is found in them, and before any that writes them anew.
    """

    def __init__(self) -> None:
        self._rows: dict[InFlight, list[_Rows]] = {}
        self._progress: dict[Request, _Progress] = {}

    def attach(self, loop: Loop) -> None:
        super().attach(loop)
        runner, config = loop.runner, loop.runner.config
        self._device = device = runner.extension(NAME)
        self._page_size = config.block_size
        # Tokens that a decode may be behind of what the scheduler takes for computed: drafts of steps in flight.
        self._most_behind = config.max_in_flight * (max(loop.scheduler.config.widths, default=1) - 1)
        # A cache group that has the pages of all of a prefix; None where there is none, or nothing is found in pages.
        whole = [group for group, window in enumerate(runner.windows) if window is None]
        self._group = whole[0] if whole and config.enable_prefix_caching else None
        self._pages: np.ndarray | None = None
        if self._group is not None:
            # Memory that is never written is never taken.
            places = runner.num_ranks, runner.plan.num_pages, self._page_size
            self._pages = np.empty((*places, device.num_layers, device.num_per_token), device.dtype)

    def prepare(self, request: Request) -> None:
        """Has a prompt computed whole whose prefix could be found without pages: where all layers have windows."""
        if self._group is None:
            request.params = replace(request.params, reads_prompt=True)

    def queued(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._progress[request] = _Progress(request.params.routed_experts_prompt_start)

    def after_forward(self, step: InFlight | None) -> Events:
        if step is not None:
            batches = zip(self.loop.scheduler.ranks, step.step.batches, strict=True)
            self._rows[step] = [rows for rank, batch in batches for rows in self._rows_of(rank, batch)]
            self._device.keep(step.pending)
        return NO_EVENTS

    def sync(self, step: ScheduledStep) -> None:
        """Takes note of requests that have lost their slots since the forward pass: what the step samples for them is
        dropped, and of the tokens that it computed for them only the first is known to be right."""
        newest = next(reversed(self._rows))
        for each in self._rows[newest]:
            each.is_held = each.request.slot < 0

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        every, counts = self._rows.pop(step), step.pending.result("counts")
        experts = self._device.fetch(step.pending)
        for each in every:
            if each.position is None:
                each.position = each.progress.position
                # Drafts that were wrong were computed, too.
                each.count = 1 if each.is_held else each.count if counts is None else int(counts[each.rank, each.row])
            each.progress.position = each.position + each.count
        self._write(every, experts)
        for each in every:
            if each.request in self._progress:
                self._tell(each, experts[each.rank], output)

    def ended(self, request: Request) -> None:
        self._progress.pop(request, None)

    def _rows_of(self, rank: Rank, batch: ScheduledBatch) -> list[_Rows]:
        """The rows of a rank's batch that has just been scheduled."""
        slots, found, size = rank.slots, [], self._page_size
        ends, counts = slots.num_computed[batch.slots].tolist(), batch.num_scheduled.tolist()
        admitted = set(map(id, batch.admitted))
        token, pages, hits = 0, _NO_PAGES, _NO_PAGES
        # A copy: slots get other pages before the step is collected.
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
        """Keeps the experts [replicas, T, L, k] of a step at the pages of its tokens, all rows at once."""
        if self._pages is None or not rows:
            return
        table = [
            (each.rank, each.token, each.position, each.first_column, each.count, len(each.pages)) for each in rows
        ]
        ranks, tokens, positions, columns, counts, lengths = np.array(table).T
        row = np.repeat(np.arange(len(rows)), counts)
        offsets = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
        positions = positions[row] + offsets
        # In the pages of all rows, one after the other.
        places = (np.cumsum(lengths) - lengths - columns)[row] + positions // self._page_size
        pages = np.concatenate([each.pages for each in rows])[places]
        self._pages[ranks[row], pages, positions % self._page_size] = experts[ranks[row], tokens[row] + offsets]

    def _tell(self, rows: _Rows, experts: np.ndarray, output: EngineOutput) -> None:
        """Gives a request the experts of its tokens that it has not had."""
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
