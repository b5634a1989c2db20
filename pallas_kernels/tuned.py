"""Sizes of products with quantised matrices that were tried out, by chip: those of a shape, or of the nearest one.

The table is `tuned_products.py`, which `jaxengine tune` writes. It changes how long a product takes and in which form
and order its sums are taken, never what is computed.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.tuned_products import TABLE
from pallas_kernels.tuning import card_of_trace, tuning_of

logger = logging.getLogger(__name__)

# What jax calls the chips of the table.
_TPUS = {"v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "7x": "tpu7x"}


class Entry(NamedTuple):
    """A row of the table: rows [rows, size] times a matrix [size, out] in groups of so many inputs."""

    rows: int
    size: int
    out: int
    group: int
    codes: str  # as they are stored
    sizes: dict[str, int]  # fields of tuning.TpuProducts or tuning.HopperProducts that differ from the usual ones

    def distance(self, rows: int, size: int, out: int, group: int) -> float:
        """In doublings; outputs, of which tiles are only more or fewer, count half."""
        pairs = (rows, self.rows), (size, self.size), (group, self.group), (out, self.out)
        steps = [abs(math.log2(a / b)) for a, b in pairs]
        return sum(steps[:3]) + steps[3] / 2


def product_sizes(platform: str, rows: int, size: int, out: int, num_scales: int, codes: Any) -> Any:
    """The sizes for a product on the chip of the current trace: of its part of `tuning`, with what the table says."""
    tuning = tuning_of(platform)
    usual = tuning.tpu_products if platform == "tpu" else tuning.hopper_products
    chip = _chip_of_trace(platform)
    found = nearest(chip, rows, size, out, size // num_scales, jnp.dtype(codes).name)
    if found is None:
        return usual
    if found.distance(rows, size, out, size // num_scales):
        _say_once(chip, size, out, found.size, found.out)
    return replace(usual, **found.sizes)


def nearest(chip: str, rows: int, size: int, out: int, group: int, codes: str) -> Entry | None:
    """The entry for a shape or the one that is least far from it; None where there is none of such codes."""
    entries = (Entry(*row) for row in TABLE.get(chip, ()) if row[4] == codes)
    return min(entries, key=lambda entry: entry.distance(rows, size, out, group), default=None)


@functools.cache
def _say_once(chip: str, *sizes: int) -> None:
    text = "%s: products [%d, %d] are not tuned, sizes of [%d, %d] are taken (jaxengine tune)"
    logger.info(text, chip, *sizes)


def _chip_of_trace(platform: str) -> str:
    """Its name in the table; "" where it is not known."""
    if platform == "gpu":
        return "sm_90" if (card := card_of_trace()) is not None and card.hopper else ""
    from jax.experimental.pallas import tpu as pltpu

    if not pltpu.is_tpu_device():
        return ""
    return _TPUS.get(str(getattr(pltpu.get_tpu_info().chip_version, "value", "")), "")
