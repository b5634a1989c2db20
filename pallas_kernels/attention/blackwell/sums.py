"""Sums in tensor memory: loads to registers, and scaling in place."""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

PIECE = 32  # columns of sums that are in registers at a time


def load_sums(sums: Any) -> Any:
    """Start loading sums f32 [128, columns] from tensor memory to registers, a lane for each row, and return them;
    `wait_load_tmem` waits for the load.
    """
    return plgpu.async_load_tmem(sums, layout=plgpu.Layout.TCGEN05)


def columns_of(sums: Any, first: int, end: int) -> Any:
    """Return columns `first` to end - 1 of sums in tensor memory, f32 [128, end - first], after waiting for the
    load.
    """
    piece = load_sums(sums.at[:, pl.ds(first, end - first)])
    plgpu.wait_load_tmem()
    return piece


def scale_sums(sums: Any, factor: Any) -> None:
    """Multiply sums f32 [128, columns] in tensor memory by the factor f32 [128] of their rows, in place, so that later
    products see the result.
    """
    for first in range(0, sums.shape[1], PIECE):
        end = min(first + PIECE, sums.shape[1])
        piece = columns_of(sums, first, end)
        plgpu.async_store_tmem(
            sums.at[:, pl.ds(first, end - first)], piece * lax.broadcast_in_dim(factor, piece.shape, [0])
        )
    plgpu.commit_tmem()
