"""config.json of models with Mamba-2: what layers come of it, and what is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.models.config.altup import KimiK3Parts
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.config.state import GatedDelta, SelectiveScan, StateSpace
from jaxengine.models.registry import read_hf
from jaxengine.models.vision.moonvit import MoonVitTowerConfig
from tests.models.conftest import CHECKPOINTS

INFINITY = float("inf")
KDA = {"full_attn_layers": [3], "head_dim": 12, "num_heads": 4}


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


def test_layers_without_attention():
    """Mamba's configurations, and those of hybrids whose layers all keep states."""
    for name in ("mamba", "mamba2", "falcon_mamba"):
        config = read(name)
        assert not config.attending and config.keeps_states and config.is_causal
        assert read(name, max_position_embeddings=None).max_position_embeddings == 131_072
    assert read("mamba").num_kv_heads == 8 and read("mamba2").num_kv_heads == 6
    assert not read("granite_hybrid", layer_types=["mamba"] * 4).attending
    assert read("mamba").attention[0].state == SelectiveScan(72, 6, 3, 4)
    published = read("falcon_mamba", expand=16, intermediate_size=8192, hidden_size=4096, time_step_rank=256)
    assert published.attention[0].state == SelectiveScan(8192, 6, 256, 4, norms="plain", eps=1e-3)


def test_kimi_linear():
    config = read("kimi_linear")
    assert [layer.attends for layer in config.attention] == [False, False, True, False]
    assert all(layer.rope is None and layer.latent is not None for layer in config.attention)
    assert config.attention[0].state == GatedDelta(4, 4, 12, 12, 4, by_element=True, rank=12)
    assert config.experts is not None and config.experts.dense_layers == (0,)
    config = read("kimi_linear_long")
    assert config.experts is not None and config.experts.dense_layers == (0, 1)
    assert [layer.attends for layer in config.attention] == [True, False, False]


def test_kimi_k3():
    config = read("kimi_k3_vision")
    parts = KimiK3Parts(5, 2, output_gate=True, situ=(1.5, 2.5), latent_norm=True)
    assert config.kimi_k3 == parts and config.num_streams == 4 and config.stream_size == 4 * 64
    assert [parts.num_finished(layer) for layer in range(6)] == [0, 1, 1, 2, 2, 3]
    assert config.attention[0].state == GatedDelta(
        4, 4, 12, 12, 4, by_element=True, rank=12, whole_gates=True, lower_bound=-5.0
    )
    assert config.experts is not None and (config.experts.latent_size, config.experts.dense_layers) == (36, (0,))
    # A text model alone, and the parts that it lacks.
    odd = read("kimi_k3_odd", activation_situ_beta=None, mla_use_output_gate=None, attn_res_block_size=None)
    assert odd.kimi_k3 == KimiK3Parts(4, situ=(1.0, None)) and odd.num_streams == 1
    text = read_config_json(CHECKPOINTS / "kimi_k3_vision")["text_config"]
    bare = read("kimi_k3_vision", vision_config=None, text_config={**text, "routed_scaling_factor": None})
    assert bare.experts is not None and bare.experts.routed_scaling_factor == 1.0
    ungrouped = read("kimi_k3_vision", text_config={**text, "use_grouped_topk": False}).experts
    assert ungrouped is not None and (ungrouped.num_expert_group, ungrouped.topk_group) == (1, 1)
    tower = bare.tower
    assert isinstance(tower, MoonVitTowerConfig) and (tower.num_heads, tower.head_dim, tower.biases) == (
        *(12, 128),
        (False, False, False),
    )
    for changes, problem in (
        ({"qkv_hidden_size": 26}, "qkv_hidden_size must be a multiple of 4"),
        ({"mm_projector_type": "patchmerger"}, "mm_projector_type"),
        ({"norm_type": "layernorm"}, "norm_type"),
    ):
        with pytest.raises(ModelConfigError, match=problem):
            read("kimi_k3_vision", vision_config=changes)


def test_olmo_hybrid():
    config = read("olmo_hybrid")
    assert [layer.attends for layer in config.attention] == [False, False, False, True]
    assert config.attention[0].state == GatedDelta(2, 4, 12, 6, 4, beta_scale=2.0)
    assert config.attention[3].rope is not None
    assert read("olmo_hybrid", rope_parameters={"rope_theta": None}).attention[3].rope is None
    fields = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    usual = read("olmo_hybrid", layer_types=None, num_hidden_layers=3, **dict.fromkeys(fields))
    assert usual.attention[1].state == GatedDelta(4, 4, 12, 24, 4, beta_scale=2.0) and usual.attention[2].attends


