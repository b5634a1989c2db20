"""The memory of jax's Mosaic GPU interpreter, in words that hold for every jax release it is used with.

Owns the differences: 0.10 tells warpgroups apart by device, coordinates in the grid and thread and keeps one clock for
each; 0.11 and 0.12 have a place in the mesh, a thread, and a second clock for what wgmma and TMA see of shared memory.
Knows nothing of what a kernel may do with that memory: see mosaic_gpu_hazards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import utils
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

Key = gpu_callbacks.HostAllocationKey
_HAS_MESH = hasattr(shared_memory, "MeshLocation")  # 0.11 on


class Place(NamedTuple):
    """A part of a buffer, in the buffer's own coordinates, and the order its axes are taken in (None: as they are)."""

    buffer: Any
    range: tuple
    order: tuple[int, ...] | None


class Where:
    """Which warpgroup works, and on which line of the kernel."""

    def __init__(self, position: tuple, source: Any) -> None:
        self.position, self.source = position, source
        if _HAS_MESH:
            mesh, thread = position
            self.warpgroup = (mesh.cluster_coords, mesh.block_coords, thread.device_id, thread.warpgroup_id)
        else:
            device, coordinates, thread = position
            self.position = int(device), int(thread)
            self.warpgroup = (tuple(map(int, coordinates)), *self.position)

    @property
    def block(self) -> tuple:
        """Whose shared memory it is."""
        return self.warpgroup[:-1]

    def line(self) -> str:
        return source_info_util.summarize(self.source)


def install() -> None:
    """Let the interpreter take numbers of numpy where it expects jax's."""
    if _HAS_MESH:
        shared_memory._to_int = lambda x: x if isinstance(x, jax.core.Tracer) else int(x)


def position_of(interpreter: Any) -> tuple:
    """What tells a host callback which warpgroup calls: the first argument of `Where`."""
    if _HAS_MESH:
        return interpreter.mesh_location, interpreter.thread
    return jnp.int32(interpreter.device_info.device_id), interpreter.grid_point_coords, interpreter.thread_id


def place_of(key: Any, transforms: tuple) -> Place:
    """The part of a buffer that a reference stands for; `transforms` as the interpreter's callbacks get them."""
    index, buffer = list(gpu_callbacks._remove_noop_transforms(transforms)), Key.from_array(key)
    if _HAS_MESH:
        access = gpu_callbacks._get_shared_memory().access(buffer, jax.tree.map(int, tuple(index)))
        return Place(buffer, access.range, access.permutation)
    order = None
    while index and (permutation := getattr(index[-1], "permutation", None) or getattr(index[-1], "perm", None)):
        assert order is None, "more than one transpose"
        order = tuple(permutation)
        index.pop()
    return Place(buffer, utils.to_range(jax.tree.map(int, tuple(index))), order)


def overlap(places: list[Place], other: Place) -> bool:
    return any(place.buffer == other.buffer and all(a < b for a, b in _common(place, other)) for place in places)


def within(place: Place, shape: tuple[int, ...]) -> Place:
    """A place of a buffer of this shape, with the end of every axis."""
    bounds = zip(_bounds(place, len(shape)), shape, strict=True)
    return place._replace(range=tuple(slice(start, min(stop, size)) for (start, stop), size in bounds))


def without(place: Place, other: Place) -> list[Place]:
    """The parts of a place that another one does not cover."""
    if not overlap([place], other):
        return [place]
    parts, common = [], _common(place, other)
    rest = _bounds(place, len(common))
    for axis, (begin, end) in enumerate(common):
        start, stop = rest[axis]
        for bounds in ((start, begin), (end, stop)):
            if bounds[0] < bounds[1]:
                parts.append(
                    place._replace(range=tuple(slice(*each) for each in [*rest[:axis], bounds, *rest[axis + 1 :]]))
                )
        rest[axis] = begin, end
    return parts


def _common(place: Place, other: Place) -> list[tuple[int, int]]:
    """(start, stop) of what two places have in common, axis by axis."""
    num_axes = max(len(place.range), len(other.range))
    pairs = zip(_bounds(place, num_axes), _bounds(other, num_axes), strict=True)
    return [(max(a, c), min(b, d)) for (a, b), (c, d) in pairs]


def _bounds(place: Place, num_axes: int) -> list[tuple[int, int]]:
    """(start, stop) of a place's axes; where it has all of one the stop is beyond every end."""
    ranges = [each if isinstance(each, slice) else slice(each, each + 1) for each in place.range]
    ranges += [slice(None)] * (num_axes - len(ranges))
    assert all(each.step in (None, 1) for each in ranges), "parts with gaps"
    return [(0, 1 << 30) if each == slice(None) else (each.start, each.stop) for each in ranges]


