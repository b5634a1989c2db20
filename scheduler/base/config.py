"""Configuration of the scheduler, made from the engine's configuration: its limits and its policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

# Which waiting request is next: the first to arrive, the one with the lowest priority number, or that of the client
# served least so far.
POLICIES = ("fcfs", "priority", "fair")


class ExtensionOptions(Protocol):
    """Options of an optional capability: a frozen dataclass in the capability's file in `scheduler/extensions`."""

    def extension(self) -> Any:
        """Return a new `SchedulerExtension` of the capability, for one scheduler."""
        ...


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policy of a scheduler. Names as in vLLM; the engine's configuration checks the sizes.

    Attributes:
      num_pages: pages of each replica's pool; max_num_seqs and max_num_batched_tokens are per replica as well.
      page_size: tokens of a page.
      max_model_len: most tokens of a request, its prompt and its output.
      enable_chunked_prefill: whether several steps may compute a prompt, each a part.
      enable_prefix_caching: whether requests share the pages of equal prefixes.
      long_prefill_token_threshold: most tokens of a prefill chunk; 0 for no other limit than the batch's.
      policy: one of POLICIES: "fcfs" by arrival, "priority" by priority and then arrival, "fair" by client and then
        arrival.
      num_ranks: number of replicas. Each has its own sequences, pages and slots, and all run in one step.
      windows: for each cache group, how many keys a token attends to, including its own; None for all
        (jaxengine.scheduler.pages.groups).
      num_snapshots: number of prefixes whose recurrent states are kept; 0 for models without such states.
      num_micro_batches: number of steps in flight, one for each pipeline stage, that share no request. If it is 1, a
        request's next step may be scheduled while its last token is still being computed.
      widths: numbers of tokens other than 1 that a decode may have in a step without prefill: its last token and those
        to be verified (jaxengine.scheduler.batches.buckets).
      extensions: options of the capabilities that the engine was started with.

    Raises ValueError for a policy that is not in POLICIES; sizes are not checked.
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
        """Number of page tables of a slot: one for each cache group, and one for snapshots if there are any."""
        return len(self.windows) + (self.num_snapshots > 0)

    def __post_init__(self):
        """Raise ValueError for a policy that is not in POLICIES."""
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; allowed: {', '.join(POLICIES)}")

    @property
    def max_pages_per_seq(self) -> int:
        """Number of columns of a page table."""
        return -(-self.max_model_len // self.page_size)
