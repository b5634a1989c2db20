"""Log-probabilities of many positions in a few arrays (vLLM's FlatLogprobs)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

import numpy as np

from jaxengine.requests.output.outputs import Logprob, PositionLogprobs

# Type of a position: in a prompt it may also be None.
Position = TypeVar("Position", PositionLogprobs, PositionLogprobs | None)


class FlatLogprobs(Sequence[Position], Generic[Position]):
    """Log-probabilities of positions in flat arrays, read like a list of dicts from token id to Logprob.

    Position i has the entries start_indices[i] to end_indices[i] (exclusive), in the order of the dict; a position
    without entries is None.

    Attributes:
      start_indices, end_indices: i64[positions].
      token_ids: i32[entries].
      logprobs: f32[entries].
      ranks: i32[entries], -1 for a token that has no rank.
      decoded_tokens: `decoded_token` of each entry's Logprob.
    """

    __slots__ = ("decoded_tokens", "end_indices", "logprobs", "ranks", "start_indices", "token_ids")

    def __init__(
        self,
        ends: np.ndarray,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        ranks: np.ndarray,
        decoded_tokens: list[str | None],
    ):
        """Store the given arrays without copies. ends: i64[positions], the total number of entries up to the end of
        each position; the others as the attributes.
        """
        self.end_indices = ends
        self.start_indices = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
        self.token_ids, self.logprobs, self.ranks, self.decoded_tokens = token_ids, logprobs, ranks, decoded_tokens

    @classmethod
    def of(cls, positions: Iterable[Position]) -> FlatLogprobs[Position]:
        """Return a sequence of dicts as FlatLogprobs; an empty dict or None becomes a position without entries. A
        FlatLogprobs is returned unchanged.
        """
        if isinstance(positions, FlatLogprobs):
            return positions
        known = [position or {} for position in positions]
        entries = [each for position in known for each in position.values()]
        return cls(
            np.cumsum([len(position) for position in known], dtype=np.int64),
            np.array([token_id for position in known for token_id in position], np.int32),
            np.array([each.logprob for each in entries], np.float32),
            np.array([-1 if each.rank is None else each.rank for each in entries], np.int32),
            [each.decoded_token for each in entries],
        )

    def __len__(self) -> int:
        return len(self.end_indices)

    @overload
    def __getitem__(self, index: int) -> Position: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs[Position]: ...
    def __getitem__(self, index: int | slice) -> Position | FlatLogprobs[Position]:
        """Return the dict of one position, None for one without entries; or a FlatLogprobs of the positions of a slice.
        Raises IndexError beyond the last position.
        """
        if isinstance(index, slice):
            return FlatLogprobs.of([self[each] for each in range(*index.indices(len(self)))])
        entries = range(self.start_indices[index], self.end_indices[index])
        return {int(self.token_ids[each]): self._entry(each) for each in entries} or None  # pyright: ignore

    def __iter__(self) -> Iterator[Position]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is a sequence of the same positions, flat or not."""
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # as a list

    def __add__(self, later: Sequence[Position]) -> FlatLogprobs[Position]:
        """Return a new FlatLogprobs with the positions of this one followed by those of `later`."""
        more = FlatLogprobs.of(later)
        ends = np.concatenate([self.end_indices, more.end_indices + len(self.token_ids)])
        token_ids, logprobs, ranks = (
            np.concatenate([getattr(self, name), getattr(more, name)]) for name in ("token_ids", "logprobs", "ranks")
        )
        return FlatLogprobs(ends, token_ids, logprobs, ranks, self.decoded_tokens + more.decoded_tokens)

    def __repr__(self) -> str:
        return f"FlatLogprobs({len(self)} positions, {len(self.token_ids)} entries)"

    def _entry(self, index: int) -> Logprob:
        """Return the Logprob of the entry `index`, counted over all positions."""
        rank = int(self.ranks[index])
        return Logprob(float(self.logprobs[index]), None if rank < 0 else rank, self.decoded_tokens[index])
