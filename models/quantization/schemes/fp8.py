"""Checkpoints of e4m3 weights whose quantization_config says "fp8" (DeepSeek, Qwen3-FP8, Ministral) or "fbgemm_fp8"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxengine.models.quantization.base.rules import LINEAR, Quantization, bad, block_size, names_in, one_of
from jaxengine.models.quantization.base.stored import Activation, Stored
from jaxengine.models.quantization.schemes.eight_bits import BLOCK, CHANNEL, TENSOR, EightBits
from jaxengine.models.quantization.schemes.mxfp4 import Mxfp4
from jaxengine.pallas_kernels.matmul.rounding import FLOAT32, UE8M0

METHOD, FBGEMM = "fp8", "fbgemm_fp8"
_E4M3 = "float8_e4m3fn"
_LARGEST_F32 = float(np.finfo(np.float32).max)


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the Quantization that fp8 settings describe. Raises ModelConfigError for unsupported ones.

    Matrices are e4m3 with a scale per block, or per tensor without weight_block_size, and rows are rounded to e4m3,
    with scales of a row or of a block's columns, powers of two if scale_fmt is "ue8m0", or with the checkpoint's one
    scale if activation_scheme is "static". Experts are MXFP4 if expert_dtype is fp4. Tables of n-grams have a scale for
    every 32 elements of a row. Modules in modules_to_not_convert and ignored_layers are plain.
    """
    one_of(settings, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = block_size(settings, "weight_block_size")
    static = one_of(settings, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    if block is not None and static:
        raise bad("activation_scheme", "static", "'dynamic' beside weight_block_size")
    scales = UE8M0 if one_of(settings, "scale_fmt", ("float", "ue8m0"), "float") == "ue8m0" else FLOAT32
    if scales == UE8M0 and static:
        raise bad("scale_fmt", "ue8m0", "absent beside static scales")
    activation = Activation(_E4M3, group=None if block is None else block[1], static=static, scales=scales)
    stored = EightBits(METHOD, _E4M3, TENSOR if block is None else BLOCK, activation, block)
    listed = names_in(settings, "modules_to_not_convert") + names_in(settings, "ignored_layers")
    rules: tuple[tuple[tuple[str, ...], Stored], ...] = (((LINEAR,), stored),)
    if one_of(settings, "expert_dtype", ("fp8", "fp4"), "fp8") == "fp4":  # DeepSeek-V4's
        experts = Mxfp4("mxfp4 (experts)", "weight", "weight_scale_inv", ("int8", "float8_e8m0fnu"))
        rules = ((("re:.*[.]experts[.]",), experts), *rules)
    rows = EightBits(METHOD, _E4M3, BLOCK, None, (1, 32))  # DeepSeek-V4.1's, whatever weight_block_size
    rules = ((("re:.*[.]engram[.]embed$",), rows), *rules)
    return Quantization(METHOD, rules, listed=listed)


def read_fbgemm(settings: Mapping[str, Any]) -> Quantization:
    """Return the Quantization that fbgemm_fp8 settings describe. Raises ModelConfigError for unsupported ones.

    Matrices are e4m3 with a scale per channel, except those in modules_to_not_convert. Rows are rounded to e4m3 with a
    scale from their largest value, which counts as activation_scale_ub (default: 1200) at most.
    """
    bound = settings.get("activation_scale_ub", 1200.0)
    if type(bound) not in (int, float) or not 0 < bound <= _LARGEST_F32:
        raise bad("activation_scale_ub", bound, "a finite number > 0 of float32")
    stored = EightBits(FBGEMM, _E4M3, CHANNEL, Activation(_E4M3, bound=float(bound)))
    return Quantization(FBGEMM, (((LINEAR,), stored),), listed=names_in(settings, "modules_to_not_convert"))
