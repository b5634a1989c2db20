"""What a Mosaic GPU kernel may not do with shared memory, watched while the interpreter runs it.

Each function is told of one operation of one warpgroup, in that warpgroup's order. wgmma is asynchronous here: its
operands count as read until it is awaited, so that a buffer handed back too early is a race. A lint adds what jax's
interpreter does not model, or not in every release: shared memory that is written and then read by wgmma, by a TMA
store or by another warpgroup without `commit_smem`; rewritten before `wait_smem_to_gmem`; loaded into while other warps
of the same warpgroup may read it; stores still in flight when the kernel ends; arrivals that nobody has waited for by
then; read, written or loaded into by a warpgroup that nobody has told that a load into it has come; and tensor memory
that a product writes where loads from it have not been awaited. The interpreter copies at once and in order, where TMA
loads end as they please: a wait for a later load says nothing of an earlier one.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from typing import Any

import numpy as np

from tests.pallas_kernels import findings
from tests.pallas_kernels.mosaic_gpu_memory import (
    Place,
    Where,
    add_to,
    begin_product,
    content,
    end_product,
    overlap,
    place_of,
    within,
    without,
)

UNCOMMITTED = "shared memory written, then read by {} without commit_smem"


class _Warpgroup:
    """What one warpgroup of one block has in flight."""

    def __init__(self) -> None:
        self.uncommitted: list[Place] = []  # written and not yet visible to wgmma, TMA and others
        self.stores: list[list[Place]] = [[]]  # groups of TMA stores that still read shared memory, the last one open
        self.products: list[tuple] = []  # operands of wgmma operations not yet awaited, and what `end_product` wants
        self.reads: list[Place] = []  # what some of its four warps may still be reading
        self.arrived: set[int] = set()  # numbers of the loads that it knows to have come
        self.sums: list[Place] = []  # of tensor memory, that are on their way to registers


class _Block:
    """The TMA loads of a block: by number where each went to, as far as no later one did, and by barrier those that who
    waits for it knows of."""

    def __init__(self) -> None:
        self.places: dict[int, list[Place]] = {}
        self.told: dict[tuple, set[int]] = defaultdict(set)

    def tell(self, barrier: Any, numbers: set[int]) -> None:
        key = tuple(map(int, barrier))
        self.told[key] = (self.told[key] | numbers) & self.places.keys()


_WARPGROUPS: dict[tuple, _Warpgroup] = defaultdict(_Warpgroup)
_BLOCKS: dict[tuple, _Block] = defaultdict(_Block)
_LOCK, _NUMBERS = threading.Lock(), itertools.count()  # loads are what several warpgroups look at


def clear() -> None:
    _WARPGROUPS.clear()
    _BLOCKS.clear()


def end_of_kernel() -> None:
    if any(group for warpgroup in _WARPGROUPS.values() for group in warpgroup.stores):
        findings.add("TMA stores still in flight when a kernel ends")
    clear()


def end_of_barrier(observed: bool) -> None:
    """observed: whether somebody waited for its last completion. On a card it may come when another CTA is there."""
    if not observed:
        findings.add("an arrival at a barrier that nobody waits for before the block ends")


def _of(where: Where) -> _Warpgroup:
    return _WARPGROUPS[where.warpgroup]


def _found(where: Where, message: str) -> None:
    findings.add(f"{message} at {where.line()}")


def _check_arrived(where: Where, place: Place, done: str = "read") -> None:
    with _LOCK:
        own, known = _BLOCKS[where.block].places, _of(where).arrived
        if any(number not in known and overlap(loaded, place) for number, loaded in own.items()):
            _found(where, f"shared memory {done} without a wait for the TMA load into it")


def on_write(where: Where, key: Any, transforms: tuple) -> None:
    place = place_of(key, transforms)
    _check_arrived(where, place, "written")
    if any(overlap(group, place) for group in _of(where).stores):
        _found(where, "shared memory rewritten before wait_smem_to_gmem")
    _of(where).uncommitted.append(place)


def on_read(where: Where, key: Any, transforms: tuple) -> None:
    place = place_of(key, transforms)
    _check_arrived(where, place)
    _of(where).reads.append(place)


def on_load(where: Where, key: Any, transforms: tuple, barrier: Any, *, shape: tuple[int, ...]) -> None:
    """shape: of the whole buffer."""
    place = within(place_of(key, transforms), shape)
    if overlap(_of(where).reads, place):
        _found(where, "shared memory read, then overwritten by this warpgroup's own TMA load without a barrier")
    _check_arrived(where, place, "loaded into")
    with _LOCK:
        block, number = _BLOCKS[where.block], next(_NUMBERS)
        left = {each: [part for one in parts for part in without(one, place)] for each, parts in block.places.items()}
        block.places = {each: parts for each, parts in left.items() if parts} | {number: [place]}
        block.tell(barrier, {number})


def on_barrier_wait(where: Where, barrier: Any) -> None:
    """A wait that is over: the warpgroup knows what all who arrived at the barrier knew, and of the loads behind it."""
    with _LOCK:
        block = _BLOCKS[where.block]
        _of(where).arrived = (_of(where).arrived | block.told[tuple(map(int, barrier))]) & block.places.keys()


def on_commit(where: Where) -> None:
    _of(where).uncommitted.clear()
    _of(where).reads.clear()


def on_arrive(where: Where, barrier: Any) -> None:
    if _of(where).uncommitted:
        _found(where, "shared memory written, then handed over by barrier_arrive without commit_smem")
    with _LOCK:
        _BLOCKS[where.block].tell(barrier, _of(where).arrived)


def on_tensor_product(where: Where, sums: tuple, operands: list[tuple], barrier: Any) -> None:
    """tcgen05 writes `sums`, (key, transforms) of tensor memory, and reads `operands`, such of shared memory; who waits
    for `barrier`, or None, knows then what this warpgroup knows. jax's own interpreter holds its reads against what
    others write."""
    if overlap(_of(where).sums, place_of(*sums)):
        _found(where, "tensor memory loaded, then overwritten without wait_load_tmem")
    for key, transforms in operands:
        place = place_of(key, transforms)
        _check_arrived(where, place)
        if overlap(_of(where).uncommitted, place):
            _found(where, UNCOMMITTED.format("tcgen05"))
    if barrier is not None:
        on_tensor_arrive(where, barrier)


def on_tensor_load(where: Where, key: Any, transforms: tuple) -> None:
    _of(where).sums.append(place_of(key, transforms))


def on_tensor_load_wait(where: Where) -> None:
    _of(where).sums.clear()


def on_tensor_arrive(where: Where, barrier: Any) -> None:
    """The tensor cores will arrive at a barrier, which hands no shared memory over but what they have read."""
    with _LOCK:
        _BLOCKS[where.block].tell(barrier, _of(where).arrived)


def on_store(where: Where, key: Any, transforms: tuple, *, closes: bool) -> None:
    place, stores = place_of(key, transforms), _of(where).stores
    _check_arrived(where, place)
    if overlap(_of(where).uncommitted, place):
        _found(where, UNCOMMITTED.format("TMA"))
    stores[-1].append(place)
    if closes:
        stores.append([])


def on_close(where: Where) -> None:
    _of(where).stores.append([])


def on_store_wait(where: Where, allowed: Any) -> None:
    warpgroup = _of(where)
    warpgroup.reads.clear()  # a wait joins the four warps
    *closed, last = warpgroup.stores
    warpgroup.stores = [*(closed[len(closed) - int(allowed) :] if int(allowed) else []), last]


def on_product(where: Where, accumulator: Any, a: Any, a_transforms, b: Any, b_transforms, *, dtype) -> None:
    """wgmma: accumulator += a @ b; transforms are None for an operand in registers, which is `a` itself."""
    operands, places = [], []
    for key, transforms in ((a, a_transforms), (b, b_transforms)):
        if transforms is None:
            operands.append(np.asarray(key, dtype))
            continue
        place = place_of(key, transforms)
        _check_arrived(where, place)
        if overlap(_of(where).uncommitted, place):
            _found(where, UNCOMMITTED.format("wgmma"))
        operands.append(content(place, where).astype(dtype))
        places.append(place)
    add_to(accumulator, operands[0] @ operands[1], where)
    _of(where).products.append((places, begin_product(places, where)))


def on_product_wait(where: Where, allowed: Any) -> None:
    """The products that end here have read their operands up to now."""
    products = _of(where).products
    while len(products) > int(allowed):
        end_product(*products.pop(0), where)