def test_jamba():
    config = read("jamba")
    assert [layer.attends for layer in config.attention] == [False, False, True, False]
    assert config.experts is not None and config.experts.dense_layers == (0, 2) and not config.experts.norm_weights
    assert all(layer.rope is None for layer in config.attention)
    assert read("jamba_dense").experts is None


def test_falcon():
    config = read("falcon_h1")
    assert all(layer.attends and isinstance(layer.state, StateSpace) for layer in config.attention)
    assert config.keeps_states and config.attending == config.attention
    assert config.multipliers is not None and config.multipliers.keys == 0.6
    assert config.attention[0].sm_scale == 16**-0.5
    for gate_first, norm in ((True, "before"), (False, "after")):
        changed = read("falcon_h1", mamba_rms_norm=True, mamba_norm_before_gate=gate_first).attention[0].state
        assert isinstance(changed, StateSpace) and changed.norm == norm


def test_blocks_of_puzzle():
    """Experts differ by layer, in what a block says of them; all else that blocks say is the same in each."""
    config = read("nemotron_h_puzzle")
    assert config.experts is not None and config.experts.dense_layers == (0, 2, 4)
    assert (config.experts.num_per_token, config.experts.intermediate_size) == (3, 40)
    assert config.experts.by_layer == ((1, 1), (3, 24), (1, 1), (1, 40), (1, 1), (2, 16))
    own = config.experts.of_layer(5)
    assert (own.num_per_token, own.intermediate_size, own.latent_size, own.by_layer) == (2, 16, 20, ())
    state = config.attention[0].state
    assert isinstance(state, StateSpace) and state.dt_limits == (0.0, INFINITY)  # as NVIDIA's code, not transformers'
    left_out = dict.fromkeys(("moe_latent_size", "num_hidden_layers", "n_routed_experts"))
    assert read("nemotron_h_puzzle", num_experts_per_tok=22, **left_out) == config


def test_alice_ai():
    """Kimi's delta nets under Qwen's names of fields, blocks of layers as Kimi K3 has them, Qwen's gated attention."""
    config = read("alice_ai")
    states = [layer.state for layer in config.attention]
    assert [state is None for state in states] == [False, True, False, False, True]
    assert states[0] == GatedDelta(4, 4, 10, 10, 4, by_element=True, rank=10)
    assert config.kimi_k3 == KimiK3Parts(num_layers=5, layers_per_block=2) and config.num_streams == 4
    assert config.experts is not None and (config.experts.scoring_func, config.experts.shared_gate) == ("sigmoid", True)
    left_out = dict.fromkeys(("router_score_function", "intermediate_size", "rms_norm_eps"))
    raw = {key: value for key, value in read_config_json(CHECKPOINTS / "alice_ai").items() if key not in left_out}
    assert read_hf(raw).intermediate_size == 5632 and read_hf(raw).experts == config.experts


