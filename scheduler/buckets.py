"""The closed set of shapes a step may have. Warm-up walks it; nothing outside it can run."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """A compiled shape: T tokens over S sequences. Decode-only steps have one token a sequence, T = S."""

    num_tokens: int
    num_seqs: int

    @property
    def decode_only(self) -> bool:
        return self.num_tokens == self.num_seqs

    def __str__(self) -> str:
        return f"decode S={self.num_seqs}" if self.decode_only else f"mixed T={self.num_tokens} S={self.num_seqs}"


class Buckets:
    """Decode-only buckets by number of sequences, mixed buckets by number of tokens.

    Args:
      decode_sizes: sizes for decode-only steps; max_num_seqs is added.
      mixed_sizes: token counts for steps with prefill; max_num_batched_tokens is added. Every mixed bucket has room
        for min(T - 1, max_num_seqs) sequences: a rank's T tokens, of which one row has two, cannot have more. The
        largest has room for max_num_seqs, which another rank may decode meanwhile.
    """

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, decode_sizes: Iterable[int], mixed_sizes: Iterable[int]
    ):
        for name, sizes, limit in (
            ("decode_sizes", decode_sizes := list(decode_sizes), max_num_seqs),
            ("mixed_sizes", mixed_sizes := list(mixed_sizes), max_num_batched_tokens),
        ):
            wrong = [size for size in sizes if not 1 <= size <= limit]
            if wrong:
                raise ValueError(f"{name} holds {wrong[0]}; allowed are 1 to {limit}")
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.decode = tuple(Bucket(size, size) for size in sorted({*decode_sizes, max_num_seqs}))
        largest = max(max_num_batched_tokens, max_num_seqs + 1)
        tokens = sorted({*(size for size in mixed_sizes if size > 1), largest}) if max_num_batched_tokens > 1 else []
        self.mixed = tuple(Bucket(size, min(size - 1, max_num_seqs)) for size in tokens)
        # The shapes whose steps can score prompts; a prompt fed token by token makes the others do where that is all.
        self.scored = self.mixed or self.decode
        self._decode_sizes = [bucket.num_seqs for bucket in self.decode]
        self._mixed_sizes = [bucket.num_tokens for bucket in self.mixed]

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.decode + self.mixed)

    def __len__(self) -> int:
        return len(self.decode) + len(self.mixed)

    def sample_size(self, bucket: Bucket) -> int:
        """Rows of logits that a step of the bucket gives, at least its S: the sampler is compiled for few sizes.

        A mixed bucket takes the size of a decode-only one, unless that would be more than twice its S.
        """
        size = self._decode_sizes[bisect.bisect_left(self._decode_sizes, bucket.num_seqs)]
        return size if size <= 2 * bucket.num_seqs else bucket.num_seqs

    def round_up(self, num_tokens: int, num_seqs: int, *, mixed: bool = False, scored: bool = False) -> Bucket:
        """The smallest bucket that holds `num_tokens` tokens over `num_seqs` sequences of at least one token each.

        mixed: some sequence has more than one token although the counts, each the largest of any rank, do not show it.
        scored: the step scores prompts.
        """
        if not 1 <= num_seqs <= min(num_tokens, self.max_num_seqs) or num_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"a step of {num_tokens} tokens over {num_seqs} sequences; allowed are 1 to {self.max_num_seqs} "
                f"sequences of at least one token and {self.max_num_batched_tokens} tokens in all"
            )
        if num_tokens == num_seqs and not mixed and not (scored and self.mixed):
            return self.decode[bisect.bisect_left(self._decode_sizes, num_seqs)]
        return self.mixed[bisect.bisect_left(self._mixed_sizes, max(num_tokens, num_seqs + 1))]
