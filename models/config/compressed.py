"""Fields of DeepSeek-V4 (DeepSeek-AI 2026): keys of which one stands for a block of tokens, and hidden states that are
mixed by doubly stochastic matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxengine.models.config.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTEGER,
    ModelConfigError,
    check_size,
)
from jaxengine.models.config.state import StateArray

_MOST_STREAMS, _MOST_ROUNDS = 16, 1024
# Tokens that a state holds of each sequence: the window, and the blocks that a key is made of.
_MOST_KEPT = 1 << 14


@dataclass(frozen=True)
class BlockIndex:
    """Indexer of a layer with compressed keys: a token attends to the `top_k` of them that it scores highest.

    Attributes:
      num_heads, head_dim: heads of its queries, and elements of a query and of its key for each block.
    """

    num_heads: int
    head_dim: int
    top_k: int

    def __post_init__(self) -> None:
        check_size("index_n_heads", self.num_heads, MAX_HEADS)
        check_size("index_head_dim", self.head_dim, MAX_HEAD_DIM)
        check_size("index_topk", self.top_k, MAX_INTEGER)


@dataclass(frozen=True)
class CompressedKeys:
    """Cache of a layer that attends to the latest tokens, and to one key for each block of `rate` tokens.

    The state of a sequence has what may still be needed of single tokens: the keys of its window, and the projections
    of which the next block's key is made. Pages have the keys of blocks, at most one for each page's tokens or as many
    as it has whole blocks.

    Attributes:
      head_dim: elements of a key, which is its value as well; one for all heads.
      window: latest keys of tokens that a token sees, its own included.
      rate: tokens of a block; None for a layer that sees the window alone and has no pages.
      overlapping: a block's key is made of the tokens of the block before it, too.
      index: indexer that selects the blocks that a token attends to; None for all of them.
      q_rank: elements of the latent of queries.
      out_groups, out_rank: groups of heads whose outputs are projected to so many elements each, and these together to
        the hidden size.
    """

    head_dim: int
    window: int
    q_rank: int
    out_groups: int
    out_rank: int
    rate: int | None = None
    overlapping: bool = False
    index: BlockIndex | None = None

    def __post_init__(self) -> None:
        check_size("sliding_window", self.window, _MOST_KEPT, 2)
        check_size("q_lora_rank", self.q_rank, MAX_HIDDEN)
        check_size("o_groups", self.out_groups, MAX_HEADS)
        check_size("o_lora_rank", self.out_rank, MAX_HIDDEN)
        if self.rate is not None:
            check_size("compress_rates", self.rate, _MOST_KEPT, 2)

    @property
    def num_series(self) -> int:
        """Return the number of blocks whose keys a token contributes to."""
        return 2 if self.overlapping else 1

    @property
    def span(self) -> int:
        """Return the number of tokens that a block's key is made of."""
        return (self.rate or 0) * self.num_series

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the elements of a block's keys: the layer's, and the indexer's if there is one."""
        return (self.head_dim,) if self.index is None else (self.head_dim, self.index.head_dim)

    @property
    def num_projected(self) -> int:
        """Return the number of elements that a token contributes to the keys of blocks: values and their gates, for its
        own block and, where they overlap, for the next.
        """
        return 2 * self.num_series * sum(self.widths)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """Return the state: the window's keys [window - 1, head_dim] and, with blocks, what the last tokens contribute
        to them, [span - 1, num_projected]; the latest token comes last.
        """
        window = StateArray((self.window - 1, self.head_dim), None, (None, None))
        if self.rate is None:
            return (window,)
        return window, StateArray((self.span - 1, self.num_projected), None, (None, None))

    @property
    def flops(self) -> int:
        """Return the floating-point operations for one token by which keys of blocks are made; 0 without blocks."""
        return 4 * self.span * sum(self.widths) // (self.rate or 1)

    def num_slots(self, page_size: int) -> int:
        """Return the number of tokens' slots of a page that a block's key fills: the block's own, or the page's if it
        is shorter than a block. Raises ModelConfigError for pages that blocks do not divide and that do not divide
        them.
        """
        rate = self.rate or 1
        if page_size % rate and rate % page_size:
            raise ModelConfigError(
                f"block_size must be a multiple or a divisor of compress_rates, {rate}, got {page_size}"
            )
        return min(rate, page_size)

    def page_sizes(self, page_size: int) -> dict[str, int | bool]:
        """Return fields of KVSpec: the elements of a block's keys that each of its slots holds, the indexer's in the
        place of a value. Raises ModelConfigError as `num_slots` does.
        """
        own, *of_index = (-(-width // self.num_slots(page_size)) for width in self.widths)
        return {"head_dim": own, "v_head_dim": (of_index or [own])[0], "values_in_keys": not of_index}


@dataclass(frozen=True)
class HyperConnections:
    """Hidden states of a token that layers read as one and write as many (Xie et al. 2026, manifold-constrained
    hyper-connections).

    Attributes:
      num_streams: hidden states of a token.
      rounds: of scaling rows and columns, after which the matrix that mixes them counts as doubly stochastic.
      eps: added to what is divided by.
    """

    num_streams: int
    rounds: int
    eps: float

    def __post_init__(self) -> None:
        check_size("hc_mult", self.num_streams, _MOST_STREAMS, 2)
        check_size("hc_sinkhorn_iters", self.rounds, _MOST_ROUNDS)
        if not 0 < self.eps < float("inf"):
            raise ModelConfigError(f"hc_eps must be a finite number > 0, got {self.eps!r}")
