"""The attention cases that are measured, the bytes and operations that each needs, and the row of a measured one.
Knows no implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

# A chain reads at least this much, more than any cache holds, over at most MAX_LAYERS layers.
CHAIN_BYTES = 1 << 30
MAX_LAYERS = 32
POOL_LIMIT = 48 << 30
_SIZES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class AttentionCase:
    """`num_seqs` sequences of `kv_len` keys each; the last `q_len` positions of each are queried, causally.

    Attributes:
      num_q_heads, num_kv_heads, head_dim: query heads, KV heads, and their width.
      page_size: tokens of a page.
      kv_dtype: of the pool.
      dtype: of queries, and of keys and values that are written.
      ragged: (q_len, kv_len) of each sequence if they differ; q_len and kv_len are then the largest.
      bucket: tokens, sequences and pages of a sequence for which the step has room; None for what the case needs.
      writes: each layer writes the keys and values of its queries first, as a model step does.
      label: its name, if the sizes do not suffice as one.
    """

    num_seqs: int
    q_len: int
    kv_len: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    kv_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    ragged: tuple[tuple[int, int], ...] = ()
    bucket: tuple[int, int, int] | None = None
    writes: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        """Name of the case's row: its label, or its sizes."""
        if self.label:
            return f"{self.label} {self.kv_dtype}"
        chunk = f"last {self.q_len} of " if 1 < self.q_len < self.kv_len else ""
        what = f"{'decode' if self.q_len == 1 else 'prefill'} {self.num_seqs}x{chunk}{self.kv_len}"
        return f"{what} heads {self.num_q_heads}/{self.num_kv_heads} page {self.page_size} {self.kv_dtype}"

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(q_len, kv_len) of each sequence."""
        return self.ragged or ((self.q_len, self.kv_len),) * self.num_seqs

    @property
    def room(self) -> tuple[int, int, int]:
        """Tokens, sequences and pages of a sequence for which a step has room."""
        return self.bucket or (self.num_tokens, self.num_seqs, -(-self.kv_len // self.page_size))

    @property
    def num_tokens(self) -> int:
        """Number of queries of all sequences."""
        return sum(q_len for q_len, _ in self.lengths)

    @property
    def num_pages(self) -> int:
        """Number of pages that hold the keys of all sequences."""
        return sum(-(-kv_len // self.page_size) for _, kv_len in self.lengths)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values, each read once."""
        keys = sum(kv_len for _, kv_len in self.lengths)
        return 2 * keys * self.num_kv_heads * self.head_dim * _SIZES.get(self.kv_dtype, 1)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, and of queries and outputs."""
        return self.kv_bytes + 2 * _SIZES[self.dtype] * self.num_tokens * self.num_q_heads * self.head_dim

    @property
    def flops(self) -> int:
        """Operations of the two matrix products, over visible pairs of query and key only."""
        pairs = sum(q_len * kv_len - q_len * (q_len - 1) // 2 for q_len, kv_len in self.lengths)
        return 4 * pairs * self.num_q_heads * self.head_dim


def decode_cases(tiny: bool = False) -> list[AttentionCase]:
    """Return cases of one query per sequence, the most informative first, because a run may be cut short.

    tiny: return two small cases, for a test.
    """
    if tiny:
        first = AttentionCase(2, 1, 40, num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
        return [first, replace(first, num_seqs=1, kv_dtype="float8_e4m3fn")]
    sizes = [(64, 4096), (1, 32768), (256, 1024), (8, 32768), (1, 4096), (1, 131072), (256, 4096), (16, 8192)]
    sizes += [(64, 1024), (1, 1024), (8, 131072), (64, 16384), (16, 1024), (16, 131072), (256, 16384)]
    base = [AttentionCase(num_seqs, 1, kv_len) for num_seqs, kv_len in sizes]
    telling = [base[0], base[1], base[3]]
    varied = [replace(case, **change) for change in _variants() for case in telling]
    return base[:6] + varied + base[6:]


def prefill_cases(tiny: bool = False) -> list[AttentionCase]:
    """Return cases of whole prompts, the last one of a chunk of a prompt. tiny: return one small case, for a test."""
    if tiny:
        return [AttentionCase(1, 24, 24, num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16)]
    lengths = (8192, 2048, 32768, 1024, 4096, 16384)
    base = [AttentionCase(1, length, length) for length in lengths]
    varied = [replace(base[0], **change) for change in _variants()]
    return base[:2] + varied + base[2:] + [AttentionCase(4, 2048, 2048), AttentionCase(1, 2048, 32768)]


def all_cases(tiny: bool = False) -> list[AttentionCase]:
    """Return decode and prefill cases alternately, then the rest of the longer list. tiny: small cases, for a test."""
    pairs = zip_longest(decode_cases(tiny), prefill_cases(tiny))
    return [case for pair in pairs for case in pair if case is not None]


def _variants() -> list[dict]:
    """Return the changes of a case's fields with which informative cases are measured as well, one field each: dtype of
    the cache, query heads, or page size.
    """
    return [{"kv_dtype": "float8_e4m3fn"}, {"num_q_heads": 64}, {"page_size": 16}, {"page_size": 128}]


def step_cases(kv_dtype: str = "float32") -> list[AttentionCase]:
    """Return cases of the layers of a small model's steps in float32, with the heads and buckets of SmolLM2 135M on a
    CPU.

    kv_dtype: of the pool.
    """
    found = []

    def add(label: str, bucket: tuple[int, int, int], *lengths: tuple[int, int]) -> None:
        q_len, kv_len = (max(each) for each in zip(*lengths, strict=True))
        sizes: dict[str, Any] = {"num_q_heads": 9, "num_kv_heads": 3, "head_dim": 64, "page_size": 16}
        case = AttentionCase(len(lengths), q_len, kv_len, **sizes, kv_dtype=kv_dtype, dtype="float32", ragged=lengths)
        found.append(replace(case, bucket=bucket, writes=True, label=label))

    add("decode S=1 kv=200", (1, 1, 512), (1, 200))
    add("decode S=1 kv=2000", (1, 1, 512), (1, 2000))
    add("decode S=16 kv=1050", (16, 16, 512), *[(1, 1050)] * 16)
    add("decode S=32 kv=300..600", (32, 32, 512), *((1, 300 + 300 * index // 31) for index in range(32)))
    add("decode S=32 kv=600, W=64", (32, 32, 64), *[(1, 600)] * 32)
    add("decode 4 of S=32 kv=400", (32, 32, 512), *[(1, 400)] * 4)
    add("prefill 64", (64, 1, 512), (64, 64))
    add("prefill 512", (512, 1, 512), (512, 512))
    add("prefill 512 S=32", (512, 32, 512), (512, 512))
    add("prefill 16 x 32", (512, 32, 512), *[(32, 32)] * 16)
    add("chunk 512 at 1024", (512, 32, 512), (512, 1536))
    add("mixed 16 decodes + 400", (512, 32, 512), *[(1, 450)] * 16, (400, 400))
    add("verify S=16 q=4 kv=500", (64, 16, 512), *[(4, 500)] * 16)
    return found


class Timed(NamedTuple):
    """Times of a measurement.

    Attributes:
      seconds: of one layer.
      compile_s: seconds of compiling the chain of layers; None if they were not measured.
    """

    seconds: float
    compile_s: float | None = None


def shares(case: AttentionCase, timed: Timed, limits: dict[str, float | None]) -> dict[str, Any]:
    """Return the row of a case: "us" of one layer, "GB_per_s", "TFLOP_per_s", and percentages of the limits.

    limits: "bytes_per_s" of a copy and "flops_per_s" of a matmul; a limit that is None or missing has no percentage.
    The row has "compile_s" if it was measured. Numbers are rounded.
    """
    rates = {"bytes_per_s": case.bytes / timed.seconds, "flops_per_s": case.flops / timed.seconds}
    row: dict[str, Any] = {"us": round(timed.seconds * 1e6, 1), "GB_per_s": round(rates["bytes_per_s"] / 1e9, 1)}
    row["TFLOP_per_s"] = round(rates["flops_per_s"] / 1e12, 3)
    for name, kind in (("bytes_per_s", "copy"), ("flops_per_s", "matmul")):
        if limit := limits.get(name):
            row[f"percent_of_{kind}"] = round(100 * rates[name] / limit, 1)
    return row if timed.compile_s is None else {**row, "compile_s": round(timed.compile_s, 2)}
