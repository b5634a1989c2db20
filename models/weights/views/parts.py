"""Division of a weight into device parts, and the rows of the checkpoint's tensors in each.

It implements the arithmetic of declare.ParamDecl for everything that fills weights: from files, at random, or restored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from jaxengine.models.cache import product_platform_of
from jaxengine.models.params.declare import DeclaredParam, ParamDecl, Source
from jaxengine.sharding.layout import RULES
from jaxengine.sharding.rules import named_sharding


class Block(NamedTuple):
    """Part of a weight that is read at once for devices of this process: neighbouring columns of one part.

    Attributes:
      experts: slice of the first axis, which may end after the last expert; slice(0, 1) for a weight without experts.
      part: index of the part of the joined axis.
      columns: slice of the tensors' second axis; () for tensors without one.
      devices: (device, its columns, counted from the block's first) of each device. None stands for the default device.
    """

    experts: slice
    part: int
    columns: tuple[slice, ...]
    devices: list[tuple[Any, slice]]

    def numbers(self, decl: ParamDecl) -> range:
        """Return the numbers of the experts that the block has; range(1) for a weight without experts."""
        return range(self.experts.start, min(self.experts.stop, decl.num_experts or 1))


def num_parts(param: DeclaredParam, mesh: Mesh | None) -> tuple[int, ...]:
    """Return the number of parts of each axis of the weight on the mesh; 1 for all axes without a mesh.

    Raises ValueError, which names the weight, for an axis that this many devices cannot split evenly.
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
    """Return the sharding of a weight on the mesh; None if there is no mesh, which stands for the default device."""
    return None if mesh is None else named_sharding(mesh, param.decl.axes)


def format_of(decl: ParamDecl, sharding: Sharding) -> Format | Sharding:
    """Return the sharding of a weight together with its memory layout; the sharding alone if the compiler chooses the
    layout.
    """
    order = order_of(decl, sharding)
    return sharding if order is None else Format(Layout(order), sharding)


def order_of(decl: ParamDecl, sharding: Sharding) -> tuple[int, ...] | None:
    """Return the axes of a weight from the outermost in memory to the innermost; None if the compiler chooses, and for
    abstract devices. The last two are swapped for `transposed_on_gpu` where a card's kernels read them so; otherwise
    `row_major` keeps the declared order.
    """
    axes = tuple(range(len(decl.axes)))
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return None  # of abstract devices only the sizes are known
    if decl.transposed_on_gpu:
        platform = product_platform_of(next(iter(sharding.device_set)))
        if platform == "gpu" or (platform == "gpu_triton" and decl.num_experts is None):
            return (*axes[:-2], axes[-1], axes[-2])
    return axes if decl.row_major else None


def put(array: np.ndarray | jax.Array, decl: ParamDecl, sharding: Sharding | None) -> jax.Array:
    """Return a weight's values, or a device's part of them, on devices in the declared layout. sharding: None for the
    default device. The transfer may not be complete on return.
    """
    placed = jax.device_put(array, sharding)
    layout, order = placed.format.layout, order_of(decl, placed.sharding)
    # Where the compiler's order is the one wanted already, jax would compile a program that does nothing.
    if order is None or (isinstance(layout, Layout) and layout.major_to_minor == order):
        return placed
    return jax.device_put(placed, format_of(decl, placed.sharding))


def local_blocks(param: DeclaredParam, mesh: Mesh | None) -> Iterator[Block]:
    """Yield the blocks that the devices of this process need; each part is read once for all devices that share it.
    Without a mesh, the device is None and needs all.

    Raises ValueError, which names the weight, for an axis that the mesh does not split evenly.
    """
    decl, sharding = param.decl, sharding_of(param, mesh)
    parts = num_parts(param, mesh)[decl.joined_axis]
    whole = (slice(None),) * len(param.shape)
    index_of_device = {None: whole} if sharding is None else sharding.addressable_devices_indices_map(param.shape)
    axis = column_axis(decl)
    found: dict[tuple[int, int, int], dict[tuple[int, int], list[Any]]] = {}
    for device, index in index_of_device.items():
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
    """Yield sorted spans in runs in which each span begins at the end of the previous one."""
    run = spans[:1]
    for span in spans[1:]:
        if span[0] != run[-1][1]:
            yield run
            run = []
        run.append(span)
    yield run


def column_axis(decl: ParamDecl) -> int | None:
    """Return the index of the weight's axis that is the tensors' second axis; None for tensors with one axis."""
    first = int(decl.num_experts is not None)
    return next((axis for axis in range(first, len(decl.axes)) if axis != decl.joined_axis), None)


def source_row(source: Source, contributed: Any) -> Any:
    """Return the row of the tensor that is the source's contributed row number `contributed`; both are integers or
    integer arrays.

    The result is meaningful below source.rows * source.repeat: padding follows.
    """
    run = source.run or source.group
    row = contributed // (source.group * source.repeat) * source.group + contributed % source.group
    return source.first + row // run * (source.stride or run) + row % run


def tensor_name(source: Source, expert: int) -> str:
    """Return the name of a source's tensor for one expert; the source's name for weights without experts."""
    return source.name.replace("{expert}", str(expert))
