"""Meshes with axes of a user's own: which devices become replicas and which split heads, and which axes are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxengine import LLM
from jaxengine.config.engine_config import ConfigError
from jaxengine.runner.start.mesh_axes import devices_by_axes
from tests.tables import each_row


def mesh(**sizes: int) -> Any:
    """A mesh of numbered devices."""
    shape = tuple(sizes.values())
    return SimpleNamespace(axis_names=tuple(sizes), devices=np.arange(np.prod(shape)).reshape(shape))


@each_row(
    "sizes, axes, found, is_exact",
    [
        ({"data": 2, "attn": 1, "model": 2}, None, [[[0, 1]], [[2, 3]]], True),
        ({"fsdp": 2, "tp": 2}, {"fsdp": "data", "tp": "tensor"}, [[[0, 1]], [[2, 3]]], False),
        ({"tp": 2, "fsdp": 2}, {"fsdp": "data", "tp": "tensor"}, [[[0, 2]], [[1, 3]]], False),
        ({"dp": 2, "fsdp": 2, "tp": 1}, {"dp": "data", "fsdp": "data"}, [[[0]], [[1]], [[2]], [[3]]], True),
        ({"pp": 1, "x": 4, "ep": 1}, {"x": "tensor"}, [[[0, 1, 2, 3]]], False),
        ({"tensor": 2, "data": 2}, None, [[[0, 2]], [[1, 3]]], False),
        ({"sp": 2, "tp": 2}, {"sp": "attn", "tp": "model"}, [[[0, 1], [2, 3]]], True),
        ({"tp": 2, "sp": 2}, {"sp": "attn", "tp": "model"}, [[[0, 2], [1, 3]]], True),
        ({"a": 2, "b": 2}, {"a": "tensor", "b": "tensor"}, [[[0, 1, 2, 3]]], False),
        ({"x": 1}, None, [[[0]]], True),
        # One name of ours may mean another.
        ({"data": 2, "model": 2}, {"data": "tensor", "model": "data"}, [[[0, 2]], [[1, 3]]], False),
    ],
)
def test_where_the_devices_of_a_mesh_go(sizes, axes, found, is_exact):
    devices, exact = devices_by_axes(mesh(**sizes), axes)
    assert (devices.tolist(), exact) == (found, is_exact)


@each_row(
    "sizes, axes, said",
    [
        ({"fsdp": 2, "tp": 2}, {"fsdp": "data"}, "mesh has an axis 'tp' of 2 devices, whose meaning is not known"),
        ({"fsdp": 2, "tp": 2}, None, "'fsdp' of 2 devices, .*mesh_axes={'fsdp': ...} with one of data, tensor"),
        ({"tp": 2}, {"tp": "tensor", "ep": "data"}, "mesh_axes is 'ep'; allowed: axes of the mesh: tp"),
        ({"tp": 2}, {"tp": "experts"}, r"mesh_axes\['tp'\] is 'experts'; allowed: data, tensor, attn, model"),
        ({"tp": 2}, {"tp": None}, r"mesh_axes\['tp'\] is None; allowed: data, tensor, attn, model"),
        ({"tp": 2, "model": 2}, {"tp": "tensor"}, "mesh_axes is .*; allowed: tensor, or attn and model; not both"),
        ({"tp": 2}, [("tp", "tensor")], "mesh_axes is .*; allowed: a dict from axes of the mesh"),
    ],
)
def test_axes_that_cannot_be_told_are_named(sizes, axes, said):
    with pytest.raises(ConfigError, match=said):
        devices_by_axes(mesh(**sizes), axes)


def test_a_meaning_needs_a_mesh():
    with pytest.raises(ConfigError, match="mesh_axes is .*; allowed: None without a mesh"):
        LLM(mesh_axes={"tp": "tensor"})
