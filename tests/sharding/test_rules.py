"""The table from logical axes to mesh axes, and the mesh it speaks of."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxengine.sharding.layout import MESH_AXES, ONE_DEVICE, RULES, MeshLayout
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.rules import logical_to_spec, named_sharding


@pytest.mark.versions
def test_specs_of_the_default_rules():
    assert logical_to_spec(("embed", "heads")) == PartitionSpec(None, "model")
    assert logical_to_spec(("ffn", "embed")) == PartitionSpec(("attn", "model"), None)
    assert logical_to_spec((None, "kv_heads", None)) == PartitionSpec(None, "model", None)
    assert logical_to_spec(()) == PartitionSpec()


def test_every_rule_names_mesh_axes():
    assert {axis for axes in RULES.values() for axis in axes} == set(MESH_AXES)


def test_a_mesh_axis_is_used_once():
    with pytest.raises(ValueError, match="'model' is claimed by both 'heads' and 'ffn'"):
        logical_to_spec(("heads", "ffn"))
    with pytest.raises(ValueError, match="'a' is claimed by both 'x' and 'x'"):
        logical_to_spec(("x",), {"x": ("a", "a")})


def test_unknown_axis():
    with pytest.raises(ValueError, match="logical axis must be one of .*heads.*, got 'head'"):
        logical_to_spec(("head",))


@pytest.mark.versions
def test_mesh_of_one_device():
    mesh = make_mesh(ONE_DEVICE, jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "attn": 1, "model": 1}
    assert named_sharding(mesh, ("vocab", "embed")).shard_shape((8, 4)) == (8, 4)


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_bad_mesh_size(size):
    with pytest.raises(ValueError, match="mesh axis attn must be an integer >= 1"):
        MeshLayout(attn=size)


def test_mesh_larger_than_the_devices():
    with pytest.raises(ValueError, match="needs 4 devices, got 1"):
        make_mesh(MeshLayout(data=2, model=2), jax.devices()[:1])


@pytest.mark.parametrize(
    "heads, tensor, attn, model",
    [(8, 1, 1, 1), (8, 8, 1, 8), (8, 16, 2, 8), (3, 3, 1, 3), (3, 4, 4, 1), (2, 4, 2, 2), (1, 4, 4, 1), (8, 6, 3, 2)],
)
def test_tensor_parallelism_stores_no_kv_head_twice(heads, tensor, attn, model):
    layout = MeshLayout.for_heads(heads, tensor=tensor, data=2)
    assert layout == MeshLayout(2, attn, model) and layout.num_ranks == 2 * attn and layout.size == 2 * tensor
    assert MeshLayout.for_heads(heads, tensor=tensor, replicate=True) == MeshLayout(1, 1, tensor)


def test_the_vocabulary_is_padded_only_where_it_is_split():
    assert ONE_DEVICE.padded_vocab_size(49153) == 49153
    assert MeshLayout(data=4).padded_vocab_size(49153) == 49153
    assert MeshLayout(attn=2, model=2).padded_vocab_size(49153) == 49664
    assert MeshLayout(model=3).padded_vocab_size(49152) == 49152