def test_zamba():
    config = read("zamba2")
    blocks = config.shared_blocks
    assert blocks is not None and blocks.layers == (1, 2) and config.stream_size == 2 * config.hidden_size
    assert [layer.attends for layer in config.attention] == [False, True, True] and config.attention[0].rope is None
    assert config.attention[1].sm_scale == (2 * 48 / 4 / 2) ** -0.5 and config.attention[1].rope is not None
    state = config.attention[0].state
    assert isinstance(state, StateSpace) and (state.head_dim, state.dt_limits) == (16, (0.001, INFINITY))
    assert config == read("zamba2", layers_block_type=["mamba", "hybrid", "hybrid"])  # as transformers 4
    shared = read("zamba2", layers_block_type=["hybrid"] * 3).shared_blocks
    assert shared is not None and [shared.sharing(layer) for layer in range(4)] == [(0, 2), (1,), (0, 2), ()]
    default = read("zamba2", layers_block_type=None, num_hidden_layers=54).shared_blocks
    assert default is not None and default.layers == (6, 12, 18, 24, 30, 36, 42, 47, 51)
    assert read("zamba2", use_long_context=True).max_position_embeddings == 16384


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
        ("nemotron_h", {"hybrid_override_pattern": "------"}, "a layer that attends or keeps a state"),
        ("alice_ai", {"linear_num_value_heads": 8}, "linear_num_value_heads must be 4, as linear_num_key_heads, got 8"),
        ("alice_ai", {"mlp_only_layers": [0]}, r"mlp_only_layers must be \[\] or absent"),
        ("alice_ai", {"router_score_function": "softmax"}, 'router_score_function must be "sigmoid" or absent'),
        ("nemotron_h_puzzle", {"block_configs": "MEM"}, "block_configs must be a list of mappings, one for each layer"),
        ("nemotron_h_puzzle", {"block_configs": [{"block_type": "moe"}]}, r"block_configs\.0\.num_experts_per_tok is"),
        (
            "nemotron_h_puzzle",
            {"block_configs": [{"block_type": "mamba", "ssm_state_size": size} for size in (12, 16)]},
            r"block_configs\.1\.ssm_state_size must be 12 as in the blocks before it, got 16",
        ),
        ("granite_hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type must be rope, nope"),
        ("granite_hybrid", {"mamba_d_head": 15}, "mamba_n_heads \\* mamba_d_head must be the 128"),
        ("granite_hybrid", {"mamba_n_groups": 3}, "num_heads must be a multiple of num_groups, got 8 and 3"),
        ("granite_hybrid", {"time_step_limit": [2, 1]}, "time_step_limit must be two numbers"),
        ("granite_hybrid", {"time_step_limit": [10**400, "x"]}, "time_step_limit must be two numbers"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be a list of 5 numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0, -1.0]}, "mlp_multipliers must be a finite number > 0"),
        ("falcon_h1", {"hidden_act": "prelu"}, "hidden_act must be 'silu'"),
        ("mamba2", {"num_heads": 5}, "num_heads must be such that num_heads \\* head_dim, 20, is .*, 120, got 5"),
        ("mamba2", {"hidden_act": "prelu"}, "hidden_act must be one of gelu"),
        ("mamba2", {"num_heads": 4096, "hidden_size": 2**17, "expand": 1e30}, "num_heads must be such that"),
        ("mamba", {"expand": 1e30, "intermediate_size": None}, "intermediate_size"),
        ("mamba", {"state_size": 10**9}, "selective scan: state_size must"),
        ("mamba", {"conv_kernel": 65}, "selective scan: conv_kernel must"),
        ("mamba", {"time_step_rank": "many"}, "time_step_rank must be an integer"),
        ("bamba", {"attn_layer_indices": [4]}, "attn_layer_indices must be a list of layers from 0 to 3"),
        ("bamba", {"attn_layer_indices": "all"}, "attn_layer_indices must be a list of layers"),
        (
            "kimi_linear",
            {"linear_attn_config": KDA | {"kda_layers": [0, 2, 4]}},
            "linear_attn_config must be full_attn_layers and",
        ),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope must be true"),
        ("kimi_linear", {"attn_res_block_size": 0}, "attn_res_block_size must be an integer >= 1"),
        ("kimi_linear", {"hidden_act": "situ", "activation_situ_beta": -1.0}, "activation_situ_beta must be"),
        ("kimi_linear", {"hidden_act": "prelu"}, "hidden_act must be 'silu'"),
        ("kimi_linear", {"routed_expert_hidden_size": 0}, "routed_expert_hidden_size must be an integer >= 1"),
        ("kimi_linear", {"linear_attn_config": KDA | {"gate_lower_bound": 5.0}}, "gate_lower_bound must be a number"),
        ("kimi_linear_long", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types must be a list"),
        ("kimi_linear_long", {"layer_types": ["kda"] * 3}, "layer_types must be a list of 3"),
        ("kimi_linear_long", {"linear_head_dim": 0}, "linear_head_dim must"),
        ("olmo_hybrid", {"linear_num_value_heads": 3}, "num_v_heads must be a multiple of num_k_heads"),
        ("jamba", {"attn_layer_period": 0}, "attn_layer_period must"),
        ("zamba2", {"layers_block_type": None}, "layers_block_type must be a list of 3 of hybrid, mamba"),
        ("zamba2", {"n_mamba_heads": 7}, "n_mamba_heads must be a divisor of the 96"),
        ("zamba2", {"num_attention_heads": 5}, "hidden_size must be a number whose double"),
        ("zamba2", {"num_key_value_heads": 2}, "num_key_value_heads must be 4 where use_shared_attention_adapter"),
        ("zamba2", {"hidden_act": "prelu"}, "hidden_act must be 'gelu'"),
        ("jamba", {"mamba_expand": 2**20}, "selective scan: channels must"),
    ],
)
def test_refused(name, changes, said):
    with pytest.raises(ModelConfigError, match=said):
        read(name, **changes)
