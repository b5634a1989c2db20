"""Logical axes of arrays to axes of the mesh: one table, read by parameters, pools and activations alike."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding, PartitionSpec

ShardingRules = Mapping[str, tuple[str, ...]]

# Attention: batch over data x attn, heads over model. Everything dense besides: over attn x model.
DEFAULT_RULES: ShardingRules = MappingProxyType(
    {
        "batch": ("data", "attn"),
        "pages": ("data", "attn"),
        "heads": ("model",),
        "kv_heads": ("model",),
        "ffn": ("attn", "model"),
        "vocab": ("attn", "model"),
        "embed": (),
    }
)


def logical_to_spec(axes: tuple[str | None, ...], rules: ShardingRules = DEFAULT_RULES) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes; None is an axis that is never split.

    Raises ValueError for a logical axis that the rules do not know and for a mesh axis that two axes claim.
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


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...], rules: ShardingRules = DEFAULT_RULES) -> NamedSharding:
    """Where an array with these logical axes lives on the mesh. Raises as logical_to_spec."""
    return NamedSharding(mesh, logical_to_spec(axes, rules))
