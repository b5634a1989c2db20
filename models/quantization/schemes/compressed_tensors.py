"""compressed-tensors checkpoints (github.com/neuralmagic/compressed-tensors): float-quantized, int-quantized,
pack-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized and mxfp8-quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxengine.models.quantization.base.rules import (
    LINEAR,
    Quantization,
    bad,
    block_size,
    given,
    group_size,
    names_in,
    one_of,
    refuse,
)
from jaxengine.models.quantization.base.stored import Activation, Stored
from jaxengine.models.quantization.base.words import Packed
from jaxengine.models.quantization.schemes import mxfp4, mxfp8, nvfp4
from jaxengine.models.quantization.schemes.eight_bits import BLOCK, CHANNEL, TENSOR, EightBits
from jaxengine.pallas_kernels.matmul.rounding import E8M0

METHOD = "compressed-tensors"
FLOAT, INT, PACKED, NAIVE = "float-quantized", "int-quantized", "pack-quantized", "naive-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
FORMATS = (FLOAT, INT, PACKED, NAIVE, NVFP4, MXFP4, MXFP8)
_DTYPES = {"float": "float8_e4m3fn", "int": "int8"}
# Settings of weights in small groups, and of their rows.
_MICROSCALED = {
    kept: {"type": "float", "num_bits": bits, "symmetric": True, "strategy": strategy, "group_size": size}
    for kept, bits, strategy, size in (
        (NVFP4, 4, "tensor_group", nvfp4.GROUP),
        (MXFP4, 4, "group", mxfp4.GROUP),
        (MXFP8, 8, "group", mxfp4.GROUP),
    )
}


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the Quantization that compressed-tensors settings describe. Raises ModelConfigError for unsupported ones,
    such as sparse weights, and for no groups without a kv_cache_scheme.

    It has a rule for each target of config_groups, in the order of `_precedence`. Modules in `ignore` are plain, and
    kv_cache_scheme gives the dtype of keys and values.
    """
    one_of(settings, "quantization_status", ("compressed", "frozen"), "compressed")
    refuse(settings, "transform_config", "moe_sparsity_config")
    sparsity = given(settings, "sparsity_config", {})
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise bad("sparsity_config", sparsity, "absent or dense: sparse weights are not supported")
    groups, kv_dtype = settings.get("config_groups"), _kv_dtype(settings.get("kv_cache_scheme"))
    if not isinstance(groups, Mapping) or not all(isinstance(each, Mapping) for each in groups.values()):
        raise bad("config_groups", groups, "a mapping of groups")
    if not groups and kv_dtype is None:
        raise bad("config_groups", groups, "a mapping of groups, empty only beside a kv_cache_scheme")
    chosen = {name: _stored(group, settings) for group in groups.values() for name in names_in(group, "targets")}
    rules = tuple(((name,), chosen[name]) for name in sorted(chosen, key=_precedence))
    return Quantization(METHOD, rules, names_in(settings, "ignore"), with_heads=True, kv_dtype=kv_dtype)


def _precedence(target: str) -> tuple[bool, bool, str]:
    """Return the sort key of a target: module names come before regular expressions, these before LINEAR, and each kind
    is sorted alphabetically.

    This is the order of compressed_tensors.utils.match.match_targets, whichever group a target belongs to.
    """
    return target == LINEAR, target.startswith("re:"), target


def _kv_dtype(scheme: Any) -> str | None:
    """Return the dtype of keys and values for `kv_cache_scheme`: e4m3, or None if `scheme` is None. Raises
    ModelConfigError for an unsupported one.

    Their scales are read in jaxengine.models.weights.views.kv_scales.
    """
    if scheme is None:
        return None
    wanted = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True}
    said = {**wanted, "strategy": TENSOR, **scheme} if isinstance(scheme, Mapping) else {}
    if any(said.get(name) != value for name, value in wanted.items()) or said["strategy"] not in (TENSOR, "attn_head"):
        raise bad("kv_cache_scheme", scheme, f"absent, or {wanted} by {TENSOR} or attn_head")
    return _DTYPES["float"]


