"""Which attentions are measured, and what each must at least read and compute. Knows no implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest


@dataclass(frozen=True)
class AttentionCase:
    """`num_seqs` sequences of `kv_len` keys each; the last `q_len` positions of each are queried, causally."""

    num_seqs: int
    q_len: int
    kv_len: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    kv_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        chunk = f"last {self.q_len} of " if 1 < self.q_len < self.kv_len else ""
        what = f"{'decode' if self.q_len == 1 else 'prefill'} {self.num_seqs}x{chunk}{self.kv_len}"
        return f"{what} heads {self.num_q_heads}/{self.num_kv_heads} page {self.page_size} {self.kv_dtype}"

    @property
    def kv_bytes(self) -> int:
        """Keys and values, read once."""
        size = 1 if self.kv_dtype.startswith("float8") else 2
        return 2 * self.num_seqs * self.kv_len * self.num_kv_heads * self.head_dim * size

    @property
    def bytes(self) -> int:
        """Keys and values, and queries and outputs of two bytes."""
        return self.kv_bytes + 2 * 2 * self.num_seqs * self.q_len * self.num_q_heads * self.head_dim

    @property
    def flops(self) -> int:
        """Of the two matrix products, over visible pairs of query and key only."""
        pairs = self.q_len * self.kv_len - self.q_len * (self.q_len - 1) // 2
        return 4 * self.num_seqs * pairs * self.num_q_heads * self.head_dim


def decode_cases(tiny: bool = False) -> list[AttentionCase]:
    """The most telling first: a run may be cut."""
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
    """Whole prompts, and a chunk of one."""
    if tiny:
        return [AttentionCase(1, 24, 24, num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16)]
    lengths = (8192, 2048, 32768, 1024, 4096, 16384)
    base = [AttentionCase(1, length, length) for length in lengths]
    varied = [replace(base[0], **change) for change in _variants()]
    return base[:2] + varied + base[2:] + [AttentionCase(4, 2048, 2048), AttentionCase(1, 2048, 32768)]


def all_cases(tiny: bool = False) -> list[AttentionCase]:
    """Decode and prefill in turn."""
    pairs = zip_longest(decode_cases(tiny), prefill_cases(tiny))
    return [case for pair in pairs for case in pair if case is not None]


def _variants() -> list[dict]:
    return [{"kv_dtype": "float8_e4m3fn"}, {"num_q_heads": 64}, {"page_size": 16}, {"page_size": 128}]
