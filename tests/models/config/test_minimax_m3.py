"""config.json of MiniMax M3: what is read, by transformers' names and by those of published files, and what is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.config.attention import KeyIndex
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.rope import Rope
from jaxengine.models.families.minimax_m3 import MiniMaxM3VLForCausalLM
from jaxengine.models.registry import read_folder, read_hf
from tests.fixtures.drawn_weights import FOLDER

F, X = "full_attention", "minimax_m3_sparse"
OUTER: dict[str, Any] = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl"}
PUBLISHED = {
    "use_sparse_attention": True,
    "sparse_index_dim": 96,
    "sparse_num_index_heads": 2,
    "sparse_topk_blocks": 5,
    "sparse_block_size": 32,
    "sparse_disable_index_value": [0, 1, 1],
    "sparse_score_type": "max",
    "sparse_init_block": 0,
    "sparse_local_block": 2,
    "sparse_attention_freq": [0, 1, 1],
}
# What published files say of the tower.
SIZES = {"image_token_compression_method": "patch_merge", "spatial_merge_size": 2, "temporal_patch_size": 2}
TOWER: dict[str, Any] = {
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "img_token_compression_config": SIZES,
    "vision_config": {
        "model_type": "clip_vision_model",
        "position_embedding_type": "rope",
        "rope_mode": "3d",
        "img_token_compression_config": SIZES,
    },
}


def text(**changes: Any) -> Any:
    return read_hf({"architectures": ["MiniMaxM3SparseForCausalLM"], "num_hidden_layers": 3} | changes)


def test_absent_fields_are_those_of_the_class_in_transformers():
    config, plain = read_hf(OUTER), read_hf({"architectures": ["MiniMaxM3VLForCausalLM"]})
    assert read_hf(OUTER | TOWER) == config
    assert plain == replace(config, tower=None, architecture="MiniMaxM3VLForCausalLM")
    tower: Any = config.tower
    assert (tower.hidden_size, tower.intermediate_size, tower.num_layers, tower.num_heads) == (1280, 5120, 32, 16)
    assert (tower.patch_size, tower.temporal_patch_size, tower.merge, tower.projector_size) == (14, 2, 4, 6144)
    assert (tower.activation, tower.norm_eps, tower.rope_theta) == ("gelu", 1e-5, 1e4)
    (layer,) = set(config.attention)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.index) == (64, 4, 128, None)
    # transformers rotates whole heads, whatever `rotary_dim` says.
    assert layer.rope == Rope(128, 5e6) and text(rotary_dim=64).attention[0] == layer
    shared = {"scoring_func": "sigmoid", "correction_bias": True, "routed_scaling_factor": 2.0}
    assert config.experts == ExpertsConfig(128, 4, 3072, shared_intermediate_size=3072, **shared)
    assert (config.num_layers, config.vocab_size, config.intermediate_size) == (60, 200064, 12288)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (200034, (200020,), False)
    index = KeyIndex(4, 128, 16 * 128, block=128, local=1)
    assert [each.index for each in text(layer_types=[X, F, X]).attention] == [index, None, index]
    # Of one model it is enough if either configuration ties.
    assert [read_hf(OUTER | each).tie_word_embeddings for each in ({"tie_word_embeddings": True}, {})] == [True, False]
    assert read_hf(OUTER | {"text_config": {"tie_word_embeddings": True}}).tie_word_embeddings


def test_published_names_of_fields():
    config = text(
        num_key_value_heads=2,
        hidden_act="swigluoai",
        partial_rotary_factor=0.5,
        moe_layer_freq=[0, 1, 1],
        num_mtp_modules=2,
        sparse_attention_config=PUBLISHED,
        index_head_dim=7,
        num_experts=9,
    )
    index = KeyIndex(2, 96, 160, block=32, local=2)
    assert [each.index for each in config.attention] == [None, index, index]
    assert config.attention[0].rope == Rope(64, 5e6) and config.num_unread_layers == 2
    assert config.experts.dense_layers == (0,) and config.experts.num_experts == 9
    assert config.attention[1].cached == (256, 96, False) and not config.has_equal_pages
    # transformers' own lists come first.
    own = PUBLISHED | {"sparse_disable_index_value": [1, 0, 1]}
    changes = {"num_key_value_heads": 2, "partial_rotary_factor": 0.5, "sparse_attention_config": own}
    both = text(layer_types=[X, F, F], **changes)
    assert [each.index for each in both.attention] == [index, None, None]
    assert text(mlp_layer_types=["sparse", "dense", "sparse"], moe_layer_freq=[0, 1, 1]).experts.dense_layers == (1,)


def test_what_is_refused():
    sparse = {"layer_types": [X] * 3}
    for changes, message in (
        ({"layer_types": [X, F]}, f"layer_types must be a list of 3 of {F}, {X}"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 3 of dense, sparse"),
        ({"moe_layer_freq": [1, 2, 1]}, "moe_layer_freq must be a list of 3 of 0, 1"),
        (
            {"sparse_attention_config": {"sparse_attention_freq": [1]}},
            "sparse_attention_config must be a mapping whose",
        ),
        ({"sparse_attention_config": {"sparse_score_type": "lse"}}, 'sparse_score_type must be "max" or absent'),
        ({"sparse_attention_config": {"sparse_init_block": 1}}, "sparse_init_block must be 0 or absent"),
        ({"sparse_attention_config": {"use_sparse_attention": False}}, "use_sparse_attention must be true or absent"),
        (
            {"sparse_attention_config": PUBLISHED | {"sparse_disable_index_value": [1, 1, 0]}},
            "sparse_disable_index_value must be a list of 3 with 1 for each sparse layer",
        ),
        ({"attention_output_gate": True}, "attention_output_gate must be false or absent"),
        ({"qk_norm_type": "per_layer"}, 'qk_norm_type must be "per_head" or absent'),
        ({"n_shared_experts": 2}, "n_shared_experts must be 1 or absent"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'swigluoai' or 'silu'"),
        (sparse | {"index_n_heads": 2}, "index_n_heads must be num_key_value_heads = 4, each of which selects"),
        (sparse | {"index_local_blocks": 17}, "index_local_blocks must be an integer >= 0 and <= 16"),
        (sparse | {"index_block_size": 0}, "index_block_size must be an integer >= 1"),
        (sparse | {"index_topk_blocks": 1 << 30}, "index_topk_blocks . index_block_size must be an integer"),
        (sparse | {"index_head_dim": 64}, "index_head_dim must be at least the rotated part of a head = 128, got 64"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            text(**changes)
    for changes, message in (
        (
            {"hidden_size": 30},
            "vision_config.hidden_size must be a multiple of num_attention_heads = 16, and at least 6",
        ),
        (
            {"hidden_size": 64},
            "vision_config.hidden_size must be a multiple of num_attention_heads = 16, and at least 6",
        ),
        ({"head_dim": 64}, "vision_config.head_dim must be 80 or absent"),
        ({"num_channels": 4}, "vision_config.num_channels must be 3 or absent"),
        ({"spatial_merge_size": 17}, "vision_config.spatial_merge_size must be an integer >= 1 and <= 16"),
        ({"rope_mode": "2d"}, 'vision_config.rope_mode must be "3d" or absent'),
        (
            {"img_token_compression_config": {"spatial_merge_size": 4}},
            "vision_config.img_token_compression_config.spatial_merge_size must be 2 or absent",
        ),
        ({"patch_size": 1 << 20}, "vision_config.patch_size must be an integer >= 1 and <= 256"),
        ({"num_hidden_layers": 1 << 20}, "vision_config.num_hidden_layers must be an integer >= 1 and <= 1024"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "vision_config.rope_parameters must be a mapping with the rope_ty",
        ),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_hf(OUTER | {"vision_config": changes})
    for changes, message in (
        ({"projector_hidden_act": "relu"}, 'projector_hidden_act must be "gelu" or absent'),
        ({"vision_feature_layer": -2}, "vision_feature_layer must be -1 or absent"),
        ({"img_token_compression_config": {"temporal_patch_size": 1}}, "config.temporal_patch_size must be 2 or abs"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_hf(OUTER | changes)
    model = read_folder(FOLDER / "minimax_m3")
    for option, said in (
        ({"rl_exact": True}, "rl_exact is True; allowed: False: MiniMaxM3VLForCausalLM selects keys"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'; allowed: float32 or bfloat16 for MiniMaxM3VL"),
    ):
        with pytest.raises(ConfigError, match=said):
            EngineConfig.from_options(**option).resolved(model, PLATFORMS["cpu"])
    layer = model.attention[1]
    for changes in ({"window": 4}, {"sinks": True}, {"slopes": (0.1,) * 4}, {"soft_cap": 2.0}):
        with pytest.raises(ModelConfigError, match="attention to (selected|blocks of) keys takes no"):
            replace(layer, **changes)


def test_names_of_tensors_and_modules():
    names = MiniMaxM3VLForCausalLM.checkpoint_names
    for stored, own in (
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("language_model.model.layers.3.block_sparse_moe.experts.5.w2.weight", None),
        ("model.language_model.layers.3.mlp.experts.gate_up_proj", "block_sparse_moe.experts.gate_up_proj"),
        ("model.layers.3.mlp.gate.weight", "block_sparse_moe.gate.weight"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "block_sparse_moe.shared_experts.up_proj.weight"),
        ("model.layers.3.mlp.gate_proj.weight", "mlp.gate_proj.weight"),
        ("model.layers.3.self_attn.indexer.q_norm.weight", "self_attn.index_q_norm.weight"),
        ("language_model.model.layers.3.self_attn.index_k_proj", "self_attn.index_k_proj"),
    ):
        own = stored.rpartition("layers.3.")[2] if own is None else own
        assert names.renamed(stored) == (own if own.startswith("lm_head") else f"model.layers.3.{own}")
    assert names.is_unused("language_model.mtp.x")
    # As published, as transformers saves them, and as its model has them.
    for stored, own in (
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias", "vision_tower.layers.0.mlp.fc1.bias"),
        ("vision_tower.vision_model.pre_layrnorm.bias", "vision_tower.pre_layrnorm.bias"),
        ("model.vision_tower.embeddings.proj.weight", "vision_tower.embeddings.patch_embedding.weight"),
        ("patch_merge_mlp.linear_2.bias", "multi_modal_projector.merge_linear_2.bias"),
        ("model.multi_modal_projector.merge_linear_2.bias", "multi_modal_projector.merge_linear_2.bias"),
        ("model.vision_tower.layers.1.mlp.fc2.weight", "vision_tower.layers.1.mlp.fc2.weight"),
    ):
        assert names.renamed(stored) == own and own.startswith(names.tower)
