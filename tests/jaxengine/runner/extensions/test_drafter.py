"""Descriptions of a drafter's pages: equal for equal weights, however many devices share its experts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from jaxengine.models.build import Build
from jaxengine.models.params.declare import declared_params
from jaxengine.models.registry import build_next_token, read_hf
from jaxengine.runner.extensions.drafts.drafter import Drafter
from jaxengine.sharding.layout import MeshLayout
from tests.fixtures.drawn_weights import FOLDER


def described(devices: int, seed: int) -> tuple[str, int]:
    """What an MTP layer says of its pages, and how many of its matrices are of no expert."""
    config = read_hf(json.loads((FOLDER / "qwen3_next" / "config.json").read_text()))
    layer = build_next_token(config, Build("float32", mesh=MeshLayout(devices, expert_parallel=True)))
    rng, params, unused = np.random.default_rng(seed), list[jnp.ndarray](), 0
    for param in declared_params(layer):
        own, room = rng.standard_normal(param.own_shape, np.float32), np.zeros(param.shape, np.float32)
        room[tuple(map(slice, own.shape))] = own
        params.append(jnp.asarray(room))
        unused += len(room) - len(own)
    drafter = Drafter.__new__(Drafter)
    drafter.programs, drafter.params = SimpleNamespace(model=layer, pages_description="a layer"), params
    return drafter.describe_pages(), unused


def test_matrices_of_no_expert_are_no_part_of_what_pages_depend_on():
    (alone, none), (shared, unused) = described(1, 0), described(4, 0)
    assert none == 0 < unused
    assert shared == alone != described(4, 1)[0]
