"""Fields of DeepSeek-V4, V4.1 (DeepSeek-AI 2026) and Qwen4-Exp: keys for blocks of tokens, which layers may share,
parallel hidden states, which DeepSeek-V4 mixes by doubly stochastic matrices, and a memory of n-grams.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from jaxengine.models.config.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTEGER,
    ModelConfigError,
    check_size,
)
from jaxengine.models.config.state import MAX_KERNEL, RecurrentState, StateArray

_MOST_STREAMS, _MOST_ROUNDS = 16, 1024
TOKEN_MAP = "token_map"  # tensor of a memory of n-grams: the smaller vocabulary's id of each token
# Largest number of a sequence's tokens that a state holds: the window, and the blocks from which a key is computed.
_MOST_KEPT = 1 << 14
_MOST_HASHES = 256  # of an n-gram, many times as many as known models have
_SIEVED = 1 << 16  # numbers among which primes are looked for at a time


def is_token_map(name: Any) -> bool:
    """Return whether `name`, any object of a caller, is a string that ends in ".token_map"."""
    return isinstance(name, str) and name.endswith(f".{TOKEN_MAP}")


@dataclass(frozen=True)
class BlockIndex:
    """Indexer of a layer with compressed keys: a token attends to the `top_k` blocks that it scores highest.

    Attributes:
      num_heads, head_dim: heads of its queries, and elements of a query and of its key for each block.

    Raises ModelConfigError for sizes that are not positive or out of their limits.
    """

    num_heads: int
    head_dim: int
    top_k: int

    def __post_init__(self) -> None:
        check_size("index_n_heads", self.num_heads, MAX_HEADS)
        check_size("index_head_dim", self.head_dim, MAX_HEAD_DIM)
        check_size("index_topk", self.top_k, MAX_INTEGER)


@dataclass(frozen=True)
class CompressedKeys(RecurrentState):
    """Cache of a layer that attends to the latest tokens, and to one key for each block of `rate` tokens.

    The state of a sequence holds data of single tokens: the keys of its window, and the projections from which the next
    block's key is computed. Pages hold the keys of blocks: one for each whole block of the page's tokens, or at most
    one if a block is longer than a page.

    Attributes:
      head_dim: elements of a key, which all heads share and which is also the value.
      window: number of latest tokens that a token attends to, itself included.
      rate: tokens of a block; None for a layer that attends to the window only and has no pages.
      overlapping: whether a block's key is also computed from the tokens of the previous block.
      index: indexer that selects the blocks that a token attends to; None for all of them.
      q_rank: elements of the latent of queries.
      out_groups: groups of heads.
      out_rank: elements to which the outputs of each group are projected, before all groups together are projected to
        the hidden size.

    Raises ModelConfigError for sizes out of their limits: `window` and `rate` are from 2 to 16384.
    """

    head_dim: int
    window: int
    q_rank: int
    out_groups: int
    out_rank: int
    rate: int | None = None
    overlapping: bool = False
    index: BlockIndex | None = None
    # The field of config.json with the rate, and the least rate.
    _rate_field: ClassVar[tuple[str, int]] = ("compress_rates", 2)

    def __post_init__(self) -> None:
        check_size("sliding_window", self.window, _MOST_KEPT, 2)
        check_size("q_lora_rank", self.q_rank, MAX_HIDDEN)
        check_size("o_groups", self.out_groups, MAX_HEADS)
        check_size("o_lora_rank", self.out_rank, MAX_HIDDEN)
        if self.rate is not None:
            check_size(self._rate_field[0], self.rate, _MOST_KEPT, self._rate_field[1])

    @property
    def has_indexer(self) -> bool:
        """Whether the layer has an indexer, `index`, that scores blocks."""
        return self.index is not None

    @property
    def num_series(self) -> int:
        """Number of blocks to whose keys a token contributes."""
        return 2 if self.overlapping else 1

    @property
    def span(self) -> int:
        """Number of tokens from which a block's key is computed; 0 without blocks."""
        return (self.rate or 0) * self.num_series

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of a block's keys: the layer's key, and the indexer's if there is one."""
        return (self.head_dim,) if self.index is None else (self.head_dim, self.index.head_dim)

    @property
    def num_projected(self) -> int:
        """Number of elements that a token contributes to the keys of blocks: values and their gates, for its own block
        and, if blocks overlap, for the next.
        """
        return 2 * self.num_series * sum(self.widths)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """State arrays: the window's keys [window - 1, head_dim] and, with blocks, the last tokens' contributions to
        blocks [span - 1, num_projected]. The latest token comes last.
        """
        window = StateArray((self.window - 1, self.head_dim), None, (None, None))
        if self.rate is None:
            return (window,)
        return window, StateArray((self.span - 1, self.num_projected), None, (None, None))

    @property
    def flops(self) -> int:
        """Floating-point operations per token for computing keys of blocks; 0 without blocks."""
        return 4 * self.span * sum(self.widths) // (self.rate or 1)

    def num_slots(self, page_size: int) -> int:
        """Return the number of a page's token slots that a block's key fills: the block's tokens, or the page's if the
        page is shorter; 1 without blocks. Raises ModelConfigError if neither size divides the other.
        """
        rate = self.rate or 1
        if page_size % rate and rate % page_size:
            raise ModelConfigError(
                f"block_size must be a multiple or a divisor of compress_rates, {rate}, got {page_size}"
            )
        return min(rate, page_size)

    def page_sizes(self, page_size: int) -> dict[str, int | bool]:
        """Return fields of KVSpec by name: the elements of a block's key that each slot holds, those of the indexer's
        key in place of a value, and whether values are part of the keys, which they are without an indexer. Raises
        ModelConfigError if neither the page's nor the block's size divides the other.
        """
        own, *of_index = (-(-width // self.num_slots(page_size)) for width in self.widths)
        return {"head_dim": own, "v_head_dim": (of_index or [own])[0], "values_in_keys": not of_index}


@dataclass(frozen=True)
class Candidates:
    """Blocks among which indexers of later layers select: the `count` runs of `size` successive blocks whose best block
    one layer scores highest. The run with the latest block is always one of them.

    chosen: whether an earlier layer has chosen them; otherwise this layer does. Raises ModelConfigError for sizes that
    are not positive or out of their limits.
    """

    count: int
    size: int
    chosen: bool

    def __post_init__(self) -> None:
        check_size("candidate_topk_blocks", self.count, MAX_INTEGER)
        check_size("candidate_block_size", self.size, _MOST_KEPT)


@dataclass(frozen=True)
class SharedKeys(CompressedKeys):
    """CompressedKeys of which one layer computes those of several layers (DeepSeek-V4.1).

    A block's key is computed from its own tokens, `rate` of which may be 1. The indexer's key is a projection of the
    layer's key. Layers with blocks have an indexer, or use the selection of an earlier layer.

    Attributes:
      owned: whether the layer computes keys of blocks and writes them to its pages; otherwise it has no pages.
      selects: whether the layer selects blocks itself.
      candidates: blocks among which the layer selects, or that it chooses for later layers; None for all blocks.
      lookback: number of earlier tokens whose ids the layer reads; 0 for none. The state has them.
    """

    owned: bool = True
    selects: bool = True
    candidates: Candidates | None = None
    lookback: int = 0
    _rate_field: ClassVar[tuple[str, int]] = ("compress_ratios", 1)

    @property
    def has_indexer(self) -> bool:
        return self.index is not None and self.selects

    @property
    def num_projected(self) -> int:
        """Number of elements that a token contributes to its block's key: values and, unless it is the block's only
        token, their gates.
        """
        return self.head_dim * (1 if self.rate == 1 else 2)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """State arrays: the window's keys [window - 1, head_dim]; in a layer that computes keys of blocks of several
        tokens their contributions, f32[rate - 1, num_projected]; with a lookback the ids of the last tokens plus one,
        i32[lookback, 1], 0 for none. The latest token comes last.
        """
        found = [StateArray((self.window - 1, self.head_dim), None, (None, None))]
        if self.rate is not None and self.rate > 1 and self.owned:
            found.append(StateArray((self.rate - 1, self.num_projected), "float32", (None, None)))
        if self.lookback:
            found.append(StateArray((self.lookback, 1), "int32", (None, None)))
        return tuple(found)


@dataclass(frozen=True)
class NgramMemory:
    """Tables of embeddings of n-grams, which some layers look up by hashes of the latest token ids (DeepSeek-AI 2026,
    "Conditional Memory via Scalable Lookup", as in DeepSeek-V4.1).

    Ids are first replaced by those of a smaller vocabulary, in which tokens that differ in case, accents or surrounding
    white space are equal. Each n-gram of 2 to `longest` tokens that ends with a token has `num_heads` hashes, each of
    which finds a row in a range of the layer's table whose size is a prime number.

    Attributes:
      layers: numbers of the layers that have a table, ascending.
      num_rows: rows of each of these tables.
      longest: tokens of the longest n-gram.
      num_heads, head_dim: hashes of an n-gram, and elements of a row.
      least_rows: sizes of ranges are the first prime numbers from this number on, each used once.
      pad_id: token that stands for those before the first.
      vocab_size: tokens of the smaller vocabulary.

    Raises ModelConfigError for sizes out of their limits, and for a table with fewer rows than its ranges.
    """

    layers: tuple[int, ...]
    num_rows: tuple[int, ...]
    longest: int
    num_heads: int
    head_dim: int
    least_rows: int
    pad_id: int
    vocab_size: int

    def __post_init__(self) -> None:
        check_size("engram_max_ngram_size", self.longest, _MOST_STREAMS, 2)
        check_size("engram_n_heads", self.num_heads, _MOST_HASHES)
        check_size("engram_head_dim", self.head_dim, MAX_HIDDEN)
        check_size("engram_vocab_size", self.least_rows, MAX_INTEGER)
        # Rows are numbered by int32. This also limits the search for prime numbers.
        check_size("engram_vocab_size * number of ranges", self.least_rows * self.num_columns, MAX_INTEGER)
        check_size("engram_compressed_vocab_size", self.vocab_size, MAX_INTEGER)
        for rows in self.num_rows:
            check_size("engram_num_embeddings", rows, MAX_INTEGER)
        for rows, primes in zip(self.num_rows, self.primes, strict=True):
            if sum(primes) > rows:
                raise ModelConfigError(f"engram_num_embeddings must be at least {sum(primes)}, got {rows}")

    @property
    def num_columns(self) -> int:
        """Number of rows that a token looks up in a table."""
        return (self.longest - 1) * self.num_heads

    @property
    def primes(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the ranges of each layer's table, num_columns each: ascending primes from least_rows on, all
        different.
        """
        count = self.num_columns
        found = primes_from(self.least_rows, len(self.layers) * count)
        return tuple(found[start : start + count] for start in range(0, len(found), count))

    def multipliers(self, layer: int) -> tuple[int, ...]:
        """Return the odd factor, below 2 ** 63 / vocab_size, of the ids of a token and of each of the longest - 1
        tokens before it, in the layer number `layer`, drawn from numpy's generator with the seed 10007 * layer.
        """
        bound = max(1, (2**63 - 1) // self.vocab_size // 2)
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, self.longest, np.int64)
        return tuple(2 * int(each) + 1 for each in drawn)


@lru_cache(maxsize=8)
def primes_from(least: int, count: int) -> tuple[int, ...]:
    """Return the `count` smallest primes that are at least `least`, ascending, of numbers below 2 ** 32 (sieve of
    Eratosthenes). Results for the last 8 arguments are cached.
    """
    found: list[int] = []
    first, divisors = max(least, 2), _unsieved(2, range(2, 1 << 8))
    while len(found) < count:
        found += _unsieved(first, divisors)
        first += _SIEVED
    return tuple(found[:count])


def _unsieved(first: int, divisors: Iterable[int]) -> list[int]:
    """Return those of the _SIEVED numbers from `first` on that no smaller one of the ascending `divisors` divides."""
    is_prime, end = np.ones(_SIEVED, bool), first + _SIEVED
    for divisor in divisors:
        if divisor * divisor >= end:
            break
        is_prime[max(divisor * divisor, -(-first // divisor) * divisor) - first :: divisor] = False
    return (np.flatnonzero(is_prime) + first).tolist()


@dataclass(frozen=True)
class RecentPlaces(RecurrentState):
    """Positions in time, height and width of the last tokens, which a layer with M-RoPE and keys of blocks keeps until
    their block is complete.

    size: tokens of a block.
    """

    size: int

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """State arrays: the positions int32[size - 1, 3], at least of one token."""
        return (StateArray((max(self.size - 1, 1), 3), "int32", (None, None)),)

    @property
    def flops(self) -> int:
        """Floating-point operations for one token: none."""
        return 0


@dataclass(frozen=True)
class LayerConvolutions(RecurrentState):
    """Short convolutions of a layer's keys, values, attention's output and MLP's output (Inkling), whose state is their
    windows.

    Attributes:
      num_kv_heads: heads of keys and values.
      head_dim: elements of a key, and of a value.
      hidden_size: elements of an output.
      kernel: tokens in a window, the token itself included.

    Raises ModelConfigError unless `kernel` is from 1 to MAX_KERNEL.
    """

    num_kv_heads: int
    head_dim: int
    hidden_size: int
    kernel: int

    def __post_init__(self) -> None:
        check_size("conv_kernel_size", self.kernel, MAX_KERNEL)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """State arrays: the windows [kernel - 1, channels] of keys, values, and the outputs of attention and MLP."""
        before, heads = self.kernel - 1, self.num_kv_heads * self.head_dim
        keys = StateArray((before, heads), None, (None, "heads"), parts=self.num_kv_heads)
        output = StateArray((before, self.hidden_size), None, (None, None))
        return keys, keys, output, output

    @property
    def flops(self) -> int:
        """Floating-point operations of the convolutions for one token."""
        return 4 * self.kernel * (self.num_kv_heads * self.head_dim + self.hidden_size)


@dataclass(frozen=True)
class QueryKeyConvolutions(RecurrentState):
    """Convolutions of a layer's queries and keys, one after the other, and values of the token before (ZAYA), whose
    state is their windows.

    Attributes:
      num_heads, num_kv_heads: heads of queries, and of keys and values.
      head_dim: elements of a query, key and value.
      kernels: tokens in the windows of both convolutions, the token itself included.

    Raises ModelConfigError unless kernels are from 1 to MAX_KERNEL, and num_kv_heads * head_dim is even.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kernels: tuple[int, int]

    def __post_init__(self) -> None:
        for index, kernel in enumerate(self.kernels):
            check_size(f"cca_time{index}", kernel, MAX_KERNEL)
        if self.num_kv_heads * self.head_dim % 2:
            text = f"num_key_value_heads * head_dim must be even, got {self.num_kv_heads} * {self.head_dim}"
            raise ModelConfigError(text)

    @property
    def arrays(self) -> tuple[StateArray, ...]:
        """State arrays: the windows [kernel - 1, channels] of queries and keys before each convolution, and half of the
        values of the last token, [1, num_kv_heads * head_dim / 2].
        """
        channels = (self.num_heads + self.num_kv_heads) * self.head_dim
        windows = (StateArray((kernel - 1, channels), None, (None, "heads")) for kernel in self.kernels)
        return *windows, StateArray((1, self.num_kv_heads * self.head_dim // 2), None, (None, None))

    @property
    def flops(self) -> int:
        """Floating-point operations of both convolutions for one token, first by channel, then within heads."""
        first, second = self.kernels
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * (first + second * self.head_dim)


@dataclass(frozen=True)
class HyperConnections:
    """Several hidden states of a token, which a layer mixes to one input and to all of which it adds its output (Xie et
    al. 2026, manifold-constrained hyper-connections; without `rounds` independent ones, as in Hy4 or, with a `rank`, in
    Qwen4-Exp).

    Attributes:
      num_streams: number of hidden states of a token.
      rounds: rounds of scaling rows and columns (Sinkhorn) that make the mixing matrix doubly stochastic; None where
        hidden states are not mixed with each other.
      eps: number added to divisors, and to shares; with a rank, to the squares of norms.
      magnitude: largest factor of a layer's output, without eps.
      delayed: whether a part's input is mixed with the shares that the part before it has computed (DeepSeek-V4.1).
      rank: rank of the product from which each element's shares are computed; None for one share for all elements.

    Raises ModelConfigError for less than 2 or more than 16 streams, other sizes out of their limits, and an eps or a
    magnitude that is not finite and above 0.
    """

    num_streams: int
    rounds: int | None
    eps: float
    magnitude: float = 2.0
    delayed: bool = False
    rank: int | None = None

    @property
    def num_beside(self) -> int:
        """Number of elements that layers pass on for a token in addition to its hidden states: each of the delayed
        shares as three numbers, whose sum it is.
        """
        return 3 * self.num_streams if self.delayed else 0

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_size("hc_lowrank", self.rank, MAX_HIDDEN)
        check_size("hc_mult", self.num_streams, _MOST_STREAMS, 2)
        if self.rounds is not None:
            check_size("hc_sinkhorn_iters", self.rounds, _MOST_ROUNDS)
        for name, value in (("hc_eps", self.eps), ("hc_magnitude", self.magnitude)):
            if not 0 < value < float("inf"):
                raise ModelConfigError(f"{name} must be a finite number > 0, got {value!r}")
