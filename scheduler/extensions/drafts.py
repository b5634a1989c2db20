"""Drafts of a replica's decodes in the step being scheduled: how many each has, and those that the host knows.

A draft is either proposed by a draft method, or a grammar draft: the only token that a grammar allows at its position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import LAST_TOKEN, MASK
from jaxengine.scheduler.batches.batch import ScheduledBatch
from jaxengine.scheduler.batches.buckets import most_wide
from jaxengine.scheduler.batches.slots import Slots
from jaxengine.scheduler.extension import RankExtension
from jaxengine.scheduler.extensions.draft_width import DraftWidth
from jaxengine.scheduler.rank import Rank
from jaxengine.scheduler.scheduler_extension import SchedulerExtension

NAME = "drafts"
# Values of a row's `sample` in a step's message (jaxengine.models.forward_batch.StepLayout); 1 if it is neither.
# FORCED: each token after its first is the only one allowed there. GUIDED: these tokens are proposed, each with a mask.
FORCED, GUIDED = 2, 3

# (known tokens i32[n], most) -> i32[m], proposed tokens that follow them.
Draft = Callable[[np.ndarray, int], np.ndarray]
# (request, number of output tokens, most) -> at most so many tokens that must follow these; None if it is not known
# whether there are any, so that tokens may be proposed.
Forced = Callable[[Request, int, int], Sequence[int] | None]


@dataclass(frozen=True)
class DraftOptions:
    """Options of drafts; SchedulerConfig.widths says how many tokens a decode may have.

    Attributes:
      guesses: whether there are proposed drafts, in addition to grammar drafts.
      draft: proposer on the host; None if the device proposes.
      forced: function that returns grammar drafts of requests with MASK; None if these have no drafts.
      guided: whether requests with MASK may have drafts proposed by the device, each under its own grammar mask, where
        `forced` returns None.
    """

    guesses: bool = True
    draft: Draft | None = None
    forced: Forced | None = None
    guided: bool = False

    def extension(self) -> Drafts:
        """Return a new scheduler extension with these options."""
        return Drafts(self)


class DraftSection(NamedTuple):
    """Kinds of sampling of the rows of a step with drafts, bool[n] each.

    Attributes:
      is_forced: rows without drafts, and those with grammar drafts.
      is_guided: rows with masked drafts: proposed drafts that each have a grammar mask.
    """

    is_forced: np.ndarray
    is_guided: np.ndarray


_NONE = np.empty(0, np.bool_)


class DecodeDrafts:
    """Drafts of one replica's decodes. For each step call `begin`, then, if decodes may have drafts, `look_ahead` and
    `widen`.

    Attributes:
      widths: i32 [n], number of tokens of each decode, its last one and drafts; None if each has one.
    """

    def __init__(self, options: DraftOptions, slots: Slots):
        """Start without drafts, for the decodes in these slots."""
        self._options = options
        self._slots = slots
        self.widths: np.ndarray | None = None
        # Result of `look_ahead`; whether rows have masks; grammar drafts by row; all drafts known to the host, by row.
        self._runs = np.empty(0, np.int32)
        self._masked = _NONE
        self._forced: dict[int, Sequence[int]] = {}
        self._known: dict[int, Sequence[int] | np.ndarray] = {}

    @property
    def is_forced(self) -> np.ndarray:
        """Whether each decode is without proposed drafts, bool [n], in a step with drafts; an empty array in another
        step.
        """
        return _NONE if self.widths is None else self._runs >= 0

    @property
    def is_guided(self) -> np.ndarray:
        """Whether each decode has masked drafts, bool [n], in a step with drafts; an empty array in another step."""
        return _NONE if self.widths is None else self._masked & (self._runs < 0) & (self.widths > 1)

    def begin(self) -> None:
        """Start a step, in which every decode has one token unless `widen` gives it more."""
        self.widths = None

    def look_ahead(self, decodes: np.ndarray, most: int) -> np.ndarray:
        """Return i32 [n], for each of the slots `decodes` i64 [n] its number of grammar drafts, at most `most`; -1 if
        its drafts would be proposed.

        A request whose next choice the host must prepare (a grammar, long bad words, min_tokens) has 0, or as many as
        its grammar fixes; if that is unknown and DraftOptions.guided is set, -1. If DraftOptions.guesses is False, all
        others have 0.
        """
        s = self._slots
        self._masked = s.features[decodes] & MASK > 0
        # min_tokens forbids stop tokens up to a position that must be known.
        is_early = s.num_tokens[decodes] < s.min_stop[decodes]
        is_prepared = (s.features[decodes] & (MASK | LAST_TOKEN) > 0) | is_early
        has_none = is_prepared | (not self._options.guesses)
        self._runs, self._forced = np.where(has_none, 0, -1).astype(np.int32), {}
        if self._options.forced is not None:
            for row in np.flatnonzero(self._masked & ~is_early).tolist():
                slot = decodes[row]
                room, num_output = s.limit[slot] - s.num_tokens[slot], s.num_tokens[slot] - s.num_prompt[slot]
                tokens = self._options.forced(s.requests[slot], int(num_output), min(most, int(room) - 1))
                if tokens is not None:
                    self._forced[row], self._runs[row] = tokens, len(tokens)
                elif self._options.guided:
                    self._runs[row] = -1
        return self._runs

    def widen(self, decodes: np.ndarray, width: int) -> np.ndarray:
        """Give each decode up to `width` tokens, its last one and drafts. Set and return `widths`, at least 1 each.

        decodes: i64 [n], the slots for which `look_ahead` was called last. No decode gets more than its request's limit
        leaves, or than the host proposes if it is the proposer (DraftOptions.draft).
        """
        s = self._slots
        widths = np.minimum(s.limit[decodes] - s.num_tokens[decodes], width)
        self.widths = np.where(self._runs < 0, widths, 1 + np.minimum(self._runs, width - 1))
        self._known = {row: tokens[: width - 1] for row, tokens in self._forced.items() if tokens}
        if self._options.draft is not None:
            for row in np.flatnonzero(self._runs < 0).tolist():
                tokens = self._options.draft(s.known_token_ids(decodes[row]), int(self.widths[row]) - 1)
                self._known[row], self.widths[row] = tokens, 1 + len(tokens)
        return self.widths

    def token_ids(self, last: np.ndarray | None) -> np.ndarray | None:
        """Return the decodes' tokens in the form of ScheduledBatch.decode_token_ids: row after row, -1 where the device
        knows or proposes one, None if all are -1; `last` itself if no decode has drafts.

        last: i32[n], the last token of each decode; None if the device knows them.
        """
        if self.widths is None or (last is None and not self._known):
            return last
        first = np.cumsum(self.widths, dtype=np.int64) - self.widths
        tokens = np.full(int(self.widths.sum()), -1, np.int32)
        tokens[first] = -1 if last is None else last
        for row, drafts in self._known.items():
            tokens[first[row] + 1 : first[row] + 1 + len(drafts)] = drafts
        return tokens


class Drafts(SchedulerExtension):
    """Scheduler extension that chooses how many tokens the decodes of a step have, over all replicas.

    Attributes:
      width: measures which widths pay.
    """

    name: ClassVar[str] = NAME
    ranks: Sequence[RankDrafts]

    def __init__(self, options: DraftOptions):
        """Store the options. `start` creates everything else."""
        self._options = options

    def start(self, ranks: Sequence[Rank]) -> None:
        """Create `ranks`, and `width` for the widths in the replicas' common configuration."""
        config = ranks[0].config
        limits = config.max_num_seqs, config.max_num_batched_tokens
        self.width = DraftWidth({width: most_wide(width, *limits) for width in config.widths})
        self._widths = config.widths
        self.ranks = [RankDrafts(self._options, rank) for rank in ranks]

    def decode_width(self) -> int:
        """Give the decodes of the step being scheduled their drafts, and return the width of its bucket: 1 or one of
        SchedulerConfig.widths.

        Returns 1, without drafts, if the step has rows other than decodes (which counts as a prefill), if no width
        pays, if no decode has drafts, or if a replica lacks pages for its drafts. The choice of `width` may count as a
        trial. Pages are allocated for the drafts.
        """
        counts = [each.rank.num_decodes for each in self.ranks]
        rows = [count for count in counts if count is not None]
        if len(rows) < len(counts):
            self.width.prefilled()
            return 1
        if not self.width.has_any(max(rows)):
            return 1
        runs = [each.look_ahead(self._widths[-1] - 1) for each in self.ranks]
        width = self.width.choose(max(rows), np.concatenate(runs))
        most = [each.widen(width) if width > 1 else 1 for each in self.ranks]
        if width == 1 or max(most) <= 1 or any(count and not given for count, given in zip(rows, most, strict=True)):
            for each in self.ranks:
                each.begin()
            return 1
        return min(each for each in self._widths if each >= max(most))


