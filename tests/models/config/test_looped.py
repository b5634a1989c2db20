"""Configurations and names of families that run layers several times, of Zamba, and of JetMoE."""

from __future__ import annotations

import pytest

from jaxengine.models.build import Build
from jaxengine.models.config.altup import LoopedLayers
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.config.state import SelectiveScan
from jaxengine.models.families.dory import DoryForCausalLM
from jaxengine.models.families.jetmoe import JetMoeForCausalLM
from jaxengine.models.params.declare import DeclaredParam, declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights.adapters.folder import read_adapter
from jaxengine.models.weights.adapters.pools import targets_of
from tests.fixtures.adapters import write_adapter
from tests.models.config.test_as_transformers import ABSENT, recorded
from tests.tables import each_row


def test_runs_of_a_layer_are_layers_with_one_layers_weights():
    config = read_hf(recorded("dory"))
    assert config.loops is not None and config.loops.stored == (0, 1, 2, 1, 2, 3)
    assert [config.loops.loop(layer) for layer in range(6)] == [None, 0, None, 1, None, None]
    assert [layer.window for layer in config.attention] == [None, 5, None, 5, None, 5]
    assert config.stream_size == 2 * config.hidden_size and read_hf(recorded("llama")).stored_layer(1) == 1
    # As transformers reads it: each layer with attention and an MLP.
    plain = ["full_attention", "sliding_attention"] * 2
    counts = {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": ABSENT}
    assert read_hf(recorded("dory", layer_types=plain, **counts)) == config
    usual = recorded("dory", layer_types=None, num_hidden_layers=20, n_recurrent_layers=None, rope_parameters=None)
    defaults = read_hf({key: value for key, value in usual.items() if key not in ("n_input_layers", "n_output_layers")})
    assert defaults.loops is not None and (defaults.loops.first, defaults.loops.count) == (8, 4)
    ropes = [(layer.window, layer.rope.theta if layer.rope else 0) for layer in defaults.attention[2:4]]
    assert ropes == [(5, 10000.0), (None, 10000000.0)]


def test_loops_over_all_layers_have_one_hidden_state():
    """Nanbeige's losses of loops say their number, too; the norm between loops is the last one."""
    plain, weighted = read_hf(recorded("nanbeige")), read_hf(recorded("nanbeige_plain"))
    assert plain.loops == LoopedLayers(0, 3, 2, normed=True) and LoopedLayers(0, 3, 2).stored == (0, 1, 2) * 2
    assert weighted.loops == LoopedLayers(0, 2, 3) and len(weighted.attention) == 6
    assert plain.stream_size == plain.hidden_size and read_hf(recorded("ouro")).num_layers == 6
    once = read_hf(recorded("nanbeige", num_loops=ABSENT, skip_loop_final_norm=ABSENT))
    assert once.loops == LoopedLayers(0, 3, 1, normed=True)
    norms = [
        name for name in map(_source, declared_params(build_model(plain, Build("float32")))) if "model.norm" in name
    ]
    assert norms == ["model.norm.weight"]


def _source(param: DeclaredParam) -> str:
    return param.decl.sources[0].name


def test_zamba_of_the_first_version():
    config = read_hf(recorded("zamba"))
    blocks, state = config.shared_blocks, config.attention[0].state
    assert blocks is not None and (blocks.layers, blocks.count, blocks.rank) == ((1, 3), 1, 0)
    assert [layer.attends for layer in config.attention] == [False, True, False, True]
    assert config.attention[1].sm_scale == (24 / 2) ** -0.5 and config.attention[1].rope is None
    assert isinstance(state, SelectiveScan) and (state.channels, state.num_heads, state.time_rank) == (96, 2, 3)
    default = read_hf(recorded("zamba", layers_block_type=None, num_hidden_layers=20)).shared_blocks
    assert default is not None and default.layers == (2, 7, 13, 19)


def test_adapters_of_zamba_have_the_names_of_transformers():
    targets = targets_of([build_model(read_hf(recorded("zamba")), Build("float32", lora=LoraSpec(1, 2)))])
    for layer in (1, 3):  # transformers ties weights, so that PEFT gives each layer its own
        own = f"model.layers.{layer}.shared_transformer.self_attn.q_proj"
        assert own in targets.shapes and targets.module(own.replace("shared_transformer", "shared_transf")) == own


def test_what_is_no_module_of_its_own_is_refused_as_not_supported(tmp_path):
    """Experts of JetMoE's attention are one parameter in transformers. A head is refused once, tied or not."""
    targets = targets_of([build_model(read_hf(recorded("jetmoe")), Build("float32", lora=LoraSpec(1, 8)))])
    for name, wanted in (
        ("model.layers.0.self_attention.experts.input_linear", {"target_parameters": ["experts.input_linear.weight"]}),
        ("model.layers.1.mlp.output_linear", {"target_parameters": ["mlp.output_linear.weight"]}),
        ("lm_head", {"target_modules": "lm_head"}),
    ):
        folder = write_adapter(tmp_path / name, {name: (16, 16)}, seed=1, **{"target_modules": [], **wanted})
        with pytest.raises(ModelFileError, match="the model has it, but adapters of it are not supported") as error:
            read_adapter(folder, targets, 8, "float32")
        assert not error.value.others


def test_heads_of_jetmoe_follow_from_its_experts():
    for changes in ({}, {"num_attention_heads": 7}, {"kv_channels": ABSENT, "head_dim": 12}):
        own = read_hf(recorded("jetmoe", **changes)).attention[0]
        assert (own.num_heads, own.num_kv_heads, own.head_dim) == (4, 2, 12)


@each_row(
    ("name", "changes", "said"),
    [
        ("dory", {"recurrent_kv_cache_mode": "last_loop"}, 'recurrent_kv_cache_mode must be "per_loop" or absent'),
        ("dory", {"attention_output_gate_logit_scale_init": 9.0}, "must be absent, or the root of hidden_size, 8.0"),
        (
            "dory",
            {"layer_types": ["mlp", "full_attention"] * 4},
            "layer_types must be a list of 8 of full_attention or",
        ),
        ("dory", {"n_input_layers": 1}, "n_input_layers must be an even number where layer_types has mlp"),
        ("dory", {"n_recurrent_layers": 2}, "n_recurrent_layers must be at least 1, and with n_input_layers, 1, and"),
        ("dory", {"n_output_layers": 6, "n_recurrent_layers": None}, "n_recurrent_layers must be at least 1"),
        ("dory", {"n_recurrent_loops": 0}, "n_recurrent_loops must be an integer >= 1"),
        ("dory", {"hidden_act": "prelu"}, "hidden_act must be 'silu'"),
        ("zamba", {"hidden_mamba_act": "prelu"}, "hidden_mamba_act must be one of gelu"),
        ("zamba", {"attention_hidden_size": 48}, "attention_hidden_size must be 96 or absent"),
        ("zamba", {"n_mamba_heads": 5}, "n_mamba_heads must be a divisor of the 96 inputs of Mamba"),
        (
            "zamba",
            {"layers_block_type": None, "num_hidden_layers": 2},
            "layers_block_type must be a list of 2 of hybrid",
        ),
        (
            "ouro",
            {"early_exit_threshold": 0.9},
            "early_exit_threshold must be at least 1: all loops run for each token",
        ),
        ("ouro", {"total_ut_steps": 0}, "total_ut_steps must be an integer >= 1"),
        ("ouro", {"use_sliding_window": True}, "use_sliding_window must be false or absent"),
        ("nanbeige", {"enable_mhc": True}, "enable_mhc must be false or absent"),
        ("nanbeige", {"emb_neighbor_num": 3}, "emb_neighbor_num must be absent"),
        ("nanbeige", {"loop_loss_weights": 0.3}, "loop_loss_weights must be a list of numbers"),
        ("jetmoe", {"activation_function": "selu"}, "activation_function must be 'silu' or 'gelu'"),
    ],
)
def test_what_is_not_served_is_refused(name, changes, said):
    with pytest.raises(ModelConfigError, match=said):
        read_hf(recorded(name, **changes))


@each_row(
    ("stored", "own"),
    [
        ("backbone.embeddings.weight", "model.embed_tokens.weight"),
        ("backbone.layers.4.mixer.g_proj.weight", "model.layers.2.self_attn.gate_proj.weight"),
        ("backbone.layers.4.mixer.sqk", "model.layers.2.self_attn.sqk"),
        ("backbone.layers.4.attn_alpha", "model.layers.2.lambda_1"),
        ("backbone.layers.5.mixer.gate_proj", "model.layers.2.mlp.gate_proj"),
        ("backbone.layers.5.mlp_alpha", "model.layers.2.lambda_2"),
        ("model.layers.5.self_attn.gate_proj", "model.layers.5.self_attn.gate_proj"),  # transformers' own
        ("model.layers.4.mlp.suv_up", "model.layers.4.mlp.suv_up"),
    ],
)
def test_names_of_published_layers_are_those_of_halves(stored, own):
    assert DoryForCausalLM.checkpoint_names.renamed(stored) == own


def test_experts_of_attention_are_stacks_of_their_own():
    renamed = JetMoeForCausalLM.checkpoint_names.renamed
    assert (
        renamed("model.layers.1.self_attention.experts.input_linear.weight")
        == "model.layers.1.self_attn.experts.up_proj"
    )
    assert renamed("model.layers.1.self_attention.kv_proj") == "model.layers.1.self_attn.kv_proj"
