"""New weights of a model with a memory of n-grams, which come without the map of tokens: the engine keeps its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.weights.formats.arrays import ArraySource
from jaxengine.runner.weights import kept_maps, sleep
from jaxengine.runner.weights.kept_maps import then_kept_maps, with_kept_maps


@pytest.fixture(params=["awake", "asleep", "asleep without weights"])
def stages(request, monkeypatch) -> list[Any]:
    """A stage whose leaves are a norm and a map, also after it has fallen asleep at either level; one without a map."""
    sources = {"layers.0.memory.token_map": "model.layers.1.engram.token_map", "layers.0.norm.weight": "norm"}
    params = [
        SimpleNamespace(name=name, decl=SimpleNamespace(sources=[SimpleNamespace(name=source)]))
        for name, source in sources.items()
    ]
    monkeypatch.setattr(kept_maps, "declared_params", lambda model: params)
    monkeypatch.setattr(kept_maps, "abstract_leaves", lambda model, mesh: [(param.name, None) for param in params])
    leaves: list[Any] = [jnp.arange(3), jnp.zeros(2)]
    if request.param != "awake":
        monkeypatch.setattr(sleep, "abstract_leaves", kept_maps.abstract_leaves)
        monkeypatch.setattr(sleep, "declared_pools", lambda model: [])
        stage = SimpleNamespace(params=leaves, programs=SimpleNamespace(model=None, mesh=None))
        sleep.release_weights(cast(Any, SimpleNamespace(stages=[stage])), keep=request.param == "asleep")
        assert (leaves[1].host is None) == (request.param != "asleep")
    return [(None, None, leaves), (None, None, [None, None])]


def test_kept(stages):
    name, norm = "model.layers.1.engram.token_map", np.ones(2, np.float32)
    assert {each: [*array] for each, array in then_kept_maps([("norm", norm)], stages)} == {
        "norm": [1, 1],
        name: [0, 1, 2],
    }
    view = with_kept_maps(ArraySource({"norm": norm}), stages)
    assert [*view.names()] == ["norm", name] and view.read(name).tolist() == [0, 1, 2]
    given = {"layers.1.engram.token_map": np.zeros(3, np.int64)}
    stored = ArraySource(given)
    assert [*then_kept_maps(given.items(), stages)] == [*given.items()] and with_kept_maps(stored, stages) is stored
    assert with_kept_maps(stored_norm := ArraySource({"norm": norm}), stages[1:]) is stored_norm
