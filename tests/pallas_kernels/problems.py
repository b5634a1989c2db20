"""Inputs of the attention conformance suite: a case says what the batch looks like, `build` makes the numbers.

Hostile by default: page ids are permuted and not contiguous, every slot that no token sees holds NaN, everything past
`num_seqs` and past a sequence's last page is garbage, and the batch is padded in tokens and in sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec
from tests.pallas_kernels import pools, reference

FAMILIES = ("normal", "sharp", "uniform", "needle")
GARBAGE = 2_000_000_000


@dataclass(frozen=True)
class Case:
    """One batch and one attention layer. Shapes default to a bucket that most cases share, so that it compiles once."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)  # N, K
    dims: tuple[int, int] = (16, 16)  # H, Hv
    page_size: int = 16
    num_tokens: int = 96
    max_seqs: int = 8
    max_pages: int = 24
    pool_pages: int | None = None  # None: as many as half of all page tables
    window: int | None = None
    chunk: int | None = None
    lookback: int = 0
    soft_cap: float | None = None
    causal: bool = True
    values_in_keys: bool = False
    sm_scale: float | None = None
    sinks: str | None = None  # "zero", "large", "absent" or "mixed"
    slopes: bool = False
    biases: int = 0  # distances for which a token has biases
    tree: str | None = None  # "chain" or "branches"
    pictures: tuple[tuple[int, int, int], ...] = ()  # sequence, first, end: positions whose tokens see each other
    mutual: bool = False  # whether the pictures of a sequence see each other, too
    query_scale: float = 1.0  # multiplies q, for logits far from 1
    value_scale: float = 1.0
    past_end: int = -1  # what the page table holds past a sequence's last page
    unseen: float = float("nan")  # what slots hold that no token sees
    shared_pages: int = 0  # pages that all sequences have in common
    kv_dtype: str | None = None  # of the pool, None: that of the queries
    scales: tuple[float, float] = (1.0, 1.0)  # what a quantised pool's scales of keys and values are multiplied by
    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # of the queries

    @property
    def spec(self) -> AttentionSpec:
        scale = self.dims[0] ** -0.5 if self.sm_scale is None else self.sm_scale
        rest = self.window, self.soft_cap, self.causal, self.chunk, self.lookback, self.values_in_keys
        rest = *rest, self.slopes, self.mutual
        return AttentionSpec(*self.heads, *self.dims, scale, *rest, bias_extent=self.biases)

    def pool_dtype(self, dtype: str) -> str:
        return self.kv_dtype or dtype

    def with_defaults(self, dims: tuple[int, int], latent_dims: tuple[int, int]) -> Case:
        """The case with other head dims, unless it asks for its own; those of latents where values lie in keys."""
        if self.dims != Case.dims:
            return self
        return replace(self, dims=latent_dims if self.values_in_keys else dims)


class Problem(NamedTuple):
    q: np.ndarray  # [T, N, H], rounded to the tested dtype, held as float32
    k_pages: np.ndarray  # [P, page_size, K, H] what the pool's elements stand for, float32
    v_pages: np.ndarray  # [P, page_size, K, Hv]
    cu_q_lens: np.ndarray
    kv_lens: np.ndarray
    page_table: np.ndarray
    slot_mapping: np.ndarray
    num_seqs: int
    num_decode: int
    sinks: np.ndarray | None
    tree_mask: np.ndarray | None
    k_codes: np.ndarray  # the pool's elements, in its dtype
    v_codes: np.ndarray
    k_scale: np.ndarray | None  # f32 [K] of a quantised pool, or [P, page_size, K]
    v_scale: np.ndarray | None  # None also where values lie in keys
    kv_limits: np.ndarray | None


