"""Attention kernels of an installed tpu-inference, each bare, for `python -m benchmarks tpu_peers`.

This module runs in the child process of `tpu_profile`, in an environment that has tpu-inference but not what it needs
to serve (vLLM and torch): its package is entered without running its `__init__`, and the two of its modules that need
those are replaced. Kernels choose their block sizes themselves.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.tpu.tpu_profile import bare_kernel

PACKAGE = "tpu_inference"
KERNELS = f"{PACKAGE}.kernels.ragged_paged_attention.v3"
NUM_PAGES, NUM_SEQS = 512, 16
# Chips by jax's names, as tpu-inference's tables of block sizes name those that they have.
TABLE_NAMES = {"v5e": "TPU v5e", "v6e": "TPU v6e", "7x": "TPU v7"}


def ragged_paged_attention(
    *,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    max_pages: int,
    num_tokens: int,
    decode: bool,
    blocks_of: int | None = None,
) -> tuple[Callable, Any, dict]:
    """Build the call of ragged paged attention v3 for decodes or for other steps; return (function, operands, facts).

    heads: query heads and KV heads. max_pages: of a sequence. num_tokens: of the step. blocks_of: generation of TPU
    whose block sizes it takes; None for the current chip's. The facts have `block_q` and `block_kv`, the tokens and
    keys of a pass of its loop over blocks, and `trips`, the passes of the inner loop that multiplies. Raises
    ImportError without tpu-inference.
    """
    kernel_util = _enter_package()
    dtype, (num_q_heads, num_kv_heads) = jnp.bfloat16, heads
    kernel: Any = importlib.import_module(f"{KERNELS}.kernel_hd64" if head_dim == 64 else f"{KERNELS}.kernel")
    sizes = (dtype, dtype, num_q_heads, num_kv_heads, head_dim, page_size, num_tokens)
    if head_dim == 64:
        call, name = kernel.ragged_paged_attention_hd64, "RPA-HD_64"
        pages, tokens = kernel.get_tuned_block_sizes(*sizes, max_pages)
        facts = {"block_q": 1 if decode else tokens, "block_kv": pages * page_size, "trips": 1}
    else:
        case = kernel.RpaCase.DECODE if decode else kernel.RpaCase.MIXED
        call, name = kernel.ragged_paged_attention, f"RPA{case.symbol}-"
        with patch.object(kernel, "get_tpu_version", lambda: blocks_of or kernel_util.get_tpu_version()):
            blocks = kernel.get_default_block_sizes(*sizes, NUM_SEQS, max_pages, case=case)
        call = functools.partial(call, **{f"{case.symbol}_block_sizes": tuple(blocks.values())})
        facts = {
            "block_q": blocks["bq_sz"],
            "block_kv": blocks["bkv_sz"],
            "trips": blocks["bkv_sz"] // blocks["bkv_csz"],
        }
    q, k = (jax.ShapeDtypeStruct((num_tokens, count, head_dim), dtype) for count in heads)
    cache = jax.ShapeDtypeStruct(kernel.get_kv_cache_shape(NUM_PAGES, page_size, num_kv_heads, head_dim, dtype), dtype)
    lengths = (NUM_SEQS, NUM_SEQS * max_pages, NUM_SEQS + 1, 3)
    ints = (jax.ShapeDtypeStruct((length,), jnp.int32) for length in lengths)
    attend = functools.partial(call, sm_scale=head_dim**-0.5)
    return *bare_kernel(attend, (q, k, k, cache, *ints), name), facts


def _enter_package() -> Any:
    """Make tpu-inference's kernels importable for the chip of the current mesh; return their module `util`.

    Replaces entries of sys.modules, and the function that says the chip's generation. Raises ImportError if it is not
    installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"{PACKAGE} is not installed")
    package = ModuleType(PACKAGE)
    package.__path__ = list(spec.submodule_search_locations)
    chip: Any = pltpu.get_tpu_info()
    name = str(chip.chip_version.value)
    utils = MagicMock(get_device_name=lambda: TABLE_NAMES.get(name, name))
    sys.modules |= {PACKAGE: package, f"{PACKAGE}.logger": MagicMock(), f"{PACKAGE}.utils": utils}
    vars(pltpu).setdefault("reciprocal", pl.reciprocal)  # jax 0.10 has it in `pl` alone
    util: Any = importlib.import_module(f"{KERNELS}.util")
    util.get_tpu_version = lambda: chip.generation  # the original uses the process's first device
    return util
