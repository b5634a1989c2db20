"""Checkpoints whose quantization_config says "awq" or "gptq"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config.fields import ModelConfigError
from models.quantization.rules import LINEAR, Quantization, group_size, names_in, one_of, refuse
from models.quantization.words import AwqGemm, Gptq

AWQ, GPTQ = "awq", "gptq"


def read_awq(settings: Mapping[str, Any]) -> Quantization:
    """Raises ModelConfigError for what is not read."""
    one_of(settings, "version", ("gemm", "GEMM"), "gemm")
    bits = one_of(settings, "bits" if settings.get("w_bit") is None else "w_bit", (4,))
    group = group_size(settings, "group_size" if settings.get("q_group_size") is None else "q_group_size", 128)
    stored = AwqGemm(AWQ, bits, group, one_of(settings, "zero_point", (True, False), True))
    return Quantization(AWQ, (((LINEAR,), stored),), listed=names_in(settings, "modules_to_not_convert"))


def read_gptq(settings: Mapping[str, Any]) -> Quantization:
    """Raises ModelConfigError for what is not read."""
    refuse(settings, "dynamic")
    bits, sym = one_of(settings, "bits", (2, 3, 4, 8)), one_of(settings, "sym", (True, False), True)
    one_less = one_of(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq"
    if bits == 3 and one_less and not sym:
        raise ModelConfigError(
            "quantization_config: checkpoint_format is 'gptq', of 3 bits with sym false; allowed: 'gptq_v2': writers "
            "do not agree on what zero points of the first version mean"
        )
    stored = Gptq(
        GPTQ,
        bits,
        group_size(settings, default=128),
        not sym,
        one_less=one_less,
        reordered=one_of(settings, "desc_act", (True, False), False),
    )
    heads = one_of(settings, "lm_head", (True, False), False)
    return Quantization(GPTQ, (((LINEAR,), stored),), with_heads=heads)
