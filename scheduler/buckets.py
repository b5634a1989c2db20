"""The closed set of shapes a step may have. Warm-up walks it; nothing outside it can run."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

# Tokens of a step whose decodes have several each: where the products of so many rows take longer than reading the
# weights, a further token costs about what it saves.
MAX_WIDE_TOKENS = 256


@dataclass(frozen=True, order=True)
class Bucket:
    """A compiled shape: T tokens over S sequences. Decode-only steps have one token a sequence, T = S; wide ones have
    `width`, T = S * width. `sections` are the names of the message sections that the step has besides its own."""

    num_tokens: int
    num_seqs: int
    width: int = 1
    sections: tuple[str, ...] = ()

    @property
    def decode_only(self) -> bool:
        return self.num_tokens == self.num_seqs

    def __str__(self) -> str:
        if self.width > 1:
            return f"decode S={self.num_seqs} W={self.width}"
        if self.decode_only:
            return f"decode S={self.num_seqs}"
        return " with ".join([f"mixed T={self.num_tokens} S={self.num_seqs}", *self.sections])


class Buckets:
    """Decode-only buckets by number of sequences, mixed buckets by number of tokens.

    Args:
      decode_sizes: sizes for decode-only steps; max_num_seqs is added.
      mixed_sizes: token counts for steps with prefill; max_num_batched_tokens is added. Every mixed bucket has room for
        min(T - 1, max_num_seqs) sequences: a rank's T tokens, of which one row has two, cannot have more. The largest
        has room for max_num_seqs, which another rank may decode meanwhile.
      widths: tokens that a decode may have in steps without prefill, besides 1; each for as many sequences as
        `most_wide` says.
      sections: names of message sections; each mixed bucket is there once more for steps with all of them.

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
        self.with_sections = tuple(replace(bucket, sections=sections) for bucket in self.mixed if sections)
        # The shapes of steps with prompt tokens; decode-only ones where prompts are fed token by token.
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
        return iter(self.decode + self.mixed + self.with_sections + self.wide)

    def __len__(self) -> int:
        return len(self.decode) + len(self.mixed) + len(self.with_sections) + len(self.wide)

    def sample_size(self, bucket: Bucket) -> int:
        """Rows of logits that a step of the bucket gives, at least its S: the sampler is compiled for few sizes.

        That is the size of the smallest decode-only bucket with room for its S sequences, unless that is more than
        twice S: then it is S. Not for wide buckets, which give logits at every token.
        """
        size = self._decode_sizes[bisect.bisect_left(self._decode_sizes, bucket.num_seqs)]
        return size if size <= 2 * bucket.num_seqs else bucket.num_seqs

    def round_up_wide(self, num_seqs: int, width: int) -> Bucket:
        """The smallest bucket that holds decodes of `width` tokens, one of the widths, of so many sequences.

        num_seqs: at most `most_wide`; IndexError for more. KeyError for a width that is none of the widths.
        """
        sizes = self._wide_sizes[width]
        size = sizes[bisect.bisect_left(sizes, num_seqs)]
        return Bucket(size * width, size, width)

    def round_up(
        self, num_tokens: int, num_seqs: int, *, mixed: bool = False, prompt: bool = False, sections: bool = False
    ) -> Bucket:
        """The smallest bucket that holds `num_tokens` tokens over `num_seqs` sequences of at least one token each.

        With one token each and none of these a decode-only bucket is taken, else a mixed one:
          mixed: some sequence has more than one token although the counts, each the largest of any rank, do not show
            it.
          prompt: PROMPT_FEATURES act on its prompt tokens; changes nothing where there are no mixed buckets.
          sections: it has the message sections that `Buckets` was given, of which there must be some.

        Raises ValueError for counts that no step may have, IndexError where a mixed bucket is needed and there is none.
        """
        if not 1 <= num_seqs <= min(num_tokens, self.max_num_seqs) or num_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"a step of {num_tokens} tokens over {num_seqs} sequences; allowed are 1 to {self.max_num_seqs} "
                f"sequences of at least one token and {self.max_num_batched_tokens} tokens in all"
            )
        if num_tokens == num_seqs and not (mixed or sections) and not (prompt and self.mixed):
            return self.decode[bisect.bisect_left(self._decode_sizes, num_seqs)]
        buckets = self.with_sections if sections else self.mixed
        return buckets[bisect.bisect_left(self._mixed_sizes, max(num_tokens, num_seqs + 1))]


def most_wide(width: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """The most sequences whose decodes may have `width` tokens in one step; 0 where not even one may."""
    return min(max_num_seqs, min(MAX_WIDE_TOKENS, max_num_batched_tokens) // width)
