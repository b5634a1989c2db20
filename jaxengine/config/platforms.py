"""What each kind of device suggests where the user of an engine says nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Platform:
    """What a kind of device suggests where the user says nothing.

    Attributes:
      name: the kernels it runs, pallas_kernels.registry's word.
      seq_tokens: of each of max_num_seqs requests, for which the KV pool has room when nothing is said of memory; None
        fills the share of the device's memory.
      keeps_tables: with `quantization` gguf, token tables stay quantised. A TPU's kernels read a matrix with the codes
        of an input side by side, and would have the table, which has those of a token so, turned around in every step.
      decode_sizes, prefill_sizes: steps to compile, by sequences and by tokens; those beyond the limits are left out.
    """

    name: str
    dtype: str
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    memory_utilization: float
    seq_tokens: int | None
    decode_sizes: tuple[int, ...]
    prefill_sizes: tuple[int, ...]
    keeps_tables: bool = True


_DOUBLING = tuple(2**exponent for exponent in range(18))
# Where full steps are, just above max_num_seqs, doubling pads too much (`python -m benchmarks padding`).
_DECODES = (1, *_DOUBLING[3:])
_CHUNKS = (128, *range(192, 769, 64), 1024, 1536, 2048, 3072, 4096, 6144, *_DOUBLING[13:])
_GPU = Platform("gpu", "bfloat16", 64, 256, 8192, 0.92, None, _DECODES, _CHUNKS)

PLATFORMS = {
    # A CPU shares its memory with everything else and compiles slowly; two sequences cost it as much as four.
    "cpu": Platform("cpu", "float32", 16, 32, 512, 0.5, 512, (1, *_DOUBLING[2:]), (384, *_DOUBLING[5:])),
    "gpu": _GPU,
    "gpu_xla": replace(_GPU, name="gpu_xla"),
    "tpu": Platform("tpu", "bfloat16", 128, 256, 2048, 0.92, None, _DECODES, _CHUNKS, keeps_tables=False),
}
