"""Estimated cycles of our TPU attention and of jax's own, and the roofline, by shape; needs libtpu, not a TPU.

A kernel is profiled bare (tpu_profile): no copies, a fixed number of key blocks. The difference between 9 and 1 blocks,
over 8, is what one block costs. "block" is that for one sequence (decode) or 128 tokens (prefill) and 1024 keys, with
all heads: the same work for both kernels. "shape" multiplies by the blocks a kernel walks for the whole shape (ours
stops at the causal edge, jax's walks every block) and adds what opening and closing a tile costs ours. jax's kernel
gets whichever of its block sizes is fastest, and heads padded to what it accepts; it has none for latent attention.
v5p: cycles of one core; our kernel uses both, jax's one, which the microseconds take into account. Roofline: the larger
of bytes / bandwidth and flops / peak.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from importlib.metadata import version
from math import nan
from typing import Any, NamedTuple

from benchmarks.harness import shared
from benchmarks.recorder import Recorder
from benchmarks.tpu.tpu_profile import profile
from jaxengine.check.targets import TARGETS
from jaxengine.results import machine

PAGE_SIZE = 128
CASES = "benchmarks.tpu.tpu_attention_cases"
THEIR_BLOCK_PAGES = 8
THEIR_BLOCK_Q = {True: (8, 32), False: (32, 128)}  # decode, prefill
CLOCK_HZ = 1.75e9  # v6e and v5p: peak flops over what their matrix units do a cycle
CORES = {"v5p": 2}
BYTES = 2  # bfloat16


class Shape(NamedTuple):
    """Sizes of one attention: `num_seqs` sequences of `kv_len` keys, whose last `q_len` positions are queried."""

    name: str
    num_seqs: int
    q_len: int
    kv_len: int
    heads: tuple[int, int]  # N, K
    head_dim: int
    in_keys: int | None = None  # of a latent: its first elements are the values

    @property
    def decode(self) -> bool:
        """Whether each sequence has one query."""
        return self.q_len == 1

    @property
    def v_head_dim(self) -> int:
        """Elements of a value: in_keys of a latent, otherwise head_dim."""
        return self.in_keys or self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements that the cache holds for each token and KV head."""
        return self.head_dim + (0 if self.in_keys else self.head_dim)


LLAMA, ONE_OF_8, SMOLLM = ((32, 8), 128), ((4, 1), 128), ((9, 3), 64)
LATENT = 576, 512  # of DeepSeek-V2, V3 and Kimi K2
SHAPES = (
    Shape("decode, 64 x 1024, 32/8 heads", 64, 1, 1024, *LLAMA),
    Shape("decode, 64 x 4096, 32/8 heads", 64, 1, 4096, *LLAMA),
    Shape("decode, 8 x 32768, 32/8 heads", 8, 1, 32768, *LLAMA),
    Shape("decode, 256 x 1024, 32/8 heads", 256, 1, 1024, *LLAMA),
    Shape("decode, 64 x 2048, 4/1 heads", 64, 1, 2048, *ONE_OF_8),
    Shape("decode, 64 x 1024, 9/3 heads of 64", 64, 1, 1024, *SMOLLM),
    Shape("prefill, 1024, 32/8 heads", 1, 1024, 1024, *LLAMA),
    Shape("prefill, 2048, 32/8 heads", 1, 2048, 2048, *LLAMA),
    Shape("prefill, last 2048 of 8192, 32/8 heads", 1, 2048, 8192, *LLAMA),
    Shape("prefill, last 512 of 4096, 32/8 heads", 1, 512, 4096, *LLAMA),
    Shape("prefill, 2048, 4/1 heads", 1, 2048, 2048, *ONE_OF_8),
    Shape("prefill, 2048, 9/3 heads of 64", 1, 2048, 2048, *SMOLLM),
    Shape("decode, 64 x 4096, latent, 16 heads", 64, 1, 4096, (16, 1), *LATENT),
    Shape("decode, 64 x 4096, latent, 64 heads", 64, 1, 4096, (64, 1), *LATENT),
    Shape("decode, 64 x 4096, latent, 128 heads", 64, 1, 4096, (128, 1), *LATENT),
    Shape("prefill, last 512 of 4096, latent, 16 heads", 1, 512, 4096, (16, 1), *LATENT),
    Shape("prefill, last 512 of 4096, latent, 128 heads", 1, 512, 4096, (128, 1), *LATENT),
)


class Unprofiled(RuntimeError):
    """Error of libtpu compiling a kernel without an estimate of its cycles."""


class Cost(NamedTuple):
    """Estimated cycles of one core, for a block of keys and for a whole shape."""

    block: float  # one block of keys and one tile of queries, of the kernel's sizes
    normal_block: float  # scaled to 1024 keys and 1 (decode) or 128 (prefill) tokens
    shape: float


@functools.cache
def cycles(target: str, build: str, trips: int, **arguments) -> tuple[int, dict]:
    """Return (estimated cycles of one grid step, facts that the case reports about itself, which must not be changed,
    as results are cached).

    target: TPU. build: name of a function in the module CASES. trips: blocks. arguments: of that function. Raises
    Unprofiled.
    """
    result = profile(f"{CASES}:{build}", TARGETS[target].topology, trips=trips, page_size=PAGE_SIZE, **arguments)
    if result.cycles is None:
        raise Unprofiled(f"libtpu cannot profile {build} {arguments} on {target}")
    return result.cycles, result.facts


