"""What quantised checkpoints say, read one number at a time from the published layouts: f32 matrices [out, in].

For the reader, not for speed; shares no code with models/quantization.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def bits_at(words: np.ndarray, place: tuple[int, ...], axis: int, bits: int) -> int:
    """Number `place` of an array packed along an axis into int32 words, the lowest bits first."""
    index, found = list(place), 0
    word, rest = divmod(place[axis] * bits, 32)
    for each in range((rest + bits + 31) // 32):  # one of three bits may go on in the next word
        index[axis] = word + each
        found |= (int(words[tuple(index)]) & 2**32 - 1) << 32 * each
    return (found >> rest) & (2**bits - 1)


def matrix(tensors: Tensors, module: str, settings: dict[str, Any], shape: tuple[int, int]) -> np.ndarray:
    """The weight of a module of shape (out, in); where NVFP4's rows have a scale for all, divided by that."""
    own = {name.removeprefix(f"{module}."): value for name, value in tensors.items() if name.startswith(f"{module}.")}
    method = settings["quant_method"]
    if method == "awq" or settings.get("packing_format") == "auto_round:auto_awq":
        read = _awq
    elif method in ("gptq", "auto-round"):
        read = _gptq
    elif method == "bitsandbytes":
        read, settings = _entry, settings | {"size": shape[1]}
    elif method == "modelopt":
        read = _modelopt
    elif method == "bitnet":
        read = _bitnet
        if settings["quantization_mode"] == "online":
            settings = settings | {"mean": np.float32(np.abs(own["weight"].astype(np.float64)).mean())}
    elif "weight_global_scale" in own:
        read = _nvfp4
    elif settings.get("format") == "mxfp4-pack-quantized":
        read = _mxfp4
    elif settings.get("format") == "mxfp8-quantized" or method == "mxfp8":
        read = _mxfp8
    elif "weight_packed" in own:
        read, settings = _packed, settings["config_groups"]["group_0"]["weights"]
    else:
        read = _eight_bits
        if method == "compressed-tensors":
            settings = {"weight_block_size": settings["config_groups"]["group_0"]["weights"].get("block_structure")}
    out, size = shape
    values = [[read(own, settings, o, i) for i in range(size)] for o in range(out)]
    return np.array(values, np.float32)


