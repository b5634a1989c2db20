"""Placement of arrays on a mesh by their logical axes: parameters, pools and messages alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxengine.sharding.layout import RULES


def logical_to_spec(axes: tuple[str | None, ...], rules: Mapping[str, tuple[str, ...]] = RULES) -> PartitionSpec:
    """Return the PartitionSpec of an array with these logical axes; None is an axis that is never split.

    rules: mesh axes of each logical axis, () for one that is not split. Raises ValueError for a logical axis without a
    rule and for a mesh axis that two of the array's axes use.
    """
    entries: list[str | tuple[str, ...] | None] = []
    claimed: dict[str, str] = {}
    for axis in axes:
        if axis is not None and axis not in rules:
            raise ValueError(f"logical axis must be one of {', '.join(rules)}, got {axis!r} in {axes}")
        mesh_axes = () if axis is None else rules[axis]
        for mesh_axis in mesh_axes:
            if mesh_axis in claimed:
                both = f"{claimed[mesh_axis]!r} and {axis!r}"
                raise ValueError(f"mesh axis {mesh_axis!r} is claimed by both {both} in {axes}")
            claimed[mesh_axis] = str(axis)
        entries.append(None if not mesh_axes else mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes)
    return PartitionSpec(*entries)


def whole_shape(part: tuple[int, ...], sharding: NamedSharding) -> tuple[int, ...]:
    """Return the global shape of an array with this sharding, of which every device holds a part of shape `part`."""
    one = (sharding.mesh.size,) * len(part)
    return tuple(size * whole // own for size, whole, own in zip(part, one, sharding.shard_shape(one), strict=True))


def part_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of one device's part of an array, or of a ShapeDtypeStruct with a sharding."""
    return leaf.sharding.shard_shape(leaf.shape)


def part_bytes(leaf: Any) -> int:
    """Return the bytes of one device's part of an array, or of a ShapeDtypeStruct with a sharding."""
    return math.prod(part_shape(leaf)) * leaf.dtype.itemsize


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """Return the NamedSharding of an array with these logical axes on the mesh. Raises ValueError for a logical axis
    without a rule and for a mesh axis that two of the array's axes use.
    """
    return NamedSharding(mesh, logical_to_spec(axes))
