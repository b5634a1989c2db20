"""Test of the machine code of products on this processor, before it is used."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxengine.pallas_kernels.matmul.native.code import HANDLERS, JOB, TILE
from jaxengine.pallas_kernels.native.library import UnfitError


def check(address_of: Callable[[str], int]) -> None:
    """Test every handler's function NAME_rows. address_of(name): its address. Raises UnfitError if a product differs
    from numpy's.
    """
    for handler, (kind, is_table) in HANDLERS.items():
        _check(kind, is_table, address_of(f"{handler}_rows"))


def _check(kind: str, is_table: bool, address: int) -> None:
    """Test the function NAME_rows at `address`: multiply a small random matrix of this kind (a table if is_table) and
    compare with numpy. Raises UnfitError if results differ.
    """
    rng = np.random.default_rng(0)
    rows, inputs, outputs, groups = 7, 128, 2 * TILE, 2
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    if kind == "float32":
        matrix = wide = rng.standard_normal((inputs, outputs)).astype(np.float32)
    elif kind in ("bfloat16", "dots"):
        bits = rng.standard_normal((inputs, outputs)).astype(np.float32).view(np.uint32) & 0xFFFF0000
        matrix, wide = (bits >> 16).astype(np.uint16), bits.view(np.float32)
    else:
        codes = rng.integers(-8, 8, (inputs, outputs), np.int8)
        matrix = codes if kind == "int8" else (codes[0::2] & 15 | codes[1::2] << 4).view(np.uint8)
        wide = codes.astype(np.float32)
    scales, zeros = (rng.standard_normal((groups, outputs)).astype(np.float32) for _ in range(2))
    if is_table and kind == "bfloat16":  # which has none
        scales, zeros = np.ones_like(scales), np.zeros_like(zeros)
    if kind == "dots":
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    each, panel = inputs // groups, len(matrix) // groups
    exact = x.astype(np.float64) @ (wide * np.repeat(scales, each, axis=0) - np.repeat(zeros, each, axis=0))
    y = np.full((rows, outputs), np.nan, np.float32)
    sums = x.reshape(rows, groups, -1).sum(axis=2)
    if is_table:
        matrix = np.ascontiguousarray(matrix.T)
        x = np.ascontiguousarray(x.reshape(rows, -1, 16, 2).swapaxes(2, 3)) if kind == "pairs" else x
    if kind == "dots":
        x = (x.view(np.uint32) >> 16).astype(np.uint16)
    arrays = {"x": x, "matrix": matrix, "scales": scales, "zeros": zeros, "y": y, "sums": sums}
    numbers = {"blocks": 1, "width": outputs, "rows": rows, "inputs": inputs, "outputs": outputs}
    numbers |= {"panels": groups, "panel": panel, "each": 1}
    JOB.run(address, numbers, arrays)
    if not np.allclose(y, exact, rtol=0, atol=1e-5 * np.abs(exact).max()):
        raise UnfitError(f"products of {kind}{'s of a table' * is_table} are wrong on this processor")
