"""Tuned sizes of products with quantised matrices, by chip: those of the same shape, or of the nearest one.

The table is `tuned_products.py`, which `jaxengine tune` writes. Sizes change how long a product takes and in which form
and order its sums are taken, never what is computed.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxengine.pallas_kernels.cards import card_of_trace
from jaxengine.pallas_kernels.tuned_products import TABLE
from jaxengine.pallas_kernels.tuning import tuning_of

logger = logging.getLogger(__name__)

# jax's names of TPU chips, and the table's.
_TPUS = {"v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "7x": "tpu7x"}


class Entry(NamedTuple):
    """One row of the table: rows [rows, size] times a matrix [size, out] in groups of `group` inputs.

    Attributes:
      codes: dtype of the stored codes.
      sizes: fields of tuning.TpuProducts or tuning.HopperProducts that differ from their defaults.
    """

    rows: int
    size: int
    out: int
    group: int
    codes: str
    sizes: dict[str, int]

    def distance(self, rows: int, size: int, out: int, group: int) -> float:
        """Return the distance of the entry's shape from another shape: the sum of the factors' base-2 logarithms, where
        that of the outputs counts half, as outputs only change the number of tiles.

        rows, size, out, group: rows, inputs and outputs of the product, and inputs per scale.
        """
        pairs = (rows, self.rows), (size, self.size), (group, self.group), (out, self.out)
        steps = [abs(math.log2(a / b)) for a, b in pairs]
        return sum(steps[:3]) + steps[3] / 2


def product_sizes(platform: str, rows: int, size: int, out: int, num_scales: int, codes: Any) -> Any:
    """Return the sizes for a product on the chip of the current trace: the platform's part of `tuning`, with the
    changes of the nearest entry of the table if the chip has an entry for such codes.

    platform: "tpu", for TpuProducts, or "gpu", for HopperProducts. The product is of rows [rows, size] and a matrix
    [size, out] of `codes`, a dtype, with num_scales scales along its inputs. Logs (INFO), once per chip and shape, that
    the entry of another shape is used.
    """
    tuning = tuning_of(platform)
    defaults = tuning.tpu_products if platform == "tpu" else tuning.hopper_products
    chip = _chip_of_trace(platform)
    entry = nearest(chip, rows, size, out, size // num_scales, jnp.dtype(codes).name)
    if entry is None:
        return defaults
    if entry.distance(rows, size, out, size // num_scales):
        _say_once(chip, size, out, entry.size, entry.out)
    return replace(defaults, **entry.sizes)


def nearest(chip: str, rows: int, size: int, out: int, group: int, codes: str) -> Entry | None:
    """Return the chip's entry with the least distance to a product's shape, among those for such codes, the first of
    equals; None if there is none.

    rows, size, out, group: see Entry.distance. codes: name of the codes' dtype.
    """
    entries = (Entry(*row) for row in TABLE.get(chip, ()) if row[4] == codes)
    return min(entries, key=lambda entry: entry.distance(rows, size, out, group), default=None)


@functools.cache
def _say_once(chip: str, *sizes: int) -> None:
    """Log (INFO), once per process for each chip (its name in the table) and sizes, that the product [sizes[0],
    sizes[1]] is not tuned and uses the sizes of [sizes[2], sizes[3]], both [inputs, outputs].
    """
    text = "%s: products [%d, %d] are not tuned, sizes of [%d, %d] are taken (jaxengine tune)"
    logger.info(text, chip, *sizes)


def _chip_of_trace(platform: str) -> str:
    """Return the table's name of the chip that the current trace is for. platform: "gpu", for which the name is "sm_90"
    on Hopper cards, or "tpu". Returns "" if the table has no such chip.
    """
    if platform == "gpu":
        return "sm_90" if (card := card_of_trace()) is not None and card.hopper else ""
    from jax.experimental.pallas import tpu as pltpu

    if not pltpu.is_tpu_device():
        return ""
    return _TPUS.get(str(getattr(pltpu.get_tpu_info().chip_version, "value", "")), "")
