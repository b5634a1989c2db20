"""A device without a model: it keeps token ids in real pages and answers from what it reads there.

The next token is a digest of every token found through the page table, so any wrong page, slot, position or stale
content changes all that follows. It understands nothing but packed messages, as the compiled step does.
"""

from __future__ import annotations

import hashlib

import numpy as np

from models.forward_batch import HEADER, ROW_COLUMNS
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
    """Slot state and pages of one engine, in numpy."""

    def __init__(self, packer: Packer, num_pages: int, max_pages: int):
        self.packer = packer
        num_slots = packer.buckets.max_num_seqs
        self.pages = np.full(num_pages * packer.page_size, -7, np.int32)
        self.page_table = np.full((num_slots, max_pages), -1, np.int64)
        self.last_token = np.full(num_slots, -3, np.int32)
        self.num_computed = np.full(num_slots, -3, np.int32)
        self.shapes: set = set()

    def execute(self, step: StepInput, num_rows: int) -> np.ndarray:
        """Token ids by row, -99 in rows that do not sample."""
        layout = self.packer.layouts[step.bucket]
        self.shapes.add(step.bucket)
        view = {name: layout.view(step.buffer, name) for name in ("header", "token_ids", "deltas")}
        view |= dict(zip(ROW_COLUMNS, layout.view(step.buffer, "rows"), strict=True))
        header = dict(zip(HEADER, view["header"].tolist(), strict=True))
        assert header["num_seqs"] == num_rows
        for slot, column, page in zip(*step.overflow, strict=True):
            self.page_table[slot, column] = page
        for slot, column, page in view["deltas"].T:
            if slot < len(self.page_table):
                self.page_table[slot, column] = page
        rows, first = [], 0
        for row in range(num_rows):
            slot, count = int(view["slot"][row]), int(view["num_scheduled"][row])
            start = int(view["start"][row])
            start = start if start >= 0 else int(self.num_computed[slot])
            tokens = view["token_ids"][first : first + count]
            tokens = np.where(tokens < 0, self.last_token[slot], tokens)
            positions = np.arange(start, start + count)
            self.pages[self._slots(slot, positions)] = tokens
            self.num_computed[slot] = start + count
            assert count == 1 if row < header["num_decode"] else count >= 1
            rows.append((slot, start + count))
            first += count
        assert (view["slot"][num_rows:] == len(self.page_table)).all()
        result = np.full(num_rows, -99, np.int32)
        for row, (slot, length) in enumerate(rows):
            if view["sample"][row]:
                seen = self.pages[self._slots(slot, np.arange(length))]
                result[row] = self.last_token[slot] = next_token(seen)
        return result

    def _slots(self, slot: int, positions: np.ndarray) -> np.ndarray:
        page_size = self.packer.page_size
        pages = self.page_table[slot, positions // page_size]
        assert (pages >= 0).all()
        return pages * page_size + positions % page_size
