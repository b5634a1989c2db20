"""config.json of Nemotron-H Omni: published names, transformers' defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.families.nemotron_h_omni import NemotronH_Omni_Reasoning_V3
from jaxengine.models.registry import read_hf

TEXT = {"hidden_size": 64, "layers_block_type": ["full_attention", "mlp"]}


def read(**changes: Any) -> Any:
    return read_hf({"architectures": ["NemotronH_Omni_Reasoning_V3"], "text_config": TEXT} | changes)


def test_defaults_and_published_names():
    config = read(vision_config=None)
    tower: Any = config.tower
    layer = config.attention[0]
    assert (config.vocab_size, config.intermediate_size, config.max_position_embeddings) == (131072, 21504, 4096)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.rope) == (32, 8, 128, None)
    assert (tower.hidden_size, tower.intermediate_size, tower.num_layers, tower.num_heads) == (1280, 5120, 32, 16)
    assert (tower.patch_size, tower.temporal_patch_size, tower.side, tower.num_tokens) == (16, 2, 128, 10)
    assert (tower.projector_size, tower.rows_before, tower.last_norm) == (4096, 3, False)
    published = {"text_config": None, "llm_config": TEXT, "vit_hidden_size": 64}
    vision = {"hidden_size": 64, "video_temporal_patch_size": 2, "use_swiglu_ffn": True, "mlp_ratio": 2.0}
    other = read(**published, vision_config=vision).tower
    assert (other.hidden_size, other.intermediate_size, other.activation) == (64, 88, "silu")
    assert read(text_config=TEXT | {"num_nextn_predict_layers": 1}).tower.last_norm
    # The names that published files have for the class.
    for name in ("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3"):
        assert read(architectures=[name], vision_config=None) == config


def test_what_is_refused():
    for vision, message in (
        ({"hidden_size": 64}, "vision_hidden_size must be the hidden_size of vision_config, 64"),
        ({"num_attention_heads": 3}, "vision_config.num_attention_heads must be a divisor of hidden_size 1280"),
        ({}, "vision_config.video_temporal_patch_size must be 2 to 256, and that of the whole model, 2, got None"),
        ({"video_temporal_patch_size": 3}, "vision_config.video_temporal_patch_size must be 2 to 256, and that of"),
        ({"layerscale_value": 0.5}, "vision_config.layerscale_value must be 1.0 or absent"),
        ({"max_img_size": 1 << 20}, "vision_config.max_img_size must be 16 to 16384, for patch_size 16"),
        ({"num_registers": 257}, "vision_config.num_registers must be an integer >= 0 and <= 256"),
        ({"mlp_ratio": 1e9}, "vision_config.mlp_ratio must be 1 to 1048576, times hidden_size 1280"),
        ({"head_dim": 64}, "vision_config.head_dim must be 80 or absent"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read(vision_config={"video_temporal_patch_size": 2} | vision if vision else {})
    for changes, message in (
        ({"downsample_ratio": 0.25}, "downsample_ratio must be 0.5 or absent"),
        ({"video_temporal_patch_size": 1}, "video_temporal_patch_size must be an integer >= 2"),
        ({"text_config": None}, "text_config must be a mapping"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read(**changes)


def test_names_of_tensors():
    names = NemotronH_Omni_Reasoning_V3.checkpoint_names
    generator = "vision_model.radio_model.model.patch_generator"
    for stored, own in (
        ("language_model.backbone.layers.3.mixer.q_proj.weight", "model.layers.3.mixer.q_proj.weight"),
        ("language_model.model.norm_f.weight", "model.norm.weight"),
        ("mlp1.3.weight", "multi_modal_projector.linear_2.weight"),
        (f"{generator}.pos_embed", "vision_model.embeddings.position_embedding"),
        (f"{generator}.video_embedder.weight", "vision_model.embeddings.video_patch_projection.weight"),
        (
            "vision_model.radio_model.model.blocks.1.attn.proj.bias",
            "vision_model.encoder.layer.1.attention.o_proj.bias",
        ),
        ("vision_model.encoder.layer.1.attention.o_proj.bias", "vision_model.encoder.layer.1.attention.o_proj.bias"),
        ("vision_projector.vision_final_layernorm.bias", "vision_final_layernorm.bias"),
        ("sound_encoder.encoder.layers.1.self_attn.bias_u", "audio_tower.layers.1.self_attn.pos_bias_u"),
        ("sound_encoder.encoder.layers.1.conv.norm.bias", "audio_tower.layers.1.conv.batch_norm.bias"),
        ("sound_projection.linear2.weight", "embed_audio.linear_2.weight"),
    ):
        assert names.renamed(stored) == own
    sound = "sound_encoder.encoder.feature_extractor.featurizer.window"
    for unread in (sound, "vision_model.radio_model.input_conditioner.norm_mean"):
        assert names.is_unused(unread)
    joined = "vision_model.encoder.layer.1.attention.qkv.weight"
    assert names.renamed("vision_model.radio_model.model.blocks.1.attn.qkv.weight") == joined
    assert names.parts_of_rows(joined)[2] == "vision_model.encoder.layer.1.attention.v_proj.weight"
