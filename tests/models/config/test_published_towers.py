"""What published checkpoints that see say of their towers, in the spellings of transformers 4 and 5, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.registry import model_for_hf, read_hf
from jaxengine.models.vision.glm4v import Glm4vTowerConfig
from jaxengine.models.vision.moonvit import MoonVitTowerConfig
from jaxengine.models.vision.pixtral import PixtralTowerConfig
from jaxengine.models.vision.qwen2_vl import Qwen2_5VLTowerConfig, Qwen2VLTowerConfig
from jaxengine.models.vision.qwen3_vl import Qwen3VLTowerConfig
from scripts.model_names import read_names
from tests.tables import each_row

TOKENS = {"vision_start_token_id": 151652, "image_token_id": 151655, "video_token_id": 151656}
# Qwen/Qwen2-VL-7B-Instruct
QWEN2_VL: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    **TOKENS,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
# Qwen/Qwen2.5-VL-7B-Instruct
QWEN2_5_VL = QWEN2_VL | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "max_position_embeddings": 128000,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
}
# Qwen/Qwen3-VL-8B-Instruct
QWEN3_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    **TOKENS,
    "text_config": {
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
# mistralai/Mistral-Small-3.1-24B-Instruct-2503
MISTRAL3: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
}
# moonshotai/Kimi-VL-A3B-Instruct
KIMI_VL: dict[str, Any] = {
    "architectures": ["KimiVLForConditionalGeneration"],
    "media_placeholder_token_id": 163605,
    "tie_word_embeddings": False,
    "text_config": {
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "kv_lora_rank": 512,
        "max_position_embeddings": 131072,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 800000.0,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "merge_kernel_size": [2, 2],
        "model_type": "moonvit",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
}
# moonshotai/Kimi-K2.5, with a smaller text part
KIMI_K25: dict[str, Any] = KIMI_VL | {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {
        "init_pos_emb_height": 64,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": 1152,
        "mm_projector_type": "patchmerger",
        "patch_size": 14,
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": 2048,
        "video_attn_type": "spatial_temporal",
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_attention_heads": 16,
        "vt_num_hidden_layers": 27,
    },
}
# zai-org/GLM-4.1V-9B-Thinking
GLM4V: dict[str, Any] = {
    "architectures": ["Glm4vForConditionalGeneration"],
    "image_start_token_id": 151339,
    "image_end_token_id": 151340,
    "image_token_id": 151343,
    "video_token_id": 151344,
    "text_config": {
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338, 151348],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "max_position_embeddings": 65536,
        "model_type": "glm4v_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
        "rope_theta": 10000.0,
        "vocab_size": 151552,
    },
    "vision_config": {
        "attention_bias": False,
        "depth": 24,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "image_size": 336,
        "in_channels": 3,
        "intermediate_size": 13696,
        "num_heads": 12,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
# Models that read documents, by their class.
DOCUMENTS = {row.config["architectures"][0]: row.config for row in read_names() if "OCR" in row.names[0].upper()}
PADDLE, DOTS, LIGHTON, GLM_OCR, GOT = (
    DOCUMENTS[name]
    for name in (
        "PaddleOCRVLForConditionalGeneration",
        "DotsOCRForCausalLM",
        "LightOnOcrForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
        "GotOcr2ForConditionalGeneration",
    )
)


def test_qwen2_vl():
    config = read_hf(QWEN2_VL)
    assert config.tower == Qwen2VLTowerConfig(
        num_features=1176,
        columns=("segment", "row", "column"),
        merge=4,
        unit=256,
        hidden_size=1280,
        intermediate_size=5120,
        num_layers=32,
        num_heads=16,
        activation="quick_gelu",
        patch_size=14,
        temporal_patch_size=2,
        spatial_merge_size=2,
    )
    rope = Rope(128, 1e6, sections=(16, 24, 24))
    assert config.sees_places and {layer.rope for layer in config.attention} == {rope}
    assert config.attention[0].bias and config.attention[0].window is None
    # transformers 5
    outer = {"architectures", "vision_config", *TOKENS}
    text = {name: value for name, value in QWEN2_VL.items() if name not in outer | {"rope_scaling", "rope_theta"}}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    nested = {name: value for name, value in QWEN2_VL.items() if name in outer} | {"text_config": text}
    assert read_hf(nested | {"tie_word_embeddings": False}) == config
    # For long contexts Qwen2.5-VL's cards say to add yarn, which keeps the sections.
    yarn = {"type": "yarn", "factor": 4.0, "mrope_section": [16, 24, 24], "original_max_position_embeddings": 32768}
    stretched = read_hf(QWEN2_VL | {"rope_scaling": yarn}).attention[0].rope
    assert stretched is not None and stretched.sections == (16, 24, 24)
    assert isinstance(stretched.scaling, RopeScaling) and stretched.scaling.rope_type == "yarn"


def test_qwen2_5_vl():
    tower = read_hf(QWEN2_5_VL).tower
    assert isinstance(tower, Qwen2_5VLTowerConfig)
    assert (tower.window_size, tower.full_layers, tower.tokens_per_second) == (8, (7, 15, 23, 31), 2.0)
    assert tower.columns == ("segment", "window", "row", "column") and tower.unit == 256
    assert (tower.hidden_size, tower.intermediate_size, tower.activation) == (1280, 3420, "silu")


def test_qwen3_vl():
    config = read_hf(QWEN3_VL)
    assert isinstance(config.tower, Qwen3VLTowerConfig)
    assert (config.tower.side, config.tower.deepstack_layers, config.tower.num_parts) == (48, (8, 16, 24), 4)
    rope = Rope(128, 5e6, sections=(24, 20, 20), sections_interleaved=True)
    assert {layer.rope for layer in config.attention} == {rope} and config.attention[0].qk_norm
    turns = rope.section_of_pairs()
    assert turns[:7].tolist() == [0, 1, 2, 0, 1, 2, 0] and not turns[60:].any()
    assert [int((turns == section).sum()) for section in range(3)] == [24, 20, 20]


def test_mistral_small_3():
    config = read_hf(MISTRAL3)
    assert config.tower == PixtralTowerConfig(
        num_features=588,
        columns=("segment", "row", "column"),
        merge=4,
        unit=256,
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=24,
        num_used_layers=24,
        num_heads=16,
        activation="silu",
        projector_activation="gelu",
        patch_size=14,
        spatial_merge_size=2,
        rope_theta=10000.0,
        projector_bias=False,
        norm_eps=1e-5,
    )
    assert not config.sees_places and replace(config, tower=None).tower is None
    earlier: Any = read_hf(MISTRAL3 | {"vision_feature_layer": -2}).tower
    assert earlier.num_used_layers == 23 and earlier.unused == ("vision_tower.transformer.layers.23.",)


def test_kimi_vl():
    config = read_hf(KIMI_VL)
    assert config.experts is not None and config.experts.dense_layers == (0,)
    assert config.experts.routed_scaling_factor == 2.446 and config.experts.correction_bias
    latent = config.attention[0].latent
    assert latent is not None and (latent.kv_lora_rank, latent.q_lora_rank, latent.v_head_dim) == (512, None, 128)
    assert config.attention[0].rope == Rope(64, 8e5, interleaved=True)
    assert config.tower == MoonVitTowerConfig(
        num_features=588,
        columns=("segment", "row", "column", "height", "width"),
        merge=4,
        unit=256,
        hidden_size=1152,
        intermediate_size=4304,
        num_layers=27,
        num_heads=16,
        patch_size=14,
        spatial_merge_size=2,
        sides=(64, 64),
    )


def test_kimi_k25():
    """As published, and in transformers' spelling: Kimi-VL's tower with a time axis."""
    config = read_hf(KIMI_K25)
    kimi_vl = read_hf(KIMI_VL).tower
    assert config.tower == replace(
        kimi_vl,
        columns=(*kimi_vl.columns, "frame", "frames"),
        projector=("mm_projector.pre_norm", "mm_projector.proj.0", "mm_projector.proj.2"),
        most_frames=4,
    )
    spelled = {
        name.removeprefix("vt_").removeprefix("init_"): value for name, value in KIMI_K25["vision_config"].items()
    }
    spelled = {"architectures": ["Kimi_K25ForConditionalGeneration"], "vision_config": spelled}
    assert read_hf(KIMI_K25 | spelled) == config


def test_glm_4_1v():
    config = read_hf(GLM4V)
    assert isinstance(config.tower, Glm4vTowerConfig)
    assert (config.tower.side, config.tower.intermediate_size, config.tower.attention_bias) == (24, 13696, False)
    assert config.tower.columns == ("segment", "row", "column", "height", "width")
    rope = Rope(64, 1e4, interleaved=True, sections=(8, 12, 12))
    assert {layer.rope for layer in config.attention} == {rope} and config.attention[0].bias


def test_models_that_read_documents():
    towers = {name: read_hf(raw).tower for name, raw in DOCUMENTS.items()}
    lighton = replace(read_hf(MISTRAL3).tower, norm_eps=1e-6)
    assert towers["LightOnOcrForConditionalGeneration"] == lighton
    glm = towers["GlmOcrForConditionalGeneration"]
    assert isinstance(glm, Glm4vTowerConfig) and (glm.side, glm.layer_size, glm.intermediate_size) == (0, 4096, 4608)
    assert glm.qk_norm and glm.attention_bias and glm.layer_bias
    config = read_hf(DOCUMENTS["PaddleOCRVLForConditionalGeneration"])
    assert {layer.rope for layer in config.attention} == {Rope(128, 5e5, sections=(16, 24, 24))}
    names = model_for_hf(config.architecture).checkpoint_names
    for published, other in (("mlp_AR.", "model.projector."), ("visual.", "model.visual."), ("model.layers.", None)):
        assert names.renamed(other or "model.language_model.layers.") == published == names.renamed(published)
    # As first published.
    first = DOCUMENTS["LightOnOcrForConditionalGeneration"]
    assert read_hf(first | {"architectures": ["LightOnOCRForConditionalGeneration"]}) == read_hf(first)


@each_row(
    ("raw", "where", "change", "message"),
    [
        (QWEN2_VL, None, {"rope_scaling": {"type": "mrope"}}, "mrope_section is missing"),
        (
            QWEN2_VL,
            None,
            {"rope_scaling": {"type": "mrope", "mrope_section": "all"}},
            "a list of three numbers of pairs",
        ),
        (QWEN2_VL, None, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "three counts that sum up to"),
        (QWEN2_VL, None, {"vision_config": None}, "vision_config must be a mapping, got None"),
        (QWEN2_VL, "vision_config", {"in_chans": 1}, "in_channels of vision_config must be 3, got 1"),
        (QWEN2_VL, "vision_config", {"num_heads": 7}, r"embed_dim must be a multiple of 4 \* num_heads = 28, got 1280"),
        (QWEN2_VL, "vision_config", {"hidden_size": 1024}, "hidden_size must be that of the text, 3584, got 1024"),
        (QWEN2_VL, "vision_config", {"hidden_act": "selu"}, "hidden_act must be one of gelu, "),
        (QWEN2_VL, "vision_config", {"depth": 10**9}, "depth must be an integer >= 1 and <= 1024"),
        (QWEN2_VL, "vision_config", {"mlp_ratio": 1e-9}, "mlp_ratio must be 1 to 1048576, times embed_dim 1280, got"),
        (QWEN2_VL, "vision_config", {"mlp_ratio": 3e38}, "mlp_ratio must be 1 to 1048576, times embed_dim 1280, got"),
        (QWEN2_5_VL, "vision_config", {"window_size": 13}, "window_size must be 1 to 64 times patch_size 14"),
        (QWEN2_5_VL, "vision_config", {"out_hidden_size": 5}, "out_hidden_size must be the hidden_size of the text"),
        (QWEN2_5_VL, "vision_config", {"fullatt_block_indexes": 7}, "fullatt_block_indexes must be a list of layers"),
        (QWEN3_VL, "vision_config", {"num_position_embeddings": 5}, "num_position_embeddings must be a square, got 5"),
        (QWEN3_VL, "vision_config", {"deepstack_visual_indexes": [9, "8"]}, "indexes must be a list of layers"),
        (
            MISTRAL3,
            "vision_config",
            {"model_type": "siglip"},
            "model_type must be pixtral in vision_config, got 'siglip'",
        ),
        (
            MISTRAL3,
            "vision_config",
            {"head_dim": 32},
            "head_dim must be hidden_size / num_attention_heads = 64, got 32",
        ),
        (DOTS, "vision_config", {"is_causal": True}, "is_causal must be false or absent, got True"),
        (DOTS, "vision_config", {"hidden_size": 8}, "hidden_size must be that of the text, 1536, got 8"),
        (PADDLE, "vision_config", {"spatial_merge_size": 9}, "spatial_merge_size must be 1 to 8, got 9"),
        (PADDLE, "vision_config", {"num_attention_heads": 64}, r"hidden_size must be a multiple of 4 \* num_attention"),
        (PADDLE, None, {"compression_ratio": 2.0}, "compression_ratio must be 1.0 or absent, got 2.0"),
        (LIGHTON, "text_config", {"model_type": "bart"}, "model_type must be that of a decoder"),
        (GLM_OCR, "vision_config", {"out_hidden_size": 8}, "out_hidden_size must be the hidden_size of the text, 1536"),
        (
            GOT,
            "vision_config",
            {"image_size": 1008},
            r"vision_config.image_size must be a multiple of 4 \* patch_size = 64",
        ),
        (GOT, "vision_config", {"mlp_dim": 10**9}, "vision_config.mlp_dim must be 1 to 1048576, got 1000000000"),
        (GOT, "vision_config", {"window_size": 65}, "vision_config.window_size must be 0 to 64, got 65"),
        (GOT, "vision_config", {"global_attn_indexes": 3}, "global_attn_indexes must be a list of layers, got 3"),
        (GLM4V, "vision_config", {"image_size": 7}, "image_size must be 1 to 1024 times patch_size 14, got 7"),
        (GLM4V, "vision_config", {"out_hidden_size": 8}, "out_hidden_size must be the hidden_size of the text, 4096"),
        (
            KIMI_VL,
            "vision_config",
            {"merge_kernel_size": [2, 1]},
            "merge_kernel_size must be a list of two equal numbers",
        ),
        (KIMI_VL, "vision_config", {"merge_kernel_size": [2.0, 2.0]}, "merge_kernel_size must be a list of two equal"),
        (
            KIMI_K25,
            "vision_config",
            {"rope_parameters": {"rope_theta": 5}},
            "rope_parameters must be a mapping with the",
        ),
        (KIMI_VL, "vision_config", {"init_pos_emb_width": 5000}, "init_pos_emb_width must be 1 to 1024, got 5000"),
        (KIMI_K25, "vision_config", {"merge_type": "sd2"}, 'merge_type must be "sd2_tpool" or absent'),
        (KIMI_K25, "vision_config", {"init_pos_emb_time": 1}, "init_pos_emb_time must be 2 to 16, got 1"),
        (KIMI_K25, "vision_config", {"mm_hidden_size": 8}, "mm_hidden_size must be 1152, hidden_size of vision_config"),
        (KIMI_K25, "vision_config", {"text_hidden_size": 8}, "text_hidden_size must be 2048 or absent"),
        (KIMI_VL, "text_config", {"model_type": "llama"}, "model_type must be deepseek_v3 in text_config, got 'llama'"),
        (MISTRAL3, None, {"vision_feature_layer": [-2, -1]}, "vision_feature_layer must be an integer from -"),
        (MISTRAL3, None, {"projector_hidden_act": "selu"}, "projector_hidden_act must be one of"),
    ],
)
def test_what_is_not_built_is_refused(raw, where, change, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(raw | (change if where is None else {where: raw[where] | change}))