class RankDrafts(RankExtension):
    """Drafts in one replica's schedule: the number of drafts of its decodes, their pages, and their data in the
    batch.
    """

    def __init__(self, options: DraftOptions, rank: Rank):
        """Start without drafts, for the decodes of this replica."""
        self.rank = rank
        self._drafts = DecodeDrafts(options, rank.slots)

    def begin(self) -> None:
        self._drafts.begin()

    def look_ahead(self, most: int) -> np.ndarray:
        """Return i32 [n], the number of grammar drafts of each of the replica's decodes, at most `most`; -1 for a
        decode whose drafts would be proposed (DecodeDrafts.look_ahead).
        """
        return self._drafts.look_ahead(self.rank.decodes, most)

    def widen(self, width: int) -> int:
        """Give the decodes, which must be the step's only rows, up to `width` tokens each: the last one and drafts.
        Allocate their pages, and return the most tokens that one got.

        Returns 0 if pages do not suffice: no request is preempted for a draft. `look_ahead` must have been called
        before.
        """
        slots, pages = self.rank.decodes, self.rank.pages
        widths = self._drafts.widen(slots, width)
        ends = self.rank.slots.num_computed[slots] + widths
        if pages.num_missing_of(slots, ends) > self.rank.pool.num_free:
            return 0
        pages.grow_to(slots, ends)
        return int(widths.max(initial=0))

    def complete(self, batch: ScheduledBatch) -> None:
        """Write the drafts into the batch: its num_scheduled, num_tokens, decode_token_ids, section and choice. Does
        nothing in a step without drafts.

        Drafts count as accepted until the step's results come; `Results.take` then uncounts rejected ones. With several
        micro-batches, `start` of every decode is written in any case, because stages do not learn which drafts were
        accepted.
        """
        if self.rank.config.num_micro_batches > 1:  # stages do not learn which drafts were accepted
            batch.start = batch.start.copy()
            batch.start[: batch.num_decode] = self.rank.slots.num_computed[batch.slots[: batch.num_decode]]
        widths = self._drafts.widths
        if widths is None:
            return
        batch.num_scheduled, batch.num_tokens = widths, int(widths.sum())
        batch.decode_token_ids = self._drafts.token_ids(batch.decode_token_ids)
        batch.sections[NAME] = section = DraftSection(self._drafts.is_forced, self._drafts.is_guided)
        batch.choice = np.where(section.is_guided, GUIDED, np.where(section.is_forced, FORCED, 1))
