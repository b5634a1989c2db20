"""Registry of storage schemes, one row each, and the choice of one for all modules of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxengine.models.quantization.base.online import Rounded
from jaxengine.models.quantization.base.plain import Plain
from jaxengine.models.quantization.base.rules import LINEAR, Everywhere, Quantization, bad
from jaxengine.models.quantization.base.scheme import Scheme
from jaxengine.models.quantization.schemes import (
    auto_round,
    bitnet,
    bitsandbytes,
    compressed_tensors,
    four_bits,
    fp8,
    modelopt,
    mxfp4,
    mxfp8,
)

SCHEMES: dict[str, Scheme] = {"plain": Plain()}


PLAIN = Everywhere(SCHEMES["plain"])

# quant_method of a checkpoint's quantization_config -> reader of the rest of it.
METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    auto_round.METHOD: auto_round.read,
    bitnet.METHOD: bitnet.read,
    bitsandbytes.METHOD: bitsandbytes.read,
    compressed_tensors.METHOD: compressed_tensors.read,
    fp8.METHOD: fp8.read,
    fp8.FBGEMM: fp8.read_fbgemm,
    four_bits.AWQ: four_bits.read_awq,
    four_bits.GPTQ: four_bits.read_gptq,
    modelopt.METHOD: modelopt.read,
    "modelopt_fp4": modelopt.read,
    mxfp4.METHOD: mxfp4.read,
    mxfp8.METHOD: mxfp8.read,
}
# Formats to which a plain checkpoint can be rounded as it is read.
ROUNDED: dict[str, Rounded] = {
    "int8": Rounded("int8 (rounded at load)", "int8"),
    "fp8": Rounded("fp8 (rounded at load)", "float8_e4m3fn"),
    "int4": Rounded("int4 (rounded at load)", "int4", group=128),
}
# vLLM's other names for kinds of checkpoints.
ALIASES = {"awq_marlin": "awq", "gptq_marlin": "gptq", "gpt_oss_mxfp4": "mxfp4"}
ALIASES |= dict.fromkeys(("inc", "auto_round"), "auto-round")
ALIASES |= dict.fromkeys(("modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), "modelopt")


def read_quantization(
    settings: Any,
    prefixes: tuple[tuple[str, str], ...] = (),
    suffixes: tuple[tuple[str, str], ...] = (),
    parts: tuple[tuple[str, str], ...] = (),
) -> Quantization | None:
    """Return the Quantization that a checkpoint's quantization_config describes, read by the reader of its
    `quant_method`, in capitals or not; None if `settings` is None.

    prefixes: pairs of a beginning of the checkpoint's names and the model's replacement. suffixes: such pairs for ends
    of the names of its tensors. parts: such pairs for parts of names. Raises ModelConfigError for an unsupported
    configuration.
    """
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    method = method.lower() if isinstance(method, str) else method  # "AWQ" is awq
    if not isinstance(settings, Mapping) or not isinstance(method, str) or method not in METHODS:
        raise bad("quant_method", method, " or ".join(map(repr, METHODS)))
    modules = tuple((old.removesuffix(".weight"), new.removesuffix(".weight")) for old, new in suffixes)
    return replace(METHODS[method](settings), prefixes=prefixes, suffixes=modules, parts=parts)


def rounded(name: str) -> Quantization:
    """Return the Quantization that rounds all matrices except tables, heads and routers at load, to the format `name`
    of ROUNDED. Raises KeyError for another name.
    """
    return Quantization(name, (((LINEAR,), ROUNDED[name]),))