def build(case: Case, dtype: str, family: str) -> Problem:
    """The same arrays on every call: the seed is the case's own content."""
    rng = np.random.default_rng(abs(hash((case.q_lens, case.kv_lens, case.heads, case.dims))) % 2**32)
    num_seqs, page_size = len(case.q_lens), case.page_size
    page_table, num_pages = _page_table(case, rng)
    cu_q_lens = np.full(case.max_seqs + 1, GARBAGE, np.int32)
    cu_q_lens[: num_seqs + 1] = np.cumsum((0, *case.q_lens))
    kv_lens = np.full(case.max_seqs, GARBAGE, np.int32)
    kv_lens[:num_seqs] = case.kv_lens
    slot_mapping = np.full(case.num_tokens, -1, np.int32)
    seen = np.zeros((num_pages, page_size), bool)
    needle = np.zeros((num_pages, page_size), bool)
    age = np.zeros((num_pages, page_size))
    for seq, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        positions = np.arange(kv_len)
        pages, offsets = page_table[seq, positions // page_size], positions % page_size
        new = slice(kv_len - q_len, kv_len)
        slot_mapping[cu_q_lens[seq] : cu_q_lens[seq + 1]] = pages[new] * page_size + offsets[new]
        if q_len:
            first = 0 if case.window is None else max(kv_len - q_len + 1 - case.window, 0)
            if case.chunk is not None:
                first = max((kv_len - q_len) // case.chunk - case.lookback, 0) * case.chunk
            seen[pages[first:], offsets[first:]] = True
        needle[pages, offsets] |= np.isin(positions, _boundaries(case, q_len, kv_len))
        age[pages, offsets] = positions
    num_q_heads, num_kv_heads = case.heads
    q = rng.standard_normal((case.num_tokens, num_q_heads, case.dims[0]))
    k_pages = rng.standard_normal((num_pages, page_size, num_kv_heads, case.dims[0]))
    v_pages = rng.standard_normal((num_pages, page_size, num_kv_heads, case.dims[1]))
    if family == "sharp":
        q = q * 3
    elif family == "uniform":  # the output is the mean of the visible values, which tell their position
        q, v_pages = q * 0, v_pages * 0.1 + 1 + age[..., None, None] % 37
    elif family == "needle":  # keys just inside and just outside of what is visible outweigh all others
        direction = np.sign(rng.standard_normal(case.dims[0]))
        if case.values_in_keys:  # what makes a key a needle is not its value
            direction[: case.dims[1]] = 0
            direction *= (case.dims[0] / (case.dims[0] - case.dims[1])) ** 0.5
        q = np.broadcast_to(direction, q.shape) * 2 / (case.spec.sm_scale * case.dims[0]) ** 0.5
        k_pages = k_pages * 0.1 + needle[..., None, None] * direction * 4 / (case.spec.sm_scale * case.dims[0]) ** 0.5
    if case.values_in_keys:
        k_pages[..., : case.dims[1]] = v_pages * case.value_scale
    k_pages, v_pages = (np.where(seen[..., None, None], x, case.unseen) for x in (k_pages, v_pages * case.value_scale))
    kv_dtype = case.pool_dtype(dtype)
    k_scale = v_scale = None
    if kv_dtype in pools.QUANTIZED:
        # A different scale per head, or per token and head, and another for its values than for its keys.
        by_head = np.arange(1, num_kv_heads + 1, dtype=np.float32) / (24 if kv_dtype == "int8" else 2)
        k_scale, v_scale = by_head * np.float32(case.scales[0]), by_head[::-1] * np.float32(case.scales[1])
        q, k_pages, v_pages = q / case.scales[0], k_pages * case.scales[0], v_pages * case.scales[1]
        if kv_dtype in pools.PER_TOKEN:
            k_scale, v_scale = (pools.token_scale(pages, kv_dtype) for pages in (k_pages, v_pages))
    k_codes = pools.codes(k_pages, kv_dtype, k_scale)
    if case.values_in_keys:
        v_codes, v_scale = k_codes[..., : case.dims[1]], k_scale
    else:
        v_codes = pools.codes(v_pages, kv_dtype, v_scale)
    num_decode = next((i for i, q_len in enumerate(case.q_lens) if q_len != 1), num_seqs)
    return Problem(
        rounded(q * case.query_scale, dtype),
        pools.values_of(k_codes, k_scale),
        pools.values_of(v_codes, v_scale),
        cu_q_lens,
        kv_lens,
        page_table,
        slot_mapping,
        num_seqs,
        num_decode,
        _sinks(case, rng),
        _tree_mask(case, cu_q_lens),
        k_codes,
        v_codes,
        k_scale,
        None if case.values_in_keys else v_scale,
        _kv_limits(case, cu_q_lens),
    )


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """Values as the dtype holds them, in float32."""
    return np.asarray(array, jnp.dtype(dtype)).astype(np.float32)


def expected(case: Case, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """What the oracle says: o [T, N, Hv], lse [T, N]."""
    return reference.ragged_paged_attention(
        *problem[:6],
        problem.num_seqs,
        sm_scale=case.spec.sm_scale,
        causal=case.causal,
        window=case.window,
        chunk=case.chunk,
        lookback=case.lookback,
        soft_cap=case.soft_cap,
        sinks=problem.sinks,
        slopes=slopes_of(case.spec),
        biases=biases_of(case.spec, problem.q.shape[0]),
        tree_mask=problem.tree_mask,
        kv_limits=problem.kv_limits,
        mutual=case.mutual,
    )


def slopes_of(spec: AttentionSpec) -> np.ndarray | None:
    """f32[N]: slopes of the heads, all different."""
    heads = np.arange(spec.num_q_heads, dtype=np.float32)
    return 2.0 ** (-1 - 6 * heads / spec.num_q_heads) if spec.has_slopes else None


def biases_of(spec: AttentionSpec, num_tokens: int) -> np.ndarray | None:
    """f32[T, N, E]: biases of each token and head by distance, of few digits, so that every dtype holds them."""
    shape = num_tokens, spec.num_q_heads, spec.bias_extent
    return np.random.default_rng(7).integers(-24, 24, shape).astype(np.float32) / 8 if spec.bias_extent else None


def _page_table(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    counts = [-(-kv_len // case.page_size) for kv_len in case.kv_lens]
    num_pages = case.pool_pages or case.max_seqs * case.max_pages // 2 + 8
    free = iter(rng.permutation(num_pages))
    table = np.full((case.max_seqs, case.max_pages), case.past_end, np.int32)
    shared = [next(free) for _ in range(case.shared_pages)]
    for seq, count in enumerate(counts):
        table[seq, :count] = (shared + [next(free) for _ in range(max(count - len(shared), 0))])[:count]
    table[len(counts) :] = GARBAGE
    return table, num_pages


def _boundaries(case: Case, q_len: int, kv_len: int) -> list[int]:
    """Positions at the edges of what the first, a middle and the last new token see, and one beyond each edge."""
    edges = []
    for position in (kv_len - q_len, kv_len - q_len // 2 - 1, kv_len - 1):
        edges += [0, position, position + 1]
        if case.window is not None:
            edges += [position - case.window, position - case.window + 1]
        if case.chunk is not None:
            edges += [(position // case.chunk - case.lookback) * case.chunk - n for n in (0, 1)]
        edges += [end - n for seq, _, end in case.pictures for n in (0, 1) if case.kv_lens[seq] == kv_len]
    return edges


def _sinks(case: Case, rng: np.random.Generator) -> np.ndarray | None:
    num_heads = case.heads[0]
    table = {
        "zero": np.zeros(num_heads),
        "large": np.full(num_heads, 20.0),
        "absent": np.full(num_heads, -np.inf),
        "mixed": rng.standard_normal(num_heads) * 3,
    }
    return None if case.sinks is None else table[case.sinks].astype(np.float32)


def _tree_mask(case: Case, cu_q_lens: np.ndarray) -> np.ndarray | None:
    """A chain, or a tree in which new token i hangs under token (i - 1) // 2 of its sequence."""
    if case.tree is None:
        return None
    mask = np.zeros((case.num_tokens, -(-max(case.q_lens) // 32)), np.uint32)
    for seq, q_len in enumerate(case.q_lens):
        for index in range(q_len):
            node = index
            while node >= 0:
                mask[cu_q_lens[seq] + index, node // 32] |= np.uint32(1 << node % 32)
                node = node - 1 if case.tree == "chain" else (node - 1) // 2 if node else -1
    return mask


def _kv_limits(case: Case, cu_q_lens: np.ndarray) -> np.ndarray | None:
    """The end of its picture, or any after its sequence, for each token in one, 0 for others; garbage in padding."""
    if not case.pictures:
        return None
    limits = np.full(case.num_tokens, GARBAGE, np.int32)
    limits[: sum(case.q_lens)] = 0
    for seq, first, end in case.pictures:
        num_computed = case.kv_lens[seq] - case.q_lens[seq]
        tokens = cu_q_lens[seq] + np.arange(max(first - num_computed, 0), min(end, case.kv_lens[seq]) - num_computed)
        limits[tokens] = case.kv_lens[seq] + 1 if case.mutual else end
    return limits
