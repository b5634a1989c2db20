"""Conversion of a user's mesh, such as a training script's with axes fsdp and tp, to one with the engine's axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxengine.config.base.errors import ConfigError
from jaxengine.sharding.layout import MESH_AXES

# Split by the engine into attn and model, as the model's KV heads divide.
TENSOR = "tensor"
_ALLOWED = ("data", TENSOR, "attn", "model")


def devices_by_axes(mesh: Mesh, mesh_axes: Mapping[str, str] | None) -> tuple[np.ndarray, bool]:
    """Return a mesh's devices as an array [data, attn, model], and whether the mesh itself decides how tensor
    parallelism is split into the last two axes. If it only has "tensor", the result is False and all tensor parallelism
    is in `model`.

    mesh_axes: maps axes of the mesh to "data", "tensor", "attn" or "model". Several axes with one meaning are joined in
    the mesh's order. An axis that is not in it means its own name; an axis of one device needs no meaning. Raises
    ConfigError, which names the axis, for an unknown axis or meaning, an axis of several devices without a meaning, and
    for "tensor" together with "attn" or "model".
    """
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    meanings = _meanings(sizes, mesh_axes)
    named = {meanings[axis] for axis in meanings}
    if TENSOR in named and named & {"attn", "model"}:
        raise ConfigError("mesh_axes", dict(mesh_axes or sizes), "tensor, or attn and model; not both")
    wanted = [("data",), ("attn",), ("model", TENSOR)]
    groups = [[axis for axis in sizes if meanings.get(axis) in kinds] for kinds in wanted]
    free = [axis for axis in sizes if axis not in meanings]
    order = [list(sizes).index(axis) for group in [*groups, free] for axis in group]
    shape = [int(np.prod([sizes[axis] for axis in group], dtype=int)) for group in groups]
    return mesh.devices.transpose(order).reshape(shape), TENSOR not in named


def _meanings(sizes: Mapping[Any, int], mesh_axes: Mapping[str, str] | None) -> dict[Any, str]:
    """Return the meaning of each mesh axis ("data", "tensor", "attn" or "model"). An axis of size 1 without a meaning
    is left out.

    sizes: number of devices along each axis, by the axis's name. mesh_axes: maps axes to meanings; an axis that it
    lacks means its own name; None maps no axis. Raises ConfigError if it is not a mapping, for unknown names and
    meanings, and for an axis of several devices without a meaning.
    """
    if mesh_axes is not None and not isinstance(mesh_axes, Mapping):
        raise ConfigError("mesh_axes", mesh_axes, 'a dict from axes of the mesh, such as {"tp": "tensor"}')
    given = dict(mesh_axes or {})
    for axis, meaning in given.items():
        if axis not in sizes:
            raise ConfigError("mesh_axes", axis, f"axes of the mesh: {', '.join(map(str, sizes))}")
        if meaning not in _ALLOWED:
            raise ConfigError(f"mesh_axes[{axis!r}]", meaning, ", ".join(_ALLOWED))
    meanings: dict[Any, Any] = {axis: given.get(axis, axis) for axis in sizes}
    for axis, size in sizes.items():
        if meanings[axis] not in _ALLOWED:
            if size > 1:
                problem = f"the mesh has an axis {axis!r} of {size} devices, whose meaning is not known"
                advice = f"give mesh_axes={{{str(axis)!r}: ...}} with one of {', '.join(_ALLOWED)}"
                raise ConfigError.because("mesh_axes", problem, advice)
            del meanings[axis]
    return meanings


def engine_mesh(mesh: Mesh, mesh_axes: Mapping[str, str] | None) -> tuple[Mesh, bool]:
    """Return the mesh with its axes changed to data, attn and model, and whether the given mesh itself decides how
    tensor parallelism is split into attn and model.

    mesh_axes: maps axes of the mesh to "data", "tensor", "attn" or "model", as in `devices_by_axes`. Raises the
    ConfigErrors of `devices_by_axes`.
    """
    devices, is_exact = devices_by_axes(mesh, mesh_axes)
    return Mesh(devices, MESH_AXES), is_exact
