"""Row counts of the grouped kernel on Hopper GPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.matmul.hopper.grouped import tile_rows_of, tiles_of, why_xla, why_xla_of
from jaxengine.pallas_kernels.matmul.hopper.shape import BFLOAT16, most_rows, step_of
from jaxengine.pallas_kernels.tuning import HopperProducts


def group_step(num_rows: int, num_groups: int) -> int:
    """Return 1, whatever the arguments: group sizes need no padding, because the kernel aligns groups itself."""
    del num_rows, num_groups
    return 1


def multiplied_rows(group_sizes: np.ndarray, x: Any, x_scales: Any, codes: Any, scales: Any, *, gated: bool) -> int:
    """Return the number of rows, padding included, that the Hopper kernel multiplies by a matrix for groups of these
    sizes, in bfloat16 and with the default tile sizes; 0 if XLA computes the product instead.

    x, x_scales, codes, scales: shapes and dtypes of the operation's operands; None for absent ones. gated: whether the
    outputs are gates and ups; not used.
    """
    del gated
    (num_rows, size), (num_groups, _, out), count = x.shape, codes.shape, 1 if scales is None else scales.shape[1]
    plain = scales is None
    if why_xla(size, out, 1, codes.dtype, BFLOAT16) if plain else why_xla_of(x, x_scales, codes, scales, BFLOAT16):
        return 0
    tile = tile_rows_of(num_rows, num_groups, most_rows(size, count, codes.dtype, HopperProducts().rows))
    step = step_of(tile, tensor_memory=False)
    listed = jax.jit(tiles_of, static_argnums=(1, 2, 3))(jnp.asarray(group_sizes, jnp.int32), num_rows, tile, step)
    tiles = np.asarray(listed.tiles).reshape(-1, 3)
    return int(tiles[tiles[:, 0] >= 0, 2].sum()) * step