def per_trip(target: str, build: str, **arguments) -> tuple[float, dict]:
    """Return (cycles of one block, facts of the case): the excess of 9 blocks over 1 block, divided by 8.

    target: TPU. build: name of a function in the module CASES. arguments: of that function. Raises Unprofiled.
    """
    (many, facts), (one, _) = (cycles(target, build, trips, **arguments) for trips in (9, 1))
    return (many - one) / 8, facts


def our_cost(shape: Shape, target: str) -> Cost:
    """Return the cost of our kernel, which stops at the causal edge, from those of a block with a mask, for prefills
    one that all rows see, and of opening and closing a tile. Raises Unprofiled.
    """
    # Block sizes depend on the number of tokens and, for short tables, of pages. Equal sizes share one profile.
    arguments = {"heads": shape.heads, "head_dim": shape.head_dim, "in_keys": shape.in_keys, "decode": shape.decode}
    arguments |= {"max_pages": 32, "num_tokens": 64 if shape.decode else max(shape.q_len, 1024)}
    edge, facts = per_trip(target, "ours", part="edge", **arguments)
    tile = (
        cycles(target, "ours", 1, part="tile", **arguments)[0] - cycles(target, "ours", 1, part="edge", **arguments)[0]
    )
    block_q, block_kv = facts["block_q"], facts["block_kv"]
    if shape.decode:
        total = shape.num_seqs * (-(-shape.kv_len // block_kv) * edge + tile)
        return Cost(edge, edge * 1024 / block_kv, total)
    whole, _ = per_trip(target, "ours", part="block", **arguments)
    total = 0.0
    for first in range(0, shape.q_len, block_q):
        position = shape.kv_len - shape.q_len + first
        blocks = -(-min(position + block_q, shape.kv_len) // block_kv)
        num_whole = (position + 1) // block_kv
        total += num_whole * whole + (blocks - num_whole) * edge + tile
    return Cost(whole, whole * 1024 / block_kv * 128 / block_q, total * shape.num_seqs)


def their_cost(shape: Shape, target: str) -> Cost:
    """Return the cost of jax's kernel with whichever of its block sizes is fastest.

    All figures are NaN if libtpu can profile none of them, and for latents. Instead of SmolLM's heads, which that
    kernel does not tile, it gets 12 query and 4 KV heads of 128.
    """
    heads, head_dim = shape.heads, shape.head_dim
    if heads == SMOLLM[0]:  # it tiles 1, 2, 4 or a multiple of 8 kv heads, of 128 lanes
        heads, head_dim = (12, 4), 128
    costs = []
    for block_q in () if shape.in_keys else THEIR_BLOCK_Q[shape.decode]:
        arguments = {"heads": heads, "head_dim": head_dim, "max_pages": 16, "block_q": block_q}
        try:
            block, _ = per_trip(target, "theirs", block_pages=THEIR_BLOCK_PAGES, **arguments)
        except Unprofiled:
            continue
        block_kv = THEIR_BLOCK_PAGES * PAGE_SIZE
        walks = shape.num_seqs * (1 if shape.decode else -(-shape.q_len // block_q))
        normal = block * 1024 / block_kv * (1 if shape.decode else 128 / block_q)
        costs.append(Cost(block, normal, block * walks * -(-shape.kv_len // block_kv)))
    return min(costs, key=lambda cost: cost.shape, default=Cost(nan, nan, nan))


def roofline_us(shape: Shape, target: str) -> float:
    """Return the least microseconds of a shape on a TPU: the longer of its bytes at full bandwidth and its operations
    at peak.
    """
    num_q_heads, num_kv_heads = shape.heads
    tokens = shape.num_seqs * shape.q_len
    seen = tokens * (shape.kv_len - (shape.q_len - 1) / 2)  # query-key pairs
    both = shape.head_dim + shape.v_head_dim
    kv_bytes = shape.num_seqs * shape.kv_len * num_kv_heads * shape.kv_width * BYTES
    query_bytes = tokens * num_q_heads * both * BYTES
    flops = 2 * seen * num_q_heads * both
    chip = TARGETS[target]
    return 1e6 * max((kv_bytes + query_bytes) / chip.hbm_bandwidth, flops / chip.flops)


def measure(shape: Shape, target: str) -> dict[str, Any]:
    """Return a row: cycles of a block and of the shape, and microseconds; None for figures that libtpu cannot estimate.

    Raises Unprofiled if it cannot estimate our kernel. Numbers are rounded.
    """
    ours, theirs = our_cost(shape, target), their_cost(shape, target)
    figures = {
        "our_block": ours.normal_block,
        "their_block": theirs.normal_block,
        "block_ratio": ours.normal_block / theirs.normal_block,
        "our_shape": ours.shape,
        "their_shape": theirs.shape,
        "shape_ratio": ours.shape / theirs.shape,
        "our_us": ours.shape / CLOCK_HZ / CORES.get(target, 1) * 1e6,
        "their_us": theirs.shape / CLOCK_HZ * 1e6,
        "roofline_us": roofline_us(shape, target),
    }
    known = {name: None if value != value else round(value, 2) for name, value in figures.items()}
    return {"shape": shape.name, "target": target, **known}


OPTIONS = shared(targets=("v6e", "v5p"), only="")


def run(args: Namespace, recorder: Recorder) -> None:
    recorder.describe = lambda: {**machine(), "libtpu": version("libtpu")}
    recorder.notes["page_size"] = PAGE_SIZE
    for target in args.targets:
        for shape in SHAPES:
            if args.only in shape.name:
                recorder.add(measure(shape, target))
