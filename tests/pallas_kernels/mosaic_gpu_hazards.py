"""What a Mosaic GPU kernel may not do with shared memory, watched while the interpreter runs it.

Each function is told of one operation of one warpgroup, in that warpgroup's order. wgmma is asynchronous here: its
operands count as read until it is awaited, so that a buffer handed back too early is a race. A lint adds what jax's
interpreter does not model, or not in every release: shared memory that is written and then read by wgmma, by a TMA
store or by another warpgroup without `commit_smem`; rewritten before `wait_smem_to_gmem`; loaded into while other
warps of the same warpgroup may read it; stores still in flight when the kernel ends.
"""

from __future__ import annotations

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
)

UNCOMMITTED = "shared memory written, then read by {} without commit_smem"


class _Warpgroup:
    """What one warpgroup of one block has in flight."""

    def __init__(self) -> None:
        self.uncommitted: list[Place] = []  # written and not yet visible to wgmma, TMA and others
        self.stores: list[list[Place]] = [[]]  # groups of TMA stores that still read shared memory, the last one open
        self.products: list[tuple] = []  # operands of wgmma operations not yet awaited, and what `end_product` wants
        self.reads: list[Place] = []  # what some of its four warps may still be reading


_WARPGROUPS: dict[tuple, _Warpgroup] = defaultdict(_Warpgroup)


def clear() -> None:
    _WARPGROUPS.clear()


def end_of_kernel() -> None:
    if any(group for warpgroup in _WARPGROUPS.values() for group in warpgroup.stores):
        findings.add("TMA stores still in flight when a kernel ends")
    clear()


def _of(where: Where) -> _Warpgroup:
    return _WARPGROUPS[where.warpgroup]


def _found(where: Where, message: str) -> None:
    findings.add(f"{message} at {where.line()}")


def on_write(where: Where, key: Any, transforms: tuple) -> None:
    place = place_of(key, transforms)
    if any(overlap(group, place) for group in _of(where).stores):
        _found(where, "shared memory rewritten before wait_smem_to_gmem")
    _of(where).uncommitted.append(place)


def on_read(where: Where, key: Any, transforms: tuple) -> None:
    _of(where).reads.append(place_of(key, transforms))


def on_load(where: Where, key: Any, transforms: tuple) -> None:
    if overlap(_of(where).reads, place_of(key, transforms)):
        _found(where, "shared memory read, then overwritten by this warpgroup's own TMA load without a barrier")


def on_commit(where: Where) -> None:
    _of(where).uncommitted.clear()
    _of(where).reads.clear()


def on_arrive(where: Where) -> None:
    if _of(where).uncommitted:
        _found(where, "shared memory written, then handed over by barrier_arrive without commit_smem")


def on_store(where: Where, key: Any, transforms: tuple, *, closes: bool) -> None:
    place, stores = place_of(key, transforms), _of(where).stores
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
