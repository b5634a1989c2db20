"""config.json of models with Mamba-2: what layers come of it, and what is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.hf import read_config_json
from jaxengine.models.config.state import StateSpace
from jaxengine.models.registry import read_hf
from tests.models.conftest import CHECKPOINTS

INFINITY = float("inf")


def read(name: str, **changes: Any):
    return read_hf(read_config_json(CHECKPOINTS / name) | changes)


def test_granite():
    config = read("granite_hybrid")
    states = [layer.state for layer in config.attention]
    assert [state is None for state in states] == [False, False, True, False]
    assert states[0] == StateSpace(8, 16, 2, 12, 4, bias=True, output_bias=True, norm="after")
    assert config.keeps_states and [layer.rope for layer in config.attention] == [None] * 4
    assert config.experts is not None and config.experts.shared_intermediate_size == config.intermediate_size == 40
    kinds = ["mamba", "mamba", "attention", "mamba"]
    assert read("granite_hybrid", layer_types=None, layers_block_type=kinds) == config


def test_granite_without_states():
    """ibm-granite/granite-4.0-micro: nothing but attention, with rope."""
    config = read("granite_hybrid_dense", layer_types=["attention"] * 3, mamba_n_heads=7)
    assert not config.keeps_states and config.experts is None and config.intermediate_size == 56
    assert all(layer.rope is not None for layer in config.attention)


def test_falcon():
    config = read("falcon_h1")
    assert all(layer.attends and isinstance(layer.state, StateSpace) for layer in config.attention)
    assert config.keeps_states and config.attending == config.attention
    assert config.multipliers is not None and config.multipliers.keys == 0.6
    assert config.attention[0].sm_scale == 16**-0.5
    for gate_first, norm in ((True, "before"), (False, "after")):
        changed = read("falcon_h1", mamba_rms_norm=True, mamba_norm_before_gate=gate_first).attention[0].state
        assert isinstance(changed, StateSpace) and changed.norm == norm


@pytest.mark.parametrize(
    ("written", "limits"),
    [([0.0, {"__float__": "Infinity"}], (0.0, INFINITY)), ([1, INFINITY], (1.0, INFINITY)), (None, (0.0, INFINITY))],
)
def test_limits_of_time_steps(written, limits):
    state = read("falcon_h1", time_step_limit=written).attention[0].state
    assert isinstance(state, StateSpace) and state.dt_limits == limits


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("granite_hybrid", {"layer_types": ["mamba", "mamba", "attention", "rwkv"]}, "layer_types must be a list of 4"),
        ("granite_hybrid", {"layer_types": ["mamba"] * 4}, "a layer that attends"),
        ("granite_hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type must be rope, nope"),
        ("granite_hybrid", {"mamba_d_head": 15}, "mamba_n_heads \\* mamba_d_head must be the 128"),
        ("granite_hybrid", {"mamba_n_groups": 3}, "num_heads must be a multiple of num_groups, got 8 and 3"),
        ("granite_hybrid", {"time_step_limit": [2, 1]}, "time_step_limit must be two numbers"),
        ("granite_hybrid", {"time_step_limit": [10**400, "x"]}, "time_step_limit must be two numbers"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be a list of 5 numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0, -1.0]}, "mlp_multipliers must be a finite number > 0"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
    ],
)
def test_refused(name, changes, said):
    with pytest.raises(ModelConfigError, match=said):
        read(name, **changes)
