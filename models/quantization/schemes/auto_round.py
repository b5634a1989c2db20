"""Checkpoints of AutoRound (github.com/intel/auto-round), which packs matrices as GPTQ or AWQ do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

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
from jaxengine.models.quantization.base.stored import Stored
from jaxengine.models.quantization.base.words import AwqGemm, Gptq

METHOD = "auto-round"
_GPTQ, _AWQ = ("auto_round:auto_gptq", "auto_gptq"), ("auto_round:auto_awq", "auto_awq")
_NAME = re.compile(r"[\w.-]+")


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the Quantization that AutoRound's settings describe. Raises ModelConfigError for unsupported ones.

    Modules of extra_config have their own settings. All others in the blocks of block_name_to_quantize, or else of
    to_quant_block_names, a list or a text with commas (all matrices if neither names any), have those of the file.
    Modules in modules_to_not_convert are plain, and so are heads unless extra_config names them.
    """
    act_bits = settings.get("act_bits")
    if act_bits is not None and not (type(act_bits) is int and act_bits >= 16):
        raise bad("act_bits", act_bits, "16 or more: rows as they are")
    refuse(settings, "super_bits", "super_group_size")
    changes = given(settings, "extra_config", {})
    if not isinstance(changes, Mapping) or not all(isinstance(change, Mapping) for change in changes.values()):
        raise bad("extra_config", changes, "a mapping of modules to mappings")
    rules = [(_target(name), _stored({**settings, **change})) for name, change in changes.items()]
    others = given(settings, "block_name_to_quantize", "") in ("", [])
    field = "to_quant_block_names" if others else "block_name_to_quantize"
    said = settings.get(field)
    if isinstance(said, str):
        said = said.split(",") if said else []
    blocks = names_in({field: said}, field)
    rest = tuple(f"re:{re.escape(name.strip())}[.]" for name in blocks) or (LINEAR,)
    named = {name for name, _ in rules}
    return Quantization(
        METHOD,
        (*_joined(rules), (rest, _stored(settings))),
        tuple(head for head in HEADS if not named & {head, head.removeprefix("model.")}),
        names_in(settings, "modules_to_not_convert"),
        with_heads=True,
    )


def _joined(rules: Iterable[tuple[str, Stored | None]]) -> list[tuple[tuple[str, ...], Stored | None]]:
    """Return `rules` with those of plain names that share a storage format merged and moved before rules of patterns,
    which stay in their order.

    A storage format of None stands for plain weights.
    """
    by_stored: dict[Stored | None, list[str]] = {}
    patterns = []
    for name, stored in rules:
        if name.startswith("re:"):
            patterns.append(((name,), stored))
        else:
            by_stored.setdefault(stored, []).append(name)
    return [*((tuple(names), stored) for stored, names in by_stored.items()), *patterns]


def _target(name: Any) -> str:
    """Return the name in rules for a key of `extra_config`: a module's name unchanged, or "re:" and an expression that
    finds the key anywhere in a name. Raises ModelConfigError if the key is neither a name nor a supported expression.
    """
    if isinstance(name, str) and not _NAME.fullmatch(name):
        name = f"re:.*(?:{name})"
    check_name("extra_config", name)
    return name


def _stored(settings: Mapping[str, Any]) -> Stored | None:
    """Return the storage format of a module with these settings: that of GPTQ (by default) or AWQ, as packing_format
    says, with symmetric codes and groups of 128 inputs by default; None for plain weights, of 16 bits or data_type
    float. Raises ModelConfigError for unsupported values, and for 3 bits with zero points.
    """
    bits, kind = settings.get("bits"), settings.get("data_type")
    if (type(bits) is int and bits >= 16) or kind == "float":
        return None
    one_of(settings, "data_type", ("int",), "int")
    packing = one_of(settings, "packing_format", (*_GPTQ, *_AWQ), _GPTQ[0])
    symmetric, group = one_of(settings, "sym", (True, False), True), group_size(settings, default=128)
    if packing in _AWQ:
        return AwqGemm(f"{METHOD} awq", one_of(settings, "bits", (4,)), group, not symmetric)
    bits = one_of(settings, "bits", (2, 3, 4, 8))
    if bits == 3 and not symmetric:
        raise bad("sym", False, "true where bits is 3: writers do not agree on what such zero points mean")
    return Gptq(f"{METHOD} gptq", bits, group, not symmetric)