def _stored(group: Mapping[str, Any], settings: Mapping[str, Any]) -> Stored:
    """Return the storage format of one of the config_groups. `settings` have the field `format` of groups that lack it.
    Raises ModelConfigError if it is not supported.
    """
    refuse(group, "output_activations")
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise bad("weights", weights, "a mapping in every group")
    kept = one_of({"format": given(group, "format", settings.get("format"))}, "format", FORMATS)
    weights = {**weights, "strategy": _strategy(weights)}
    kind = one_of(weights, "type", ("int", "float"), "int")
    symmetric = one_of(weights, "symmetric", (True, False), True)
    one_of(weights, "dynamic", (False,), False)
    name = f"{METHOD} {kept}"
    if kept in _MICROSCALED:
        return _microscaled(name, kept, weights, group.get("input_activations"))
    activation = _activation(group.get("input_activations"))
    if kept == PACKED:
        if kind != "int" or activation is not None:
            raise bad("weights", dict(weights), f"integers, and input_activations absent, for {PACKED}")
        bits = one_of(weights, "num_bits", (4, 8))
        strategy = one_of(weights, "strategy", ("channel", "group"))
        order = one_of(weights, "actorder", (False, "weight", "static", "group", "dynamic"), False)
        return Packed(
            name,
            bits,
            None if strategy == "channel" else group_size(weights),
            not symmetric,
            reordered=order in ("group", "dynamic"),
        )
    if not symmetric or (kept, kind) in ((FLOAT, "int"), (INT, "float")):
        raise bad("weights", dict(weights), f"symmetric and of the type that {kept} says")
    one_of(weights, "num_bits", (8,))
    strategy = one_of(weights, "strategy", (TENSOR, CHANNEL, BLOCK))
    block = block_size(weights, "block_structure") if strategy == BLOCK else None
    if strategy == BLOCK and block is None:
        raise bad("block_structure", None, "two whole numbers where strategy is block")
    return EightBits(name, _DTYPES[kind], strategy, activation, block)


def _strategy(weights: Mapping[str, Any]) -> Any:
    """Return the field `strategy`, or the default that its absence implies: tensor without a group_size, channel if
    that is -1, otherwise group.
    """
    if (said := weights.get("strategy")) is not None:
        return said
    group = weights.get("group_size")
    return TENSOR if group is None else CHANNEL if group == -1 else "group"


def _microscaled(name: str, kept: str, weights: Mapping[str, Any], rows: Any) -> Stored:
    """Return the storage format of floats in small groups, whose rows are rounded to the same format or not at all.

    Args:
      name: name of the format, for display.
      kept: NVFP4, MXFP4 or MXFP8.
      weights, rows: fields `weights` and `input_activations` of a group; rows None: not rounded.

    Raises ModelConfigError if a field has another value than the format requires.
    """
    wanted = _MICROSCALED[kept]
    for field, value in wanted.items():
        one_of(weights, field, (value,), True if field == "symmetric" else None)
    if rows is not None:
        if not isinstance(rows, Mapping):
            raise bad("input_activations", rows, "a mapping or absent")
        dynamic = "local" if kept == NVFP4 else True
        found = {"symmetric": True, "strategy": wanted["strategy"], **rows}
        if found.get("dynamic") != dynamic or any(found.get(field) != value for field, value in wanted.items()):
            raise bad("input_activations", dict(rows), f"{wanted} with dynamic {dynamic!r}, or absent, for {kept}")
    if kept == NVFP4:
        return nvfp4.Nvfp4(name, None if rows is None else nvfp4.ROWS)
    if kept == MXFP8:
        return mxfp8.Mxfp8(name, None if rows is None else Activation(_DTYPES["float"], mxfp4.GROUP, scales=E8M0))
    activation = None if rows is None else Activation("float4_e2m1fn", mxfp4.GROUP, scales=E8M0)
    return mxfp4.Mxfp4(name, "weight_packed", "weight_scale", activation=activation)


def _activation(settings: Any) -> Activation | None:
    """Return the rounding of rows that `input_activations` describes; None if `settings` is None, for no rounding.

    Raises ModelConfigError unless the rounding has 8 bits and is symmetric, per tensor if static and per token or group
    if dynamic.
    """
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise bad("input_activations", settings, "a mapping or absent")
    one_of(settings, "num_bits", (8,))
    one_of(settings, "symmetric", (True,), True)
    dtype = _DTYPES[one_of(settings, "type", ("int", "float"), "int")]
    dynamic = one_of(settings, "dynamic", (True, False), False)
    # A dynamic scale for all tokens together would make a token depend on what else is in the batch.
    strategy = one_of(settings, "strategy", ("token", "group") if dynamic else ("tensor",))
    group = group_size(settings) if strategy == "group" else None
    return Activation(dtype, group=group, static=not dynamic)
