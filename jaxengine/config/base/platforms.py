"""Default options of each kind of device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxengine.models.kernel_rows import PLATFORMS as KERNELS


@dataclass(frozen=True)
class Platform:
    """Default options of a kind of device.

    Attributes:
      name: its kernels, a platform of jaxengine.pallas_kernels.registry.
      dtype, max_num_seqs, max_num_batched_tokens: defaults of the options of these names.
      page_size: tokens of a page, default of block_size.
      memory_utilization: share of the device's memory, default of gpu_memory_utilization.
      seq_tokens: tokens per request (of max_num_seqs) for which the KV pool is sized if no memory option is given; None
        to fill the share of the device's memory.
      keeps_tables: with `quantization` gguf, keep token tables quantised. TPU kernels read a matrix with the codes of
        an input side by side; a token table has the codes of a token side by side and would be transposed in every
        step.
      decode_sizes, prefill_sizes: steps to compile, by sequences and by tokens; sizes beyond the limits are ignored.
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

    def seqs_of(self, is_causal: bool, max_num_batched_tokens: int) -> int:
        """Return the default of max_num_seqs for a model: the platform's, but at most max_num_batched_tokens, as each
        sequence takes at least one token of a step.

        is_causal: whether its tokens attend only to earlier ones. If not, the default is an eighth of
        max_num_batched_tokens if that is more than the platform's. An encoder computes a whole text in one step: with a
        lower limit of texts, short ones would leave steps half empty.
        """
        usual = self.max_num_seqs if is_causal else max(self.max_num_seqs, max_num_batched_tokens // 8)
        return min(usual, max_num_batched_tokens)


_DOUBLING = tuple(2**exponent for exponent in range(18))
# Just above max_num_seqs, the size of full steps, doubling pads too much (`python -m benchmarks padding`).
_DECODES = (1, *_DOUBLING[3:])
_CHUNKS = (128, *range(192, 769, 64), 1024, 1536, 2048, 3072, 4096, 6144, *_DOUBLING[13:])
_BACKENDS = {
    # A CPU shares its memory with everything else and compiles slowly; two sequences cost it as much as four.
    "cpu": Platform("", "float32", 16, 32, 512, 0.5, 512, (1, *_DOUBLING[2:]), (384, *_DOUBLING[5:])),
    "cuda": Platform("", "bfloat16", 64, 256, 8192, 0.92, None, _DECODES, _CHUNKS),
    "tpu": Platform("", "bfloat16", 128, 256, 2048, 0.92, None, _DECODES, _CHUNKS, keeps_tables=False),
}
# Default options for each platform of kernels, taken from its backend.
PLATFORMS = {name: replace(_BACKENDS[row.backend], name=name) for name, row in KERNELS.items()}
