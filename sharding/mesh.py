"""The device mesh: three named axes, always all three, so that no rule depends on which kinds of parallelism are on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

# data: replicas with a scheduler's share of sequences each. attn: devices that split the attention batch but share the
# dense weights' shards. model: tensor parallelism over heads.
MESH_AXES = ("data", "attn", "model")


def make_mesh(*, data: int = 1, attn: int = 1, model: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of data * attn * model devices, neighbours along `model`. Raises ValueError if there are fewer.

    devices: the jax devices to take from, default all.
    """
    shape = {"data": data, "attn": attn, "model": model}
    for name, size in shape.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh axis {name} must be an integer >= 1, got {size!r}")
    available = jax.devices() if devices is None else list(devices)
    count = data * attn * model
    if count > len(available):
        raise ValueError(f"a mesh of {shape} needs {count} devices, got {len(available)}")
    # Auto: the compiler places what the rules leave open.
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    return Mesh(np.array(available[:count]).reshape(data, attn, model), MESH_AXES, axis_types=axis_types)
