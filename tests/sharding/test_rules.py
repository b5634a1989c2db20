"""The table from logical axes to mesh axes, and the mesh it speaks of."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from sharding.mesh import MESH_AXES, make_mesh
from sharding.rules import DEFAULT_RULES, logical_to_spec, named_sharding


def test_specs_of_the_default_rules():
    assert logical_to_spec(("embed", "heads")) == PartitionSpec(None, "model")
    assert logical_to_spec(("ffn", "embed")) == PartitionSpec(("attn", "model"), None)
    assert logical_to_spec((None, "kv_heads", None)) == PartitionSpec(None, "model", None)
    assert logical_to_spec(()) == PartitionSpec()


def test_every_rule_names_mesh_axes():
    assert {axis for axes in DEFAULT_RULES.values() for axis in axes} == set(MESH_AXES)


def test_a_mesh_axis_is_used_once():
    with pytest.raises(ValueError, match="'model' is claimed by both 'heads' and 'ffn'"):
        logical_to_spec(("heads", "ffn"))
    with pytest.raises(ValueError, match="'a' is claimed by both 'x' and 'x'"):
        logical_to_spec(("x",), {"x": ("a", "a")})


def test_unknown_axis():
    with pytest.raises(ValueError, match="logical axis must be one of .*heads.*, got 'head'"):
        logical_to_spec(("head",))


def test_mesh_of_one_device():
    mesh = make_mesh(devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "attn": 1, "model": 1}
    assert named_sharding(mesh, ("vocab", "embed")).shard_shape((8, 4)) == (8, 4)


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_bad_mesh_size(size):
    with pytest.raises(ValueError, match="mesh axis attn must be an integer >= 1"):
        make_mesh(attn=size)


def test_mesh_larger_than_the_devices():
    with pytest.raises(ValueError, match="needs 4 devices, got 1"):
        make_mesh(data=2, model=2, devices=jax.devices()[:1])