def content(place: Place, where: Where) -> np.ndarray:
    """What a place holds now, its axes in order. No race is looked for: see `begin_product`."""
    memory = gpu_callbacks._get_shared_memory()
    value, _, _ = memory.get_buffer_content(place.buffer, _part(place), _reader(memory, where))
    value = np.asarray(value)
    return value if place.order is None else value.transpose(place.order)


def begin_product(places: list[Place], where: Where) -> Any:
    """wgmma starts to read `places`: a race where that is not ordered behind what was written there.

    Returns what `end_product` wants.
    """
    memory, races = gpu_callbacks._get_shared_memory(), gpu_callbacks.get_races()
    if not _HAS_MESH:
        _read_by_thread(places, where)
        return None
    # A unit of its own, in order behind the warpgroup but not waited for. Its clock is that of the warpgroup's first
    # warp, which no kernel here uses. It sees shared memory as TMA does.
    thread, unit = where.position[1], where.position[1].warp(0)
    with memory.lock:
        memory.clocks[unit].update(memory.clocks[thread])
        memory.clocks[unit].inc(memory.thread_to_vc_position(unit))
        clock = memory.clocks[unit].copy()
    for place in places:
        races.check_read(thread, clock.async_smem_clock, place.buffer, _part(place), where.source)
    return clock


def end_product(places: list[Place], clock: Any, where: Where) -> None:
    """The warpgroup has waited for a product: what it does from now on comes behind the product's reads."""
    memory = gpu_callbacks._get_shared_memory()
    if not _HAS_MESH:
        _read_by_thread(places, where)  # read until now
        return
    with memory.lock:
        memory.clocks[where.position[1]].update(clock)


def _read_by_thread(places: list[Place], where: Where) -> None:
    memory = gpu_callbacks._get_shared_memory()
    for place in places:
        _, _, clock = memory.get_buffer_content(place.buffer, place.range, _reader(memory, where))
        gpu_callbacks.get_races().check_read(*where.position, clock, place.buffer, place.range, where.source)


def _reader(memory: Any, where: Where) -> Any:
    """The warpgroup as the memory's methods take it."""
    return where.position[1] if _HAS_MESH else memory.get_global_thread_id(*where.position)


def _part(place: Place) -> Any:
    """A place's range as the memory's methods take it."""
    return utils.Access(place.range) if _HAS_MESH else place.range


def add_to(accumulator: Any, product: np.ndarray, where: Where) -> None:
    """Add to an accumulator in registers, which only its own warpgroup can touch."""
    memory, place = gpu_callbacks._get_shared_memory(), place_of(accumulator, ())
    total, _, _ = memory.get_buffer_content(place.buffer, _part(place), _reader(memory, where))
    memory.store_buffer_content(place.buffer, _part(place), total + product, _reader(memory, where))


def new_accumulator(interpreter: Any, token: Any, value: Any, source: Any) -> tuple[Any, Any]:
    """(token, key) of a buffer in registers that holds `value`."""
    registers = gpu_core.MemorySpace.REGS
    if _HAS_MESH:
        request = {
            "compute_unit": interpreter.thread,
            "memory_space_id": shared_memory.get_memory_space_idx(registers),
            "initial_ref_count": 1,
        }
    else:
        request = {
            "device_id": jnp.int32(interpreter.device_info.device_id),
            "thread_id": interpreter.thread_id,
            "memory_space_id": gpu_callbacks.get_memory_space_idx(registers),
        }
    token, request = gpu_callbacks.call_make_allocation_request_array(token=token, **request)
    return gpu_callbacks.call_allocate_buffer(
        token=token, allocation_request_as_array=request, value=value, **_named(interpreter, source)
    )


def take_accumulator(interpreter: Any, token: Any, key: Any, shape: jax.ShapeDtypeStruct, source: Any) -> tuple:
    """(token, value) of a buffer in registers, which is gone then."""
    named = _named(interpreter, source)
    token, value = gpu_callbacks.call_get(
        token=token, result_shape_and_dtype=shape, allocation_key_as_array=key, transforms=(), **named
    )
    return gpu_callbacks.call_deallocate_buffer(token=token, allocation_key_as_array=key, **named), value


def allowed_in_flight(eqn: Any, values: list) -> Any:
    """How many operations a wait leaves unfinished: an operand in some releases, static in others."""
    return eqn.params["n"] if "n" in eqn.params else values[0]


def _named(interpreter: Any, source: Any) -> dict[str, Any]:
    """The position as the interpreter's own calls name it."""
    names = ("mesh_location", "thread") if _HAS_MESH else ("device_id", "grid_point_coords", "thread_id")
    return dict(zip(names, position_of(interpreter), strict=True)) | {"source_info": source}
