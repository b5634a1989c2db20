"""A device without a model: it keeps token ids in real pages and answers from what it reads there.

The next token is a digest of every token found through the page table, so any wrong page, slot, position or stale
content changes all that follows. It understands nothing but packed messages, as the compiled step does.
"""

from __future__ import annotations

import hashlib

import numpy as np

from models.forward_batch import HEADER, ROW_COLUMNS, StepLayout
from scheduler.packing import Packer, StepInput

VOCAB_SIZE = 50


def next_token(tokens: np.ndarray, vocab_size: int = VOCAB_SIZE) -> int:
    """What the fake model says after `tokens`."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).digest()
    return int.from_bytes(digest[:4], "little") % vocab_size


def expected_output(prompt: np.ndarray, max_tokens: int, stop_ids=(), min_tokens: int = 0) -> list[int]:
    """The tokens a request must get, whatever happens around it."""
    tokens = prompt.tolist()
    for count in range(1, max_tokens + 1):
        tokens.append(next_token(np.array(tokens, np.int32)))
        if tokens[-1] in stop_ids and count >= min_tokens:
            break
    return tokens[len(prompt) :]


class FakeDevice:
    """Slot state and pages of one engine, in numpy: a part for each rank.

    With `forgetful`, it remembers no sampled token, as the first stage of a pipeline, which does not sample.
    """

    def __init__(self, packer: Packer, num_pages: int, max_pages: int, *, forgetful: bool = False):
        self.packer = packer
        self.num_slots = packer.buckets.max_num_seqs
        self.pages = np.full((packer.num_ranks, num_pages * packer.page_size), -7, np.int32)
        self.page_table = np.full((packer.num_slots, max_pages), -1, np.int64)
        self.last_token = np.full(packer.num_slots, -3, np.int32)
        self.num_computed = np.full(packer.num_slots, -3, np.int32)
        self.forgetful = forgetful
        self.shapes: set = set()

    def execute(self, step: StepInput) -> np.ndarray:
        """Token ids by rank and row, i32[ranks, S], -99 in rows that do not sample."""
        self.shapes.add(step.bucket)
        for slot, column, page in zip(*step.overflow, strict=True):
            self.page_table[slot, column] = page
        layout = self.packer.layouts[step.bucket]
        assert step.buffer.shape == (self.packer.num_ranks, layout.size) and step.buffer.flags.c_contiguous
        flags = np.array([layout.view(message, "header")[2:] for message in step.buffer])
        assert (flags == flags[0]).all()
        return np.array([self._execute_rank(rank, layout, message) for rank, message in enumerate(step.buffer)])

    def _execute_rank(self, rank: int, layout: StepLayout, message: np.ndarray) -> np.ndarray:
        view = {name: layout.view(message, name) for name in ("header", "token_ids", "deltas")}
        view |= dict(zip(ROW_COLUMNS, layout.view(message, "rows"), strict=True))
        header = dict(zip(HEADER, view["header"].tolist(), strict=True))
        num_rows, base = header["num_seqs"], rank * self.num_slots
        entries = [(slot, column) for slot, column, _ in view["deltas"].T.tolist() if slot < self.num_slots]
        assert len(entries) == len(set(entries)), "one entry is written twice, in an order that no device promises"
        for slot, column, page in view["deltas"].T:
            if slot < self.num_slots:
                self.page_table[base + slot, column] = page
        rows, first = [], 0
        for row in range(num_rows):
            assert view["slot"][row] < self.num_slots
            slot, count = base + int(view["slot"][row]), int(view["num_scheduled"][row])
            start = int(view["start"][row])
            start = start if start >= 0 else int(self.num_computed[slot])
            tokens = view["token_ids"][first : first + count]
            assert not self.forgetful or (tokens >= 0).all()
            tokens = np.where(tokens < 0, self.last_token[slot], tokens)
            positions = np.arange(start, start + count)
            self.pages[rank, self._slots(slot, positions)] = tokens
            self.num_computed[slot] = start + count
            assert count == 1 if row < header["num_decode"] else count >= 1
            rows.append((slot, start + count))
            first += count
        assert (view["slot"][num_rows:] == self.num_slots).all()
        assert not view["num_scheduled"][num_rows:].any() and not view["sample"][num_rows:].any()
        assert (view["token_ids"][first:] == -1).all()
        result = np.full(layout.num_seqs, -99, np.int32)
        for row, (slot, length) in enumerate(rows):
            if view["sample"][row]:
                seen = self.pages[rank, self._slots(slot, np.arange(length))]
                result[row] = self.last_token[slot] = next_token(seen)
        return result

    def _slots(self, slot: int, positions: np.ndarray) -> np.ndarray:
        page_size = self.packer.page_size
        pages = self.page_table[slot, positions // page_size]
        assert (pages >= 0).all()
        return pages * page_size + positions % page_size
