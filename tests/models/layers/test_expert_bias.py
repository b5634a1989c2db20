"""Biases of experts whose matrices several devices have slices of."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxengine.models.layers.experts import moe
from tests.models.layers.test_moe import CONFIG, EXPERTS, make_layer, tokens


def test_one_of_the_devices_that_add_up_has_the_bias_of_down(monkeypatch):
    layer = make_layer(replace(CONFIG, experts=replace(EXPERTS, bias=True)))
    rows, sizes = tokens(24), jnp.full(8, 3, jnp.int32)
    alone = layer._multiply(rows, sizes, None)
    monkeypatch.setattr(moe, "num_shards", lambda axis: 2)
    found = []
    for device in range(2):
        monkeypatch.setattr(moe, "shard_index", lambda axis, device=device: jnp.int32(device))
        found.append(layer._multiply(rows, sizes, None))
    assert layer.down_bias is not None
    bias = np.repeat(np.asarray(layer.down_bias[...]), 3, axis=0)
    assert np.abs(bias).max() > 0.01
    np.testing.assert_array_equal(found[0], alone)
    np.testing.assert_allclose(found[0] - found[1], bias, rtol=0, atol=2e-5)  # of results as large as 20
