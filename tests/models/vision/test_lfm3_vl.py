"""LFM3-VL's convolutions over the grid of patches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from jaxengine.models.build import Build
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.registry import read_hf
from jaxengine.models.vision.lfm3_vl import GridConv, taps_of
from jaxengine.sharding.layout import MESH_AXES, MeshLayout
from tests.fixtures.drawn_weights import checkpoint


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


def test_a_device_that_splits_a_batch_has_its_own_patches_under_the_taps():
    """Two devices of the axis "attn", which share the weights of MLPs and exchange rows for these, have half of the
    patches each.
    """
    tower = read_hf(read_config_json(checkpoint("lfm3_vl_odd_vision"))).tower
    conv = nnx.eval_shape(lambda: GridConv(tower, Build("float32", mesh=MeshLayout(attn=2))))
    graph, state = nnx.split(conv)

    def run(state, x, columns):
        named = dict(zip(tower.columns, columns, strict=True))
        return nnx.merge(graph, state)(x, tuple(taps_of(named, tower.spatial_merge_size, tower.conv_kernel)))

    rows, mesh = PartitionSpec("attn"), AbstractMesh((1, 2, 1), MESH_AXES)
    specs = jax.tree.map(lambda leaf: PartitionSpec(), state)
    inputs = specs, rows, PartitionSpec(None, "attn")
    shared = jax.shard_map(run, mesh=mesh, in_specs=inputs, out_specs=rows, check_vma=False)
    x = jax.ShapeDtypeStruct((32, tower.hidden_size), jnp.float32)
    columns = jax.ShapeDtypeStruct((len(tower.columns), 32), jnp.int32)
    assert jax.eval_shape(shared, state, x, columns).shape == x.shape
