"""Buckets: the fixed set of step shapes. All are compiled at start-up, and a step of any other shape cannot run."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

# Most tokens of a step whose decodes have several tokens each. With more, matrix products are bound by compute, no
# longer by reading the weights, so another token costs about as much as it saves.
MAX_WIDE_TOKENS = 256


@dataclass(frozen=True, order=True)
class Bucket:
    """Compiled step shape: T tokens over S sequences. Decode-only steps have one token per sequence, T = S. Wide steps
    have `width` tokens per sequence, T = S * width. sections: names of extensions' message sections that the step has.
    """

    num_tokens: int
    num_seqs: int
    width: int = 1
    sections: tuple[str, ...] = ()

    @property
    def decode_only(self) -> bool:
        """Whether every sequence has one token: num_tokens equals num_seqs."""
        return self.num_tokens == self.num_seqs

    def __str__(self) -> str:
        """Return the bucket's shape as text for logs, such as "decode S=8", "decode S=8 W=4" or "mixed T=64 S=8"."""
        if self.width > 1:
            return f"decode S={self.num_seqs} W={self.width}"
        if self.decode_only:
            return f"decode S={self.num_seqs}"
        return " with ".join([f"mixed T={self.num_tokens} S={self.num_seqs}", *self.sections])


class Buckets:
    """All buckets: decode-only ones by number of sequences, mixed ones by number of tokens.

    Args:
      decode_sizes: numbers of sequences for decode-only steps; max_num_seqs is added.
      mixed_sizes: numbers of tokens for steps with prefill; the larger of max_num_batched_tokens and max_num_seqs + 1
        is added, and 1 is left out. There are none if max_num_batched_tokens is 1. Every mixed bucket has room for
        min(T - 1, max_num_seqs) sequences.
      widths: numbers of tokens other than 1 that decodes may have in steps without prefill; each for `most_wide`
        sequences and every smaller decode size, and left out if not even one sequence may have it.
      sections: names of message sections; each mixed bucket also exists with all of them.

    Attributes:
      decode, mixed, with_sections, wide: buckets of each kind; those without a width ascending. prompt: buckets of
      steps with prompt tokens: mixed ones and those with sections; without any, the decode-only ones.

    Raises ValueError for a size beyond its limit or below 1.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        decode_sizes: Iterable[int],
        mixed_sizes: Iterable[int],
        widths: Iterable[int] = (),
        *,
        sections: tuple[str, ...] = (),
    ):
        """Create the buckets that the class describes, with its errors."""
        for name, sizes, limit in (
            ("decode_sizes", decode_sizes := list(decode_sizes), max_num_seqs),
            ("mixed_sizes", mixed_sizes := list(mixed_sizes), max_num_batched_tokens),
        ):
            wrong = [size for size in sizes if not 1 <= size <= limit]
            if wrong:
                raise ValueError(f"{name} holds {wrong[0]}; allowed: 1 to {limit}")
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.decode = tuple(Bucket(size, size) for size in sorted({*decode_sizes, max_num_seqs}))
        largest = max(max_num_batched_tokens, max_num_seqs + 1)
        tokens = sorted({*(size for size in mixed_sizes if size > 1), largest}) if max_num_batched_tokens > 1 else []
        self.mixed = tuple(Bucket(size, min(size - 1, max_num_seqs)) for size in tokens)
        self.with_sections = tuple(replace(bucket, sections=sections) for bucket in self.mixed if sections)
        # Shapes of steps with prompt tokens. They are decode-only if prompts are fed token by token.
        self.prompt = (*self.mixed, *self.with_sections) or self.decode
        self._decode_sizes = [bucket.num_seqs for bucket in self.decode]
        self._mixed_sizes = [bucket.num_tokens for bucket in self.mixed]
        self._wide_sizes: dict[int, list[int]] = {}
        for width in widths:
            if most := most_wide(width, max_num_seqs, max_num_batched_tokens):
                self._wide_sizes[width] = sorted({most, *(size for size in self._decode_sizes if size < most)})
        self.wide = tuple(
            Bucket(size * width, size, width) for width, sizes in self._wide_sizes.items() for size in sizes
        )

    def __iter__(self) -> Iterator[Bucket]:
        """Iterate over all buckets: decode-only, mixed, those with sections, wide."""
        return iter(self.decode + self.mixed + self.with_sections + self.wide)

    def __len__(self) -> int:
        """Return the number of all buckets."""
        return len(self.decode) + len(self.mixed) + len(self.with_sections) + len(self.wide)

    def sample_size(self, bucket: Bucket) -> int:
        """Return the number of rows of logits in the bucket's steps, at least its S.

        It is the size of the smallest decode-only bucket with room for S sequences or, if that is more than twice S, S
        itself. Not for wide buckets, which have logits at every token.
        """
        size = self._decode_sizes[bisect.bisect_left(self._decode_sizes, bucket.num_seqs)]
        return size if size <= 2 * bucket.num_seqs else bucket.num_seqs

    def round_up_wide(self, num_seqs: int, width: int) -> Bucket:
        """Return the smallest bucket that holds `num_seqs` decodes of `width` tokens each.

        num_seqs: at most `most_wide`, otherwise IndexError is raised. Raises KeyError for an unknown width.
        """
        sizes = self._wide_sizes[width]
        size = sizes[bisect.bisect_left(sizes, num_seqs)]
        return Bucket(size * width, size, width)

    def round_up(
        self, num_tokens: int, num_seqs: int, *, mixed: bool = False, prompt: bool = False, sections: bool = False
    ) -> Bucket:
        """Return the smallest bucket that holds `num_tokens` tokens over `num_seqs` sequences of at least one token
        each: a decode-only bucket if there is one token per sequence and no flag is set, otherwise a mixed one.

        mixed: whether some sequence has more than one token. The counts, which are maxima over the replicas, may not
        show that. prompt: whether PROMPT_FEATURES act on its prompt tokens; ignored if there are no mixed buckets.
        sections: whether the step has the message sections that `Buckets` was given, which must not be empty.

        Raises ValueError for counts that no step may have, IndexError if a mixed bucket is needed and there is none.
        """
        if not 1 <= num_seqs <= min(num_tokens, self.max_num_seqs) or num_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"a step of {num_tokens} tokens over {num_seqs} sequences; allowed: 1 to {self.max_num_seqs} "
                f"sequences of at least one token and {self.max_num_batched_tokens} tokens in all"
            )
        if num_tokens == num_seqs and not (mixed or sections) and not (prompt and self.mixed):
            return self.decode[bisect.bisect_left(self._decode_sizes, num_seqs)]
        buckets = self.with_sections if sections else self.mixed
        return buckets[bisect.bisect_left(self._mixed_sizes, max(num_tokens, num_seqs + 1))]


def most_wide(width: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Return the most sequences that may decode `width` tokens each in one step; 0 if not even one may."""
    return min(max_num_seqs, min(MAX_WIDE_TOKENS, max_num_batched_tokens) // width)