def _eight_bits(own: Tensors, settings: dict[str, Any], o: int, i: int) -> np.float32:
    scales = own["weight_scale_inv" if "weight_scale_inv" in own else "weight_scale"]
    block = settings.get("weight_block_size")
    if block:
        scale = scales[o // block[0], i // block[1]]
    else:
        scale = scales[0] if scales.size == 1 else scales[o, 0]
    return np.float32(own["weight"][o, i]) * np.float32(scale)


def _bitnet(own: Tensors, settings: dict[str, Any], o: int, i: int) -> np.float32:
    """transformers' unpack_weights, or its WeightQuant."""
    if settings["quantization_mode"] == "online":
        mean = settings["mean"]
        return np.float32(np.clip(np.rint(np.float32(own["weight"][o, i]) / mean), -1, 1)) * mean
    height, scale = len(own["weight"]), own["weight_scale"].astype(np.float32)[0]
    weight = np.float32((int(own["weight"][o % height, i]) >> 2 * (o // height) & 3) - 1)
    return weight * (1 / scale if settings["linear_class"] == "bitlinear" else scale)


def _packed(own: Tensors, settings: dict[str, Any], o: int, i: int) -> np.float32:
    bits, half = settings["num_bits"], 2 ** (settings["num_bits"] - 1)
    scales = own["weight_scale"]
    group = own["weight_g_idx"][i] if "weight_g_idx" in own else i // settings.get("group_size", 1 << 30)
    point = bits_at(own["weight_zero_point"], (o, group), 0, bits) - half if "weight_zero_point" in own else 0
    return np.float32(bits_at(own["weight_packed"], (o, i), 1, bits) - half - point) * np.float32(scales[o, group])


def _e2m1(pairs: np.ndarray, o: int, i: int) -> float:
    """A number of four bits, two a byte along the inputs, the first in the low ones."""
    bits = int(pairs[o, i // 2]) >> 4 * (i % 2) & 15
    exponent, mantissa = bits >> 1 & 3, bits & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -magnitude if bits & 8 else magnitude


def _nvfp4(own: Tensors, settings: dict[str, Any], o: int, i: int) -> np.float32:
    scale = np.float32(own["weight_scale"][o, i // 16]) / own["weight_global_scale"][0]
    scale = scale / own["input_global_scale"][0] if "input_global_scale" in own else scale
    return np.float32(_e2m1(own["weight_packed"], o, i)) * scale


def _mxfp4(own: Tensors, settings: dict[str, Any], o: int, i: int) -> np.float32:
    return np.float32(_e2m1(own["weight_packed"], o, i) * 2.0 ** (int(own["weight_scale"][o, i // 32]) - 127))


def _mxfp8(own: Tensors, settings: dict[str, Any], o: int, i: int) -> np.float32:
    exponents = own["weight_scale_inv" if "weight_scale_inv" in own else "weight_scale"]
    return np.float32(float(own["weight"][o, i]) * 2.0 ** (int(exponents[o, i // 32]) - 127))


def algorithm_of(settings: dict[str, Any], module: str) -> str:
    """What ModelOpt has made of a module: by its own name, or that of all experts of its layer."""
    settings = settings.get("quantization", settings)
    if settings["quant_algo"] != "MIXED_PRECISION":
        return settings["quant_algo"].upper()
    layers = settings["quantized_layers"]
    return (layers.get(module) or layers[module[: module.index(".experts") + 8]])["quant_algo"]


def _modelopt(own: Tensors, settings: dict[str, Any], o: int, i: int) -> np.float32:
    scale = own["weight_scale"]
    if "weight_scale_2" in own:
        held = np.float32(scale[o, i // 16]) * own["weight_scale_2"]
        held = held / (np.float32(1) / own["input_scale"]) if "input_scale" in own else held
        return np.float32(_e2m1(own["weight"], o, i)) * held
    if scale.dtype == np.uint8:
        return _mxfp8(own, settings, o, i)
    return np.float32(own["weight"][o, i]) * (scale[o] if scale.ndim == 1 else scale.reshape(-1)[0])


def _awq(own: Tensors, settings: dict[str, Any], o: int, i: int) -> np.float32:
    column = o // 8 * 8 + (0, 4, 1, 5, 2, 6, 3, 7)[o % 8]
    group = i // settings["group_size"]
    value, point = bits_at(own["qweight"], (i, column), 1, 4), bits_at(own["qzeros"], (group, column), 1, 4)
    return np.float32(value - point) * np.float32(own["scales"][group, o])


def _gptq(own: Tensors, settings: dict[str, Any], o: int, i: int) -> np.float32:
    bits, group = settings["bits"], own["g_idx"][i]
    points, first = own["qzeros"], settings.get("checkpoint_format") != "gptq_v2"
    if first and bits != 3:
        points = points + np.int32({2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits])
    point = bits_at(points, (group, o), 1, bits) + (first and bits == 3)
    return np.float32(bits_at(own["qweight"], (i, o), 0, bits) - point) * np.float32(own["scales"][group, o])


def _entry(own: Tensors, settings: dict[str, Any], o: int, i: int) -> np.float32:
    """bitsandbytes: an entry of a table times what its block of the whole matrix, row after row, is multiplied by."""
    place, kind = o * settings["size"] + i, settings["bnb_4bit_quant_type"]
    state = json.loads(bytes(own[f"weight.quant_state.bitsandbytes__{kind}"]))
    block = place // state["blocksize"]
    scale = own["weight.absmax"][block]
    if settings["bnb_4bit_use_double_quant"]:
        shared = own["weight.nested_absmax"][block // state["nested_blocksize"]]
        scale = own["weight.nested_quant_map"][scale] * shared + np.float32(state["nested_offset"])
    byte = int(own["weight"][place // 2, 0])
    return own["weight.quant_map"][byte >> 4 if place % 2 == 0 else byte & 15] * scale
