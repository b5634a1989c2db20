"""Experts of a forward pass: transformers' own choices, and those that a rollout gives in the router's place."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine.models.config.taps import EXPERTS, ROUTER, Tap
from jaxengine.models.layers.taps import Taps
from jaxengine.models.registry import read_folder
from jaxengine.models.unpaged import run_unpaged
from jaxengine.rl import forward, log_probs
from jaxengine.rl.arguments import _experts_shape
from jaxengine.runner.extensions.routed_experts import RoutedExpertsExtension
from tests.fixtures.drawn_weights import FOLDER
from tests.models.conftest import load_recorded
from tests.tables import each_row

RECORDED = sorted(path.parent.name for path in FOLDER.glob("*/routed_experts.npz"))


@partial(jax.jit, static_argnums=0)
def _picked(graph, state, tokens, segments):
    model = nnx.merge(graph, state)
    dense = model.config.experts.dense_layers
    taps = [Tap(EXPERTS, layer) for layer in range(model.config.num_layers) if layer not in dense]
    section = Taps(taps)
    run_unpaged(model, tokens[None], segments[None], sections={"taps": section})
    return jnp.stack([section[tap] for tap in taps], axis=1)


def picked(model, *sequences) -> np.ndarray:
    """The experts int32[T, L, k] that a forward pass picks for sequences, one after the other."""
    segments = np.repeat(np.arange(len(sequences), dtype=np.int32), [len(each) for each in sequences])
    return np.asarray(_picked(*nnx.split(model), jnp.asarray(np.concatenate(sequences), jnp.int32), segments))


def transformers_experts(name) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens of each recorded sequence, and the experts [T, L, k] that transformers picks for them, ascending."""
    with np.load(FOLDER / name / "golden.npz") as golden, np.load(FOLDER / name / "routed_experts.npz") as found:
        return [
            (
                np.concatenate([golden[f"token_ids_{number}"], golden[f"greedy_{number}"][:-1]]),
                np.sort(found[f"experts_{number}"], axis=-1),
            )
            for number in range(len(found))
        ]


# Softmax, sigmoid with a correction bias and groups; engines compare those of Qwen3-MoE: test_routed_experts.py.
FEW = ("mixtral", "deepseek_v3")
FURTHER = pytest.mark.thorough("further routers of these kinds")


@each_row("name", FEW)
def test_experts_are_those_that_transformers_picks(name):
    assert_picks(name)


@FURTHER
@each_row("name", [name for name in RECORDED if name not in FEW])
def test_experts_of_further_routers_are_those_that_transformers_picks(name):
    assert_picks(name)


def assert_picks(name: str) -> None:
    tokens, wanted = zip(*transformers_experts(name), strict=True)
    found = picked(load_recorded(name).model, *tokens)
    np.testing.assert_array_equal(np.sort(found, axis=-1), np.concatenate(wanted))


def loss(params, model, tokens, **options):
    return -log_probs(model, params, tokens, **options)[0, 1:].mean()


@pytest.mark.parametrize(
    "name", ["deepseek_v3", *(pytest.param(name, marks=FURTHER) for name in ("qwen3_moe", "llama4", "longcat_flash"))]
)
def test_replayed_choices_of_equal_weights_change_no_bit(name):
    """Whether the router's scores are softmax, sigmoid with a correction bias and groups, or weigh the inputs;
    and where some experts have no weights."""
    recorded = load_recorded(name)
    tokens, params = recorded.prompts[1][None], nnx.state(recorded.model)
    experts = picked(recorded.model, tokens[0])[None].astype(np.uint8)
    replayed = forward(recorded.model, params, tokens, routed_experts=experts)
    np.testing.assert_array_equal(replayed, forward(recorded.model, params, tokens))


def test_gradients_reach_the_router_through_the_weights_of_given_experts():
    recorded = load_recorded("deepseek_v3")
    tokens, params = recorded.prompts[1][None], nnx.state(recorded.model)
    experts = picked(recorded.model, tokens[0])[None].astype(np.uint8)
    wanted = jax.grad(loss)(params, recorded.model, tokens)
    found = jax.grad(loss)(params, recorded.model, tokens, routed_experts=experts, remat=True)
    routers = []
    for (path, own), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.abs(own - other).max() <= 1e-6 * max(1.0, np.abs(other).max()), name
        routers += [np.abs(own).max()] * ("router" in name)
    assert routers and min(routers) > 0


def test_a_trainer_whose_router_has_moved_computes_the_experts_of_the_rollout():
    """Other experts would be picked now. The chosen are weighed by the new router, and what is -1 is its choice."""
    recorded = load_recorded("mixtral")
    model, tokens = recorded.model, recorded.prompts[0]
    rollout = picked(model, tokens)
    state = nnx.state(model)

    def turned(path, leaf):
        is_router = "router" in jax.tree_util.keystr(path)
        return leaf + jax.random.normal(jax.random.key(3), leaf.shape) if is_router else leaf

    moved = jax.tree_util.tree_map_with_path(turned, state)
    other = picked(nnx.merge(nnx.split(model)[0], moved), tokens)
    assert (np.sort(other) != np.sort(rollout)).any(axis=-1).mean() > 0.2
    replayed = forward(model, moved, tokens[None], routed_experts=rollout[None])
    assert not np.allclose(replayed, forward(model, moved, tokens[None]), atol=1e-3)
    again = np.where(np.arange(len(tokens))[:, None, None] < 9, -1, other)
    free = forward(model, moved, tokens[None], routed_experts=again[None])
    np.testing.assert_array_equal(free, forward(model, moved, tokens[None]))
    # The order of a token's experts says nothing.
    reversed_ = forward(model, moved, tokens[None], routed_experts=rollout[None, ..., ::-1])
    np.testing.assert_allclose(reversed_, replayed, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "options", "said"),
    [
        ("mixtral", (1, 29, 2, 3), {}, r"routed_experts must be integers \[1, 29, 2, 2\], got int32\[1, 29, 2, 3\]"),
        ("llama", (1, 29, 2, 2), {}, "routed_experts must be None for LlamaForCausalLM, which has no experts"),
        ("nemotron_h_puzzle", (1, 29, 3, 3), {}, "None for NemotronHForCausalLM, whose layers pick different numbers"),
        ("mixtral", (1, 29, 2, 2), {"exact": True}, "routed_experts must be None with exact=True"),
    ],
)
def test_experts_that_do_not_fit_are_refused(name, shape, options, said):
    recorded = load_recorded(name)
    with pytest.raises(ValueError, match=said):
        experts = jnp.zeros(shape, jnp.int32)
        forward(recorded.model, nnx.state(recorded.model), recorded.prompts[0][None], routed_experts=experts, **options)


def test_experts_without_weights_have_numbers_too():
    """Those that return their input, after the 250 of each layer."""
    config = read_folder(FOLDER / "longcat_flash")
    assert config.experts is not None
    config = replace(config, experts=replace(config.experts, num_experts=250, num_zero_experts=10))
    model: Any = SimpleNamespace(config=config, stage=SimpleNamespace(layers=range(config.num_layers)))
    shape: Any = SimpleNamespace(model=model)
    assert RoutedExpertsExtension(shape).dtype == np.uint16 and Tap(ROUTER, 0).width(config) == 260
    assert _experts_shape(model, (1, 4)) == ((1, 4, config.num_layers // 2, 3), 260)
