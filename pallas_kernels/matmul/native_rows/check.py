"""Test of the machine code of products of many rows on this processor, before it is used."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxengine.pallas_kernels.matmul.native_rows.code import HANDLERS, JOB, TILE, Kind
from jaxengine.pallas_kernels.native.library import UnfitError
from jaxengine.pallas_kernels.native.words import PANELS


def check(address_of: Callable[[str], int]) -> None:
    """Test every handler's function NAME_blocks. address_of(name): its address. Raises UnfitError if a product differs
    from numpy's.
    """
    for handler, kind in HANDLERS.items():
        _check(handler, kind, address_of(f"{handler}_blocks"))


def _check(handler: str, kind: Kind, address: int) -> None:
    """Test the function at `address`: multiply a small random matrix of this kind, five panels, and compare with numpy.
    Raises UnfitError if results differ.
    """
    rng = np.random.default_rng(0)
    rows, inputs, outputs = 13, 3 * PANELS[0] * 5, 3 * TILE
    x, matrix = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, inputs), (inputs, outputs)))
    if kind.per_word == 2:
        x, matrix = ((own.view(np.uint32) & 0xFFFF0000).view(np.float32) for own in (x, matrix))
    exact = x.astype(np.float64) @ matrix
    y = np.full((rows, outputs), np.nan, np.float32)
    matrix = matrix.T if kind.is_table else matrix
    if kind.per_word == 2:
        x, matrix = ((own.view(np.uint32) >> 16).astype(np.uint16) for own in (x, np.ascontiguousarray(matrix)))
    arrays = {"x": x, "matrix": np.ascontiguousarray(matrix), "y": y}
    numbers = {
        "blocks": 4,
        "columns": 2,
        "width": 2 * TILE,
        "height": 7,
        "rows": rows,
        "inputs": inputs,
        "outputs": outputs,
    }
    numbers["panel"] = inputs // 5 // kind.per_word
    JOB.run(address, numbers, arrays)
    if not np.allclose(y, exact, rtol=0, atol=1e-5 * np.abs(exact).max()):
        raise UnfitError(f"results of {handler} are wrong on this processor")
