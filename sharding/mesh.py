"""Device mesh of three named axes, all of them always present."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxengine.sharding.layout import MESH_AXES, MeshLayout


def make_mesh(layout: MeshLayout, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh over the first layout.size of `devices` (None: all of jax's), in order, with the axis `model`
    varying fastest. Raises ValueError if there are too few devices.
    """
    available = jax.devices() if devices is None else list(devices)
    shape = {name: getattr(layout, name) for name in MESH_AXES}
    if layout.size > len(available):
        raise ValueError(f"a mesh of {shape} needs {layout.size} devices, got {len(available)}")
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    return Mesh(np.array(available[: layout.size]).reshape(*shape.values()), MESH_AXES, axis_types=axis_types)
