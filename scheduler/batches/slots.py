"""Running requests in columns with one row per slot."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxengine.scheduler.base.request import Request

# Most stop ids of a slot in the table that is compared for all slots at once. Longer lists, which are rare, are kept as
# sets outside of the table, so that one request does not slow down the steps of others.
STOP_COLUMNS = 8


class Slots:
    """Columns over slots 0 .. max_num_seqs - 1 of one replica. A slot's row is only meaningful while `active` is true.

    `num_tokens` counts the tokens of the request up to the last one that a scheduled step samples, `num_known` those
    whose ids the host has. They differ by the tokens of steps in flight. The first `num_fed` tokens were known when the
    request took the slot, and the host sends their ids; after them each step feeds the token sampled before it. `limit`
    is the number of tokens, prompt included, at which the request ends. `min_stop` is the number of tokens from which
    on a stop token ends it. `epoch` changes with every owner, so that results of an earlier one are recognised.
    `last_step` is the number of the last step in which the slot had a row, and `last_token_time` the time at which its
    last token arrived. `num_prompt` counts the tokens of the prompt, `num_computed` those that have their KV once the
    steps scheduled so far have run. `priority`, `arrival_index`, `per_step`, `tag` and `features` are the request's.

    Attributes:
      requests: object [max_num_seqs], the owners, None for a free slot.
      known: for each slot the tokens to feed, i32 [num_fed], None for a free slot.
    """

    def __init__(self, max_num_seqs: int):
        """Create `max_num_seqs` free slots."""

        def column(dtype: DTypeLike = np.int32, fill: float = 0) -> np.ndarray:
            return np.full(max_num_seqs, fill, dtype)

        self.max_num_seqs = max_num_seqs
        self.requests: Any = np.full(max_num_seqs, None, object)
        self.active = column(np.bool_, False)
        self.epoch = column(np.int64)
        self.priority = column(np.int64)
        self.arrival_index = column(np.int64)
        self.num_prompt = column()
        self.num_computed = column()
        self.num_tokens = column()
        self.num_known = column()
        self.num_fed = column()
        self.limit = column()
        self.min_stop = column()
        self.last_step = column(np.int64)
        self.last_token_time = column(np.float64)
        self.per_step = column(np.bool_, False)
        self.tag = column(np.int64)
        self.features = column(np.int32)
        self._stop_ids = np.full((STOP_COLUMNS, max_num_seqs), -1, np.int32)
        self._num_stop_columns = 0  # columns of _stop_ids that are in use
        self._has_many_stop_ids = column(np.bool_, False)
        self._many_stop_ids: dict[int, frozenset[int]] = {}
        self.known: list[np.ndarray | None] = [None] * max_num_seqs
        self._output = np.zeros((max_num_seqs, 64), np.int32)
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_active(self) -> int:
        """Number of slots with an owner."""
        return self.max_num_seqs - len(self._free)

    @property
    def num_free(self) -> int:
        """Number of slots without an owner."""
        return len(self._free)

    def take(self, request: Request, known: np.ndarray, num_computed: int, limit: int) -> int:
        """Assign a free slot to a request, set the slot's columns and `request.slot`, and return the slot's number.
        Raises IndexError if no slot is free.

        Args:
          known: i32 [n], the tokens to feed: the prompt and the output so far.
          num_computed: how many of these already have their KV.
          limit: number of tokens, including the prompt's, at which the request ends.

        Raises OverflowError, TypeError or ValueError if a value of the request does not fit its column; the slot then
        stays free.
        """
        slot = self._free[-1]
        num_output = len(known) - request.num_prompt_tokens
        self._reserve(limit - request.num_prompt_tokens)
        self.priority[slot] = request.priority
        self.arrival_index[slot] = request.arrival_index
        self.num_prompt[slot] = request.num_prompt_tokens
        self.num_computed[slot] = num_computed
        self.num_tokens[slot] = self.num_known[slot] = self.num_fed[slot] = len(known)
        self.limit[slot] = limit
        self.min_stop[slot] = request.num_prompt_tokens + max(1, request.params.min_tokens)
        self.last_token_time[slot] = request.last_token_time
        self.per_step[slot] = request.per_step
        self.tag[slot] = request.tag
        self.features[slot] = request.features
        stop_ids = request.stop_token_ids
        has_many = len(stop_ids) > STOP_COLUMNS
        self._stop_ids[:, slot] = -1
        self._has_many_stop_ids[slot] = has_many
        if has_many:
            self._many_stop_ids[slot] = frozenset(stop_ids)
        else:
            self._stop_ids[: len(stop_ids), slot] = stop_ids
            used = self._num_stop_columns if self.num_active else 0
            self._num_stop_columns = max(used, len(stop_ids))
        self._output[slot, :num_output] = known[request.num_prompt_tokens :]
        self.requests[slot] = request
        self.known[slot] = known
        self.active[slot] = True
        self.epoch[slot] += 1
        self._free.pop()
        request.slot = slot
        return slot

    def release(self, slot: int) -> None:
        """Free a slot, and change its epoch. Store the known output, the time of the last token and slot -1 in its
        request.
        """
        request = self.requests[slot]
        assert request is not None
        request.output_token_ids = self.output(slot).copy()
        request.last_token_time = float(self.last_token_time[slot])
        request.slot = -1
        self.requests[slot] = self.known[slot] = None
        self.active[slot] = False
        self._has_many_stop_ids[slot] = False
        self._many_stop_ids.pop(slot, None)
        self.epoch[slot] += 1
        self._free.append(slot)

    def output(self, slot: int) -> np.ndarray:
        """Return the known output tokens of a slot, i32[n], as a view."""
        return self._output[slot, : self.num_known[slot] - self.num_prompt[slot]]

    def known_token_ids(self, slot: int) -> np.ndarray:
        """Return the prompt and the known output of a slot, i32[n]."""
        return np.concatenate([self.requests[slot].prompt_token_ids, self.output(slot)])

    def last_token_ids(self, slots: np.ndarray) -> np.ndarray:
        """Return the last known output token of each of `slots`, i32[n]; each must have one."""
        return self._output[slots, self.num_known[slots] - self.num_prompt[slots] - 1]

    def append_tokens(self, slots: np.ndarray, token_ids: np.ndarray, known: np.ndarray) -> None:
        """Append sampled tokens to the outputs of slots, and set `num_known`. The tokens of a slot must be in order.

        Args:
          slots: slot of each token.
          token_ids: i32[n].
          known: i64[n], number of known tokens of each token's slot up to and including the token, with the prompt's.
        """
        self._output[slots, known - self.num_prompt[slots] - 1] = token_ids
        self.num_known[slots] = known

    def are_stops(self, slots: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Return bool [n]: whether each of `token_ids` i32 [n] is a stop id of its slot in `slots` i64 [n]. `min_stop`
        is not considered.
        """
        stops = np.zeros(len(slots), np.bool_)
        for ids in self._stop_ids[: self._num_stop_columns]:
            stops |= ids[slots] == token_ids
        if self._many_stop_ids:
            for row in np.flatnonzero(self._has_many_stop_ids[slots]).tolist():
                stops[row] = int(token_ids[row]) in self._many_stop_ids[int(slots[row])]
        return stops

    def last_in_order(self) -> int:
        """Return the active slot to preempt first: the one with the largest `priority` number, and among equals the
        latest arrival. Raises IndexError if no slot is active.
        """
        slots = np.flatnonzero(self.active)
        order = np.lexsort((self.arrival_index[slots], self.priority[slots]))
        return int(slots[order[-1]])

    def _reserve(self, num_output: int) -> None:
        """Make room for `num_output` output tokens in every slot. If the array is too small, at least double it."""
        rows, columns = self._output.shape
        if num_output > columns:
            wider = np.empty((rows, max(num_output, 2 * columns)), np.int32)
            wider[:, :columns] = self._output
            self._output = wider
