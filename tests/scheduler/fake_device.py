"""A device without a model: it keeps token ids in real pages and answers from what it reads there.

The next token is a digest of every token found through the page table, so any wrong page, slot, position or stale
content changes all that follows. It understands nothing but packed messages, as the compiled step does.
"""

from __future__ import annotations

import hashlib

import numpy as np

from jaxengine.models.forward_batch import HEADER, ROW_COLUMNS, StepLayout
from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.batches.packing import Packer, StepInput

VOCAB_SIZE = 50
# What a page holds that nobody may read.
POISON = -9


def next_token(tokens: np.ndarray, vocab_size: int = VOCAB_SIZE) -> int:
    """What the fake model says after `tokens`."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()
    return int.from_bytes(digest[:4], "little") % vocab_size


def expected_output(prompt: np.ndarray, max_tokens: int, stop_ids=(), min_tokens: int = 0, window=None) -> list[int]:
    """The tokens a request must get, whatever happens around it. window: tokens that the next one is made of."""
    tokens = prompt.tolist()
    for count in range(1, max_tokens + 1):
        tokens.append(next_token(np.array(tokens[-(window or len(tokens)) :], np.int32)))
        if tokens[-1] in stop_ids and count >= min_tokens:
            break
    return tokens[len(prompt) :]


def guess(rng: np.random.Generator, tokens: np.ndarray) -> int:
    """What comes after `tokens`, or now and then something else."""
    return next_token(tokens) if rng.random() < 0.7 else int(rng.integers(VOCAB_SIZE))


class FakeDevice:
    """Slot state and pages of one engine, in numpy: a part for each rank.

    Every cache group keeps the token ids in pages of its own. The next token is made of what the group with the widest
    window shows, all tokens where a group keeps all; each of the others must show the same as far as its window goes.
    With snapshots it keeps a state of each sequence as well, the tokens that have been fed to it, which every row must
    go on from; what a step writes and what it reads of them must not depend on the order of its rows.
    With `forgetful`, it remembers no sampled token, as the first stage of a pipeline, which does not sample. Drafts
    that the message does not have it makes itself, mostly right ones; a wrong one stays in its page until it is
    overwritten.
    """

    def __init__(
        self,
        packer: Packer,
        config: SchedulerConfig,
        *,
        forgetful: bool = False,
        windows: tuple[int | None, ...] | None = None,
    ):
        """windows: what tokens see, where that is less than the scheduler keeps."""
        self.packer = packer
        self.windows = windows or config.windows
        self.rng = np.random.default_rng(5)
        self.num_drafts = self.num_accepted = 0
        self.num_slots = packer.buckets.max_num_seqs
        self.pages = np.full((packer.num_ranks, config.num_pages * packer.page_size), -7, np.int32)
        width = max(config.max_pages_per_seq, 3 * (config.num_snapshots > 0))
        self.page_table = np.full((packer.num_ranks * packer.num_table_rows, width), -1, np.int64)
        # Of the slots of each rank, then its snapshots.
        self.states = [[None] * (self.num_slots + config.num_snapshots) for _ in range(packer.num_ranks)]
        self.num_snapshots = config.num_snapshots
        self.num_loaded = 0
        self.loaded: set[int] = set()  # rows of states that the step's sequences begin from
        self.last_token = np.full(packer.num_slots, -3, np.int32)
        self.num_computed = np.full(packer.num_slots, -3, np.int32)
        self.forgetful = forgetful
        self.shapes: set = set()

    def execute(self, step: StepInput) -> tuple[np.ndarray, np.ndarray | None]:
        """Token ids by rank and row, i32[ranks, S], -99 in rows that do not sample; of a step with drafts i32[ranks, S,
        W], and how many of them each row has got."""
        self.shapes.add(step.bucket)
        for row, column, page in zip(*step.overflow, strict=True):
            self.page_table[row, column] = page
        layout = self.packer.layouts[step.bucket]
        assert step.buffer.shape == (self.packer.num_ranks, layout.size) and step.buffer.flags.c_contiguous
        flags = np.array([layout.view(message, "header")[2:] for message in step.buffer])
        assert (flags == flags[0]).all()
        width = step.bucket.width
        ranks = [self._execute_rank(rank, layout, message, width) for rank, message in enumerate(step.buffer)]
        token_ids, counts = map(np.array, zip(*ranks, strict=True))
        return (token_ids, counts) if width > 1 else (token_ids[..., 0], None)

    def _execute_rank(self, rank: int, layout: StepLayout, message: np.ndarray, width: int):
        view = {name: layout.view(message, name) for name in ("header", "token_ids", "deltas")}
        view |= dict(zip(ROW_COLUMNS, layout.view(message, "rows"), strict=True))
        header = dict(zip(HEADER, view["header"].tolist(), strict=True))
        num_rows, base = header["num_seqs"], rank * self.num_slots
        num_entries = self.packer.num_table_rows
        entries = [(entry, column) for entry, column, _ in view["deltas"].T.tolist() if entry < num_entries]
        assert len(entries) == len(set(entries)), "one entry is written twice, in an order that no device promises"
        for entry, column, page in view["deltas"].T:
            if entry < num_entries:
                self.page_table[rank * num_entries + entry, column] = page
        rows, first = [], 0
        fed = []
        for row in range(num_rows):
            assert view["slot"][row] < self.num_slots
            slot, count = base + int(view["slot"][row]), int(view["num_scheduled"][row])
            start = int(view["start"][row])
            start = start if start >= 0 else int(self.num_computed[slot])
            tokens = view["token_ids"][first : first + count]
            assert not self.forgetful or (tokens >= 0).all()
            if width > 1:
                tokens = self._with_drafts(rank, slot, start, tokens)
            tokens = np.where(tokens < 0, self.last_token[slot], tokens)
            positions = np.arange(start, start + count)
            for group in range(len(self.windows)):
                self.pages[rank, self._slots(rank, group, slot, positions)] = tokens
            fed.append((slot, int(view["start"][row]) > 0, start, tokens))
            self.num_computed[slot] = start + count
            assert count == 1 if row < header["num_decode"] else count >= 1
            rows.append((slot, start + count))
            first += count
        if self.num_snapshots:  # when all rows have written their pages, as layers do before they read any
            before, self.loaded = list(self.states[rank]), set[int]()
            written = [place for each in fed for place in self._feed(rank, before, *each)]
            assert len(written) == len(set(written)), "a row of states is written twice"
            assert not self.loaded & set(written), "a snapshot is read and written, in an order that no device promises"
        assert (view["slot"][num_rows:] == self.num_slots).all()
        assert not view["num_scheduled"][num_rows:].any() and not view["sample"][num_rows:].any()
        assert (view["token_ids"][first:] == -1).all()
        result, counts = np.full((layout.num_seqs, width), -99, np.int32), np.zeros(layout.num_seqs, np.int32)
        for row, (slot, length) in enumerate(rows):
            if not view["sample"][row]:
                continue
            first = length - int(view["num_scheduled"][row]) + 1 if width > 1 else length
            for column, known in enumerate(range(first, length + 1)):
                token = result[row, column] = self.last_token[slot] = next_token(self._seen(rank, slot, known))
                counts[row] += 1
                if known < length and self.pages[rank, self._slots(rank, 0, slot, np.array([known]))] != token:
                    break
            self.num_computed[slot] = first - 1 + counts[row]
            self.num_accepted += int(counts[row]) - 1
            self.num_drafts += length - first
        return result, counts

    def _with_drafts(self, rank: int, slot: int, start: int, tokens: np.ndarray) -> np.ndarray:
        """A row's last token and what may stand behind it, which is written into the pages on the way."""
        tokens = tokens.copy()
        for column in range(len(tokens)):
            if tokens[column] < 0:
                tokens[column] = self.last_token[slot] if not column else guess(self.rng, self._seen(rank, slot, start))
            for group in range(len(self.windows)):
                self.pages[rank, self._slots(rank, group, slot, np.array([start]))] = tokens[column]
            start += 1
        return tokens

    def _feed(self, rank: int, before: list, slot: int, hit: bool, start: int, tokens: np.ndarray) -> list[int]:
        """Takes the state of a slot on by these tokens; the rows of states that it writes."""
        own = slot - rank * self.num_slots
        load, position, save = self.page_table[
            rank * self.packer.num_table_rows + len(self.windows) * self.num_slots + own, :3
        ]
        state = () if start == 0 else before[self.num_slots + load if hit else own]
        self.num_loaded += hit
        self.loaded |= {self.num_slots + int(load)} if hit else set()
        known = self.pages[rank, self._slots(rank, 0, slot, np.arange(start))]
        assert state == tuple(known.tolist()), "a state that is not that of the tokens before"
        state = (*state, *tokens.tolist())
        rows = [own]
        if len(tokens) > 1 and position == start + len(tokens):
            rows.append(self.num_slots + int(save))
        for row in rows:
            self.states[rank][row] = state
        return rows

    def _seen(self, rank: int, slot: int, length: int) -> np.ndarray:
        """The tokens that the last of `length` tokens sees, by the group that shows most."""
        shown = []
        for group, window in enumerate(self.windows):
            positions = np.arange(0 if window is None else max(0, length - window), length)
            shown.append(self.pages[rank, self._slots(rank, group, slot, positions)])
        most = max(shown, key=len)
        assert (most != POISON).all() and all((most[len(most) - len(each) :] == each).all() for each in shown)
        return most

    def _slots(self, rank: int, group: int, slot: int, positions: np.ndarray) -> np.ndarray:
        """slot: numbered over all ranks."""
        page_size, own = self.packer.page_size, slot - rank * self.num_slots
        pages = self.page_table[
            rank * self.packer.num_table_rows + group * self.num_slots + own, positions // page_size
        ]
        assert (pages >= 0).all()
        return pages * page_size + positions % page_size
