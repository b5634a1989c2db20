"""Checkpoints of NVIDIA's Model Optimizer (github.com/NVIDIA/Model-Optimizer): FP8, NVFP4, MXFP8, and mixtures of them.

Settings are in `quantization_config` or, in older versions, in a file of their own
(jaxengine.models.config.readers.hf), with slightly different names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxengine.models.quantization.base.rules import LINEAR, Quantization, bad, check_name, names_in, one_of
from jaxengine.models.quantization.base.stored import Activation, Shape, Stored, StoredModule
from jaxengine.models.quantization.schemes.eight_bits import BLOCK, CHANNEL, TENSOR, EightBits
from jaxengine.models.quantization.schemes.mxfp4 import GROUP
from jaxengine.models.quantization.schemes.mxfp8 import Mxfp8
from jaxengine.models.quantization.schemes.nvfp4 import ROWS, Nvfp4
from jaxengine.pallas_kernels.matmul.rounding import UE8M0

METHOD = "modelopt"
MIXED, UNQUANTIZED = "MIXED_PRECISION", "UNQUANTIZED"
_E4M3 = "float8_e4m3fn"


@dataclass(frozen=True)
class Blocks(EightBits):
    """Storage format of e4m3 matrices in blocks, whose `weight_scale` may also have the shape [out / 128, 1, in / 128,
    1].
    """

    def tensors(self, module: StoredModule) -> Mapping[str, tuple[Shape, ...]]:
        needed = dict(super().tensors(module))
        shapes = needed["weight_scale"]
        return needed | {"weight_scale": (*shapes, *((rows, 1, columns, 1) for rows, columns in shapes))}


def _nvfp4(name: str, activation: Activation | None) -> Nvfp4:
    """Return the format NVFP4 with ModelOpt's tensor names, whose global scales are factors. activation: None if rows
    are not rounded.
    """
    return Nvfp4(name, activation, "weight", "weight_scale_2", "input_scale", divides=False)


# Formats by `quant_algo`. Scales of MXFP8 rows are the least sufficient powers of two, as in vLLM.
_STORED: dict[str, Stored] = {
    "FP8": EightBits(f"{METHOD} FP8", _E4M3, TENSOR, Activation(_E4M3, static=True)),
    "FP8_PER_CHANNEL_PER_TOKEN": EightBits(f"{METHOD} FP8 by channel", _E4M3, CHANNEL, Activation(_E4M3)),
    "FP8_PB_WO": Blocks(f"{METHOD} FP8 by block", _E4M3, BLOCK, block=(128, 128)),
    "NVFP4": _nvfp4(f"{METHOD} NVFP4", ROWS),
    "W4A16_NVFP4": _nvfp4(f"{METHOD} NVFP4", None),
    "MXFP8": Mxfp8(f"{METHOD} MXFP8", Activation(_E4M3, GROUP, scales=UE8M0)),
}


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the Quantization that ModelOpt settings describe. Raises ModelConfigError for unsupported ones.

    The settings may be nested in `quantization`. MIXED_PRECISION has an algorithm for each of quantized_layers; any
    other algorithm is that of all matrices. Modules in `ignore` and exclude_modules, and towers, are plain.
    """
    inner = settings.get("quantization")
    if inner is not None and not isinstance(inner, Mapping):
        raise bad("quantization", inner, "a mapping")
    settings = settings if inner is None else inner
    algorithm = _algorithm(settings, MIXED)
    rules: tuple[tuple[tuple[str, ...], Stored | None], ...]
    if algorithm == MIXED:
        layers = settings.get("quantized_layers")
        if not isinstance(layers, Mapping) or not all(isinstance(own, Mapping) for own in layers.values()):
            raise bad("quantized_layers", layers, f"a mapping of modules for {MIXED}")
        for name in layers:
            check_name("quantized_layers", name)
        by_stored: dict[Stored | None, list[str]] = {}
        for name, own in layers.items():
            by_stored.setdefault(_STORED.get(_algorithm(own, UNQUANTIZED)), []).append(name)
        rules = tuple((tuple(names), stored) for stored, names in by_stored.items())
    else:
        rules = (((LINEAR,), _STORED[algorithm]),)
        wanted = {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32}.get(algorithm)
        if wanted is not None:
            one_of(settings, "group_size", (wanted,), wanted)
    # Towers are not quantised, which older versions do not state.
    listed = (
        *names_in(settings, "ignore"),
        *names_in(settings, "exclude_modules"),
        "vision_tower",
        "vision_model",
        "visual",
    )
    return Quantization(METHOD, rules, listed=listed, with_heads=True, kv_dtype=_kv_dtype(settings))


def _algorithm(settings: Mapping[str, Any], other: str) -> str:
    """Return `quant_algo` in capitals, a name of _STORED or `other`. Raises ModelConfigError for any other value."""
    said = settings.get("quant_algo")
    name = said.upper() if isinstance(said, str) else said
    if name not in (*_STORED, other):
        raise bad("quant_algo", said, " or ".join(map(repr, (*_STORED, other))))
    return name


def _kv_dtype(settings: Mapping[str, Any]) -> str | None:
    """Return the dtype of keys and values, from kv_cache_scheme or the older kv_cache_quant_algo: e4m3, or None for the
    model's dtype. Raises ModelConfigError for anything but static e4m3.
    """
    scheme, said = settings.get("kv_cache_scheme"), settings.get("kv_cache_quant_algo")
    if scheme is not None:
        wanted = {"num_bits": 8, "type": "float", "dynamic": False}
        found = {"dynamic": False, **scheme} if isinstance(scheme, Mapping) else {}
        if any(found.get(field) != value for field, value in wanted.items()):
            raise bad("kv_cache_scheme", scheme, f"absent, or {wanted}")
    elif said is None or (isinstance(said, str) and said.upper() in ("", "NONE")):
        return None
    elif not isinstance(said, str) or said.upper() != "FP8":
        raise bad("kv_cache_quant_algo", said, "'FP8' or absent")
    return _E4M3
