"""Configurations and names of Inkling and ZAYA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxengine.models.build import Build
from jaxengine.models.config.attention import RelativeBias
from jaxengine.models.config.compressed import LayerConvolutions, QueryKeyConvolutions
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.families.inkling import InklingForConditionalGeneration
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights.views.joined_rows import AlternatingRowsSource
from tests.models.config.test_as_transformers import ABSENT, recorded
from tests.models.weights.test_load import ArraySource
from tests.tables import each_row


def test_layers_of_inkling():
    config = read_hf(recorded("inkling_odd_wrapped"))
    full, sliding = config.attention[:2]
    assert (full.num_heads, full.num_kv_heads, full.head_dim, full.sm_scale) == (6, 1, 20, 1 / 20)
    assert (sliding.num_heads, sliding.num_kv_heads, sliding.head_dim, sliding.window) == (3, 3, 12, 6)
    assert (full.relative, sliding.relative) == (RelativeBias(3, 40), RelativeBias(3, 6))
    assert sliding.state == LayerConvolutions(num_kv_heads=3, head_dim=12, hidden_size=60, kernel=3)
    assert config.experts is not None and config.experts.dense_layers == (1,)
    assert (config.experts.num_scored, config.experts.num_sinks, config.num_logits) == (8, 3, 117)
    assert read_hf(recorded("inkling")).attention[1].temperature is not None


_BOTH = {"intermediate_size": 24, "moe_intermediate_size": 99, "dense_intermediate_size": 80}


@each_row(
    ("one", "other"),
    [
        # A checkpoint's names come before transformers' own.
        ({"sliding_window": 6, "sliding_window_size": 9}, {}),
        ({"num_local_experts": 6, "n_routed_experts": ABSENT}, {}),
        ({"sconv_kernel_size": 4}, {}),
        ({"model_max_length": 64, "max_position_embeddings": 7}, {}),
        ({"embedding_multiplier": 3.0, "logits_mup_width_multiplier": 2.0}, {}),
        (_BOTH, {}),
        ({"mlp_layer_types": None, "dense_mlp_idx": 1}, {}),
        ({"mlp_layer_types": None, "dense_mlp_idx": 9}, {"mlp_layer_types": ["dense"] * 3}),
        ({"layer_types": None, "local_layer_ids": [0]}, {}),
        ({"layer_types": None, "local_layer_ids": None}, {"layer_types": ["hybrid_sliding"] * 3}),
        ({"tie_word_embeddings": True}, {}),
        ({"unpadded_vocab_size": 128}, {}),
        ({"log_scaling_alpha": 0}, {"log_scaling_n_floor": None}),
    ],
)
def test_fields_of_inkling_that_mean_the_same(one, other):
    assert read_hf(recorded("inkling", **one)) == read_hf(recorded("inkling", **other))


@each_row(
    ("name", "changes", "error"),
    [
        ("inkling", {"shared_expert_sink": False}, "shared_expert_sink must be true or absent"),
        ("inkling", {"use_sconv": False}, "use_sconv must be true or absent"),
        ("inkling", {"gate_activation": "softmax"}, 'gate_activation must be "sigmoid" or absent'),
        ("inkling", {"final_logit_softcapping": 30.0}, "final_logit_softcapping must be absent"),
        ("inkling", {"layer_types": None, "local_layer_ids": 1}, "local_layer_ids must be a list of indices of layers"),
        ("inkling", {"o_bias": True}, "o_bias must be false or absent"),
        ("inkling", {"n_shared_experts": 0}, "n_shared_experts must be an integer >= 1"),
        ("inkling", {"layer_types": ["hybrid", "full_attention", "hybrid"]}, "layer_types must be a list of 3 of"),
        ("inkling", {"hidden_act": "prelu"}, "hidden_act must be 'silu'"),
        ("aria_text", {"hidden_act": "prelu"}, "hidden_act must be 'silu' or 'gelu'"),
        ("zaya", {"num_experts_per_tok": 2}, "num_experts_per_tok must be 1 or absent"),
        ("zaya", {"lm_head_bias": True}, "lm_head_bias must be false or absent"),
        ("zaya", {"cca_time1": 0}, "cca_time1 must be an integer >= 1"),
        ("zaya", {"layer_types": ["hybrid_sliding"] * 3}, "sliding_window is missing"),
    ],
)
def test_what_is_not_supported_is_named(name, changes, error):
    with pytest.raises(ModelConfigError, match=error):
        read_hf(recorded(name, **changes))


def test_names_of_published_tensors_of_inkling():
    renamed = InklingForConditionalGeneration.checkpoint_names.renamed
    for stored, wanted in (
        ("model.llm.embed.weight", "model.embed_tokens.weight"),
        ("model.llm.embed_norm.weight", "model.embed_tokens.embed_norm.weight"),
        ("model.llm.unembed.weight", "lm_head.weight"),
        ("model.llm.layers.1.attn.wo_ud.weight", "model.layers.1.self_attn.o_proj.weight"),
        ("model.llm.layers.1.attn_sconv.weight", "model.layers.1.attn_sconv.conv1d.weight"),
        ("model.llm.layers.1.attn.k_sconv.weight", "model.layers.1.self_attn.k_sconv.conv1d.weight"),
        ("model.llm.layers.1.attn_norm.weight", "model.layers.1.input_layernorm.weight"),
        # As transformers has them in memory, and trainers send them.
        ("model.language_model.layers.1.attn_sconv.conv1d.weight", "model.layers.1.attn_sconv.conv1d.weight"),
        ("model.language_model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.gate_up_proj"),
        ("model.language_model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"),
    ):
        assert renamed(stored) == wanted


def test_rows_of_two_matrices_in_turn():
    rows, both = np.arange(24.0).reshape(8, 3), {"w13.weight": ("gate.weight", "up.weight")}
    source = AlternatingRowsSource(ArraySource({"a.w13.weight": rows, "b": rows[0]}), both)
    assert set(source.names()) == {"a.gate.weight", "a.up.weight", "b"} and source.shape("a.up.weight") == (4, 3)
    np.testing.assert_array_equal(source.read("a.up.weight", slice(1, 3), slice(0, 2)), rows[3:6:2, :2])
    np.testing.assert_array_equal(source.read("b"), rows[0])
    for tensors, error in (
        ({"a.w13.weight": rows[:3]}, "must have an even number of rows"),
        ({"a.w13.weight": rows[0, 0]}, "must have an even number of rows"),
        ({"a.w13.weight": rows, "a.up.weight": rows}, "stands for a.up.weight, as does a.w13.weight .at a.up.w"),
    ):
        with pytest.raises(ModelFileError, match=error):
            AlternatingRowsSource(ArraySource(tensors), both)


def test_layers_of_zaya_pass_on_more_than_their_hidden_state():
    config = read_hf(recorded("zaya_odd"))
    state = config.attention[0].state
    assert isinstance(state, QueryKeyConvolutions) and state.kernels == (3, 4)
    assert [array.shape for array in state.arrays] == [(2, 108), (3, 108), (1, 18)]
    assert config.experts is not None and (config.experts.num_routed, config.experts.num_scored) == (7, 8)
    assert config.stream_size == 2 * 52 + 20
    thetas: list[Any] = [layer.rope and (layer.rope.theta, layer.rope.rotary_dim) for layer in config.attention]
    assert thetas == [(500.0, 6), (1000.0, 12), (500.0, 6)]
    usual = read_hf(recorded("zaya_odd", rope_parameters=None)).attention[1].rope
    assert usual is not None and (usual.theta, usual.rotary_dim) == (5_000_000.0, 6)
    model: Any = build_model(config, Build("bfloat16"))
    assert model.layers[0].router.before is None and model.layers[1].router.before is not None
