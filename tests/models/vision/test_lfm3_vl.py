"""LFM3-VL's convolutions over the grid of patches."""

from __future__ import annotations

import numpy as np

from jaxengine.models.vision.lfm3_vl import taps_of


def test_taps_are_a_patchs_neighbours_within_its_own_frame():
    """Frames of two shapes, square by square of 2 x 2 patches, and padding behind them."""
    merge, reach = 2, 2
    places = [
        (frame, high, wide, square // (wide // merge) * merge + down, square % (wide // merge) * merge + right)
        for frame, (high, wide) in enumerate(((4, 6), (2, 4)))
        for square in range(high * wide // merge**2)
        for down in range(merge)
        for right in range(merge)
    ]
    known = {(frame, row, column): at for at, (frame, _, _, row, column) in enumerate(places)}
    _, height, width, row, column = np.asarray([*places, *[(-1,) * 5] * 3], np.int32).T
    columns = {"row": row, "column": column, "height": height, "width": width}
    offsets = [(down, right) for down in range(-reach, reach + 1) for right in range(-reach, reach + 1)]
    for (down, right), (index, inside) in zip(offsets, taps_of(columns, merge, 2 * reach + 1), strict=True):
        wanted = [known.get((frame, high + down, wide + right)) for frame, _, _, high, wide in places] + [None] * 3
        assert [int(at) if found else None for at, found in zip(index, inside, strict=True)] == wanted
