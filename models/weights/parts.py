"""Which part of a weight each device holds, and which rows of the checkpoint's tensors make it up.

The arithmetic behind declare.ParamDecl, once for all that fill weights: read, drawn at random or restored.
Knows nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, Sharding

from models.cache import product_platform_of
from models.weights.declare import DeclaredParam, ParamDecl, Source
from sharding.layout import RULES
from sharding.rules import named_sharding


class Block(NamedTuple):
    """What is read of a weight in one go for devices of this process: neighbouring columns of one part.

    Attributes:
      experts: of the first axis; slice(0, 1) for a weight without experts.
      part: which part of the joined axis.
      columns: of the tensors' second axis; () for tensors without one.
      devices: each with its columns, counted from the block's first. None stands for the default device.
    """

    experts: slice
    part: int
    columns: tuple[slice, ...]
    devices: list[tuple[Any, slice]]


def num_parts(param: DeclaredParam, mesh: Mesh | None) -> tuple[int, ...]:
    """Parts of each axis of the weight on the mesh; ones without a mesh.

    Raises ValueError, naming the weight, for an axis that this many devices cannot split evenly.
    """
    sizes = {} if mesh is None else dict(mesh.shape)
    decl = param.decl
    counts = []
    for axis, (name, size) in enumerate(zip(decl.axes, param.shape, strict=True)):
        count = math.prod(sizes.get(mesh_axis, 1) for mesh_axis in RULES[name]) if name is not None else 1
        most = param.most_parts(axis)
        if most % count:
            allowed = ", ".join(str(n) for n in range(1, count) if most % n == 0)
            joined = axis == decl.joined_axis
            made_of = f", made of {[source.num_contributed for source in decl.sources]}," if joined else ""
            text = f"axis {name!r} of {size}{made_of} cannot be split over {count} devices; fewer that work: {allowed}"
            raise ValueError(f"{param.name}: {text}")
        counts.append(count)
    return tuple(counts)


def sharding_of(param: DeclaredParam, mesh: Mesh | None) -> NamedSharding | None:
    """Where a weight lives; None (no mesh) is the default device."""
    return None if mesh is None else named_sharding(mesh, param.decl.axes)


def format_of(decl: ParamDecl, sharding: Sharding) -> Format | Sharding:
    """Where a weight lives and, unless that is the compiler's affair, in which order of its axes."""
    order = order_of(decl, sharding)
    return sharding if order is None else Format(Layout(order), sharding)


def order_of(decl: ParamDecl, sharding: Sharding) -> tuple[int, ...] | None:
    """Its axes from the outermost in memory to the innermost, None where that is the compiler's affair."""
    axes = tuple(range(len(decl.axes)))
    if decl.transposed_on_gpu and product_platform_of(next(iter(sharding.device_set))) == "gpu":
        return (*axes[:-2], axes[-1], axes[-2])
    return axes if decl.row_major else None


def put(array: np.ndarray | jax.Array, decl: ParamDecl, sharding: Sharding | None) -> jax.Array:
    """A weight's values, or a device's part of them, where it lives; None for the default device."""
    placed = jax.device_put(array, sharding)
    layout, order = placed.format.layout, order_of(decl, placed.sharding)
    # Where the compiler's order is the one wanted already, jax would compile a program that does nothing.
    if order is None or (isinstance(layout, Layout) and layout.major_to_minor == order):
        return placed
    return jax.device_put(placed, format_of(decl, placed.sharding))


def local_blocks(param: DeclaredParam, mesh: Mesh | None) -> Iterator[Block]:
    """What the devices of this process need. Devices with equal parts share one; none twice in the blocks."""
    decl, sharding = param.decl, sharding_of(param, mesh)
    parts = num_parts(param, mesh)[decl.joined_axis]
    whole = (slice(None),) * len(param.shape)
    places = {None: whole} if sharding is None else sharding.addressable_devices_indices_map(param.shape)
    axis = column_axis(decl)
    found: dict[tuple[int, int, int], dict[tuple[int, int], list[Any]]] = {}
    for device, index in places.items():
        assert index is not None
        spans = [each.indices(size)[:2] for each, size in zip(index, param.shape, strict=True)]
        first, last = (0, 1) if decl.num_experts is None else spans[0]
        part = spans[decl.joined_axis][0] * parts // param.shape[decl.joined_axis]
        columns = (0, 1) if axis is None else spans[axis]
        found.setdefault((first, last, part), {}).setdefault(columns, []).append(device)
    for (first, last, part), by_columns in found.items():
        for columns in _runs(sorted(by_columns)):
            start = columns[0][0]
            devices = [(d, slice(a - start, b - start)) for a, b in columns for d in by_columns[a, b]]
            span = () if axis is None else (slice(start, columns[-1][1]),)
            yield Block(slice(first, last), part, span, devices)


def _runs(spans: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Sorted spans, grouped where one begins at the end of another."""
    run = spans[:1]
    for span in spans[1:]:
        if span[0] != run[-1][1]:
            yield run
            run = []
        run.append(span)
    yield run


def column_axis(decl: ParamDecl) -> int | None:
    """The weight's axis that is the tensors' second; None where they have one only."""
    first = int(decl.num_experts is not None)
    return next((axis for axis in range(first, len(decl.axes)) if axis != decl.joined_axis), None)


def source_row(source: Source, contributed: Any) -> Any:
    """The row of the tensor that is the contributed row of this number; both numbers or integer arrays.

    Meaningful below source.rows * source.repeat: padding follows.
    """
    groups = contributed // (source.group * source.repeat)
    return source.first + groups * (source.stride or source.group) + contributed % source.group


def tensor_name(source: Source, expert: int) -> str:
    """A source's name for one expert; for all other weights the name as it is."""
    return source.name.replace("{expert}", str(expert))
