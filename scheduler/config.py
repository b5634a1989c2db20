"""The scheduler's limits, as the engine's configuration hands them over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.request import Request

# Who is next: the first to come, the lowest priority, or the client that was served least.
POLICIES = ("fcfs", "priority", "fair")

# (known tokens i32[n], most) -> i32[m], drafts of what comes next.
Draft = Callable[[np.ndarray, int], np.ndarray]
# (request, tokens of its output, most) -> the tokens, at most so many, that must stand behind these; None where it is
# not known that there are any, and they may be guessed.
Forced = Callable[[Request, int, int], Sequence[int] | None]


@dataclass(frozen=True)
class SchedulerConfig:
    """Names as in vLLM; the sizes are checked by the engine's configuration.

    Attributes:
      num_pages: pages of each rank's pool; max_num_seqs and max_num_batched_tokens are a rank's as well.
      page_size: tokens a page holds.
      long_prefill_token_threshold: tokens a prefill chunk may have at most, 0 for no limit but the batch's.
      policy: "fcfs", "priority" (smaller runs first, then arrival), or "fair" (of the client served least, by arrival).
      num_ranks: parts of the batch with sequences, pages and slots of their own, all in one step.
      windows: of each cache group, how many keys a token sees counting itself; None for all (scheduler.pages.groups).
      num_snapshots: states of prefixes that are kept, for models with states; 0 where there are none to keep.
      num_micro_batches: steps in flight that share no request, one for each pipeline stage; 1: a request's next step
        may be scheduled while its last token is still being computed.
      widths: tokens that a decode may have in a step without prefill, beside 1 (scheduler.buckets): drafts behind its
        last token, of which some may turn out to be right.
      guesses: whether there are drafts beside those that must be right.
      draft: makes guesses where the host does; None where the device does.
      forced: tells what must come next of requests with MASK, where that is known; None where none has any drafts.
      guided: where it is not, these requests have guesses, which the device makes, and a mask for each of their places.
      num_adapters: adapters (LoRA) that may run at once; 0 where requests have none.
      num_encoder_rows: embeddings of pictures that a rank keeps (scheduler.encoder_rows), 0 for a model that sees none;
        max_encoder_patches: patches of pictures that a rank encodes in one step at most; whole_pictures: no picture is
        cut by chunks.
    """

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    num_ranks: int = 1
    num_micro_batches: int = 1
    windows: tuple[int | None, ...] = (None,)
    num_snapshots: int = 0
    widths: tuple[int, ...] = ()
    guesses: bool = True
    draft: Draft | None = None
    forced: Forced | None = None
    guided: bool = False
    num_adapters: int = 0
    num_encoder_rows: int = 0
    max_encoder_patches: int = 0
    whole_pictures: bool = False

    @property
    def num_tables(self) -> int:
        """Page tables of a slot: of each cache group, and one that names snapshots if any are kept."""
        return len(self.windows) + (self.num_snapshots > 0)

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; allowed are {', '.join(POLICIES)}")

    @property
    def max_pages_per_seq(self) -> int:
        """Columns of a page table."""
        return -(-self.max_model_len // self.page_size)

    def most_pages(self, num_tokens: int) -> int:
        """The most pages that a sequence of so many tokens holds at once, over all groups."""
        return most_pages(
            num_tokens,
            self.windows,
            page_size=self.page_size,
            chunk=min(self.max_num_batched_tokens, self.long_prefill_token_threshold or self.max_num_batched_tokens),
        )


def most_pages(num_tokens: int, windows: Sequence[int | None], *, page_size: int, chunk: int) -> int:
    """The most pages that a sequence of so many tokens holds at once, over groups with these windows.

    chunk: tokens of it that one step computes at most. What the window of the chunk's first token sees stays: n tokens
    in a row, whose first may be the last of a page; the others fill ceil((n - 1) / page_size) columns behind it.
    """
    columns = -(-num_tokens // page_size)
    return sum(
        columns if window is None else min(columns, -(-(window - 2 + min(chunk, num_tokens)) // page_size) + 1)
        for window in windows
    )
