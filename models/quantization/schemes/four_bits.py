"""Checkpoints whose quantization_config says "awq" or "gptq"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.quantization.base.rules import (
    HEADS,
    LINEAR,
    Quantization,
    bad,
    check_name,
    given,
    group_size,
    names_in,
    one_of,
    refuse,
)
from jaxengine.models.quantization.base.words import AwqGemm, Gptq

AWQ, GPTQ = "awq", "gptq"


def read_awq(settings: Mapping[str, Any]) -> Quantization:
    """Return the Quantization that AWQ settings describe: all matrices but those that modules_to_not_convert lists are
    in the "gemm" layout of 4 bits, with scales for q_group_size, or else group_size, inputs (default: 128), and zero
    points unless zero_point is false. Raises ModelConfigError for unsupported settings.
    """
    for field in ("version", "format", "checkpoint_format"):  # AutoAWQ's name, and GPTQModel's
        one_of(settings, field, ("gemm", "GEMM"), "gemm")
    if settings.get("backend") == "llm-awq":
        raise bad("backend", "llm-awq", "another one, because this one packs words in another order")
    bits = one_of(settings, "bits" if settings.get("w_bit") is None else "w_bit", (4,))
    group = group_size(settings, "group_size" if settings.get("q_group_size") is None else "q_group_size", 128)
    stored = AwqGemm(AWQ, bits, group, one_of(settings, "zero_point", (True, False), True))
    return Quantization(AWQ, (((LINEAR,), stored),), listed=names_in(settings, "modules_to_not_convert"))


def read_gptq(settings: Mapping[str, Any]) -> Quantization:
    """Return the Quantization that GPTQ settings describe. Raises ModelConfigError for unsupported ones.

    It has the rules of `dynamic`, then one for the modules that modules_in_block_to_quantize names, or for all
    matrices. Modules in modules_to_not_convert are plain, and so are heads unless `lm_head` is true.
    """
    refuse(settings, "is_marlin_format")
    one_of(settings, "pack_dtype", ("int32",), "int32")
    inner = _names_of_blocks(settings)
    rules = *_dynamic_rules(settings), (inner or (LINEAR,), _gptq(settings))
    listed = names_in(settings, "modules_to_not_convert")
    heads = one_of(settings, "lm_head", (True, False), False)
    # A pattern of `dynamic` that also matches heads does not quantise them.
    return Quantization(GPTQ, rules, () if heads else HEADS, listed, with_heads=heads)


def _names_of_blocks(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return patterns of the modules of a layer that are quantised, from modules_in_block_to_quantize; () if all are.

    Raises ModelConfigError for anything but a list of lists of names.
    """
    groups = given(settings, field := "modules_in_block_to_quantize", [])
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise bad(field, groups, "a list of lists of names")
    names = [name for group in groups for name in group]
    for name in names:
        check_name(field, name)
    return tuple(f"re:.*[.]{re.escape(name)}$" for name in names)


def _dynamic_rules(settings: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Gptq | None]]:
    """Return the rules of GPTQModel's `dynamic`: regular expressions of modules with other settings, or, after "-:", of
    plain modules, whose storage format is None. Raises ModelConfigError for unsupported settings.
    """
    changes = given(settings, "dynamic", {})
    if not isinstance(changes, Mapping) or not all(isinstance(change, Mapping) for change in changes.values()):
        raise bad("dynamic", changes, "a mapping of regular expressions to mappings")
    rules: list[tuple[tuple[str, ...], Gptq | None]] = []
    for pattern, change in changes.items():
        check_name("dynamic", name := f"re:{pattern.removeprefix('+:').removeprefix('-:')}")
        rules.append(((name,), None if pattern.startswith("-:") else _gptq({**settings, **change})))
    return rules


def _gptq(settings: Mapping[str, Any]) -> Gptq:
    """Return the storage format of modules with these settings: `bits` 2, 3, 4 or 8, group_size (default: 128), `sym`
    (true) and desc_act (false). Stored zero points are one less than the actual ones unless the format is gptq_v2.
    Raises ModelConfigError for unsupported settings.
    """
    bits, sym = one_of(settings, "bits", (2, 3, 4, 8)), one_of(settings, "sym", (True, False), True)
    versions = [
        one_of(settings, field, ("gptq", "gptq_v2"))
        for field in ("checkpoint_format", "format")
        if settings.get(field) is not None
    ]
    if len({*versions}) > 1:
        raise bad("format", settings["format"], f"{settings['checkpoint_format']!r}, which checkpoint_format is")
    one_less = "gptq_v2" not in versions
    if bits == 3 and one_less and not sym:
        raise ModelConfigError(
            "quantization_config: checkpoint_format is 'gptq', of 3 bits with sym false; allowed: 'gptq_v2': writers "
            "do not agree on what zero points of the first version mean"
        )
    return Gptq(
        GPTQ,
        bits,
        group_size(settings, default=128),
        not sym,
        one_less=one_less,
        reordered=one_of(settings, "desc_act", (True, False), False),
    )
