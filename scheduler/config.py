"""The scheduler's limits, as the engine's configuration hands them over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

# Who is next: the first to come, the lowest priority, or the client that was served least.
POLICIES = ("fcfs", "priority", "fair")


class ExtensionOptions(Protocol):
    """What an optional capability is started with: a frozen dataclass of its file in `scheduler/extensions`."""

    def extension(self) -> Any:
        """Makes its `SchedulerExtension` for one scheduler."""
        ...


@dataclass(frozen=True)
class SchedulerConfig:
    """Names as in vLLM; the sizes are checked by the engine's configuration.

    Attributes:
      num_pages: pages of each rank's pool; max_num_seqs and max_num_batched_tokens are a rank's as well.
      page_size: tokens a page holds.
      long_prefill_token_threshold: tokens a prefill chunk may have at most, 0 for no limit but the batch's.
      policy: "fcfs", "priority" (smaller runs first, then arrival), or "fair" (of the client served least, by arrival).
      num_ranks: parts of the batch with sequences, pages and slots of their own, all in one step.
      windows: of each cache group, how many keys a token sees counting itself; None for all
        (jaxengine.scheduler.pages.groups).
      num_snapshots: states of prefixes that are kept, for models with states; 0 where there are none to keep.
      num_micro_batches: steps in flight that share no request, one for each pipeline stage; 1: a request's next step
        may be scheduled while its last token is still being computed.
      widths: tokens that a decode may have in a step without prefill, besides 1 (jaxengine.scheduler.buckets): its last
        token and others of which some may turn out to be right.
      extensions: the optional capabilities that the engine was started with.
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
    extensions: tuple[ExtensionOptions, ...] = ()

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
