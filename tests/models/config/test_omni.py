"""What published checkpoints of Qwen2.5-Omni and Qwen3-Omni say of themselves, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.registry import model_for_hf, read_hf
from tests.tables import each_row

# Qwen/Qwen2.5-Omni-7B
QWEN2_5: dict[str, Any] = {
    "architectures": ["Qwen2_5OmniModel"],
    "model_type": "qwen2_5_omni",
    "enable_audio_output": True,
    "talker_config": {"hidden_size": 896},
    "token2wav_config": {},
    "thinker_config": {
        "audio_token_index": 151646,
        "image_token_index": 151655,
        "video_token_index": 151656,
        "vision_start_token_id": 151652,
        "position_id_per_seconds": 25,
        "audio_config": {"d_model": 1280, "encoder_layers": 32, "n_window": 100, "num_mel_bins": 128},
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "in_chans": 3,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "tokens_per_second": 25,
            "window_size": 112,
        },
        "text_config": {
            "hidden_size": 3584,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0,
            "vocab_size": 152064,
        },
    },
}
# Qwen/Qwen3-Omni-30B-A3B-Instruct
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "model_type": "qwen3_omni_moe",
    "code2wav_config": {},
    "talker_config": {},
    "thinker_config": {
        "audio_token_id": 151675,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "position_id_per_seconds": 13,
        "audio_config": {"d_model": 1280, "encoder_layers": 32, "output_dim": 2048},
        "vision_config": {"depth": 27, "hidden_size": 1152, "out_hidden_size": 2048},
        "text_config": {
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 768,
            "max_position_embeddings": 65536,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rope_scaling": {"interleaved": True, "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
            | {"rope_type": "default", "type": "default"},
            "rope_theta": 1000000,
            "vocab_size": 152064,
        },
    },
}
QWEN3["thinker_config"]["audio_config"] |= {"encoder_attention_heads": 20, "encoder_ffn_dim": 5120}


def test_published_configurations():
    for raw, hidden, layers, sizes, rows in ((QWEN2_5, 3584, 28, (1176, 128), 50), (QWEN3, 2048, 48, (1536, 128), 160)):
        config = read_hf(raw)
        assert (config.hidden_size, config.num_layers, config.tie_word_embeddings) == (hidden, layers, False)
        assert [tower.hears for tower in config.towers] == [False, True]
        assert tuple(tower.num_features for tower in config.towers) == sizes
        sounds = config.towers[1]
        assert sounds.window // sounds.merge == rows
        # Of the thinker alone it is the same.
        assert read_hf(raw["thinker_config"] | {"architectures": [config.architecture]}) == config
    assert config.experts is not None and (config.experts.num_experts, config.experts.norm_weights) == (128, True)
    thinker = QWEN3["thinker_config"]
    own = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    audio = {**thinker["audio_config"], **own}
    assert read_hf(QWEN3 | {"thinker_config": thinker | {"audio_config": audio}}) == config
    assert read_hf(QWEN3 | {"thinker_config": thinker | {"audio_config": {"output_dim": 2048}}}) == config
    assert config.attention[0].rope.sections_interleaved and config.tower.num_parts == 4
    assert read_hf(QWEN2_5 | {"architectures": ["Qwen2_5OmniForConditionalGeneration"]}) == read_hf(QWEN2_5)


@each_row(
    ("stored", "model"),
    [
        ("thinker.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("thinker.visual.blocks.0.attn.q.weight", "visual.blocks.0.attn.q.weight"),
        ("thinker.audio_tower.conv1.weight", "audio_tower.conv1.weight"),
        ("thinker.audio_tower.proj.bias", "audio_tower.proj.bias"),
        ("thinker.audio_tower.proj1.bias", "multi_modal_projector.linear_1.bias"),
        ("model.audio_tower.proj2.bias", "multi_modal_projector.linear_2.bias"),
        ("thinker.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_names_of_tensors(stored, model):
    names = model_for_hf("Qwen2_5OmniModel").checkpoint_names
    assert names.renamed(stored) == model and not names.is_unused(stored)
    assert all(map(names.is_unused, ("talker.model.norm.weight", "token2wav.x", "code2wav.x")))


@each_row(
    ("raw", "part", "changes", "message"),
    [
        (QWEN2_5, "audio_config", {"n_window": 7}, "n_window .*an even number"),
        (QWEN2_5, "audio_config", {"output_dim": 1}, "output_dim .*hidden_size of the text model"),
        (QWEN2_5, "vision_config", {"out_hidden_size": 1}, "out_hidden_size must be the hidden_size of the text"),
        (QWEN2_5, "text_config", {"rope_scaling": None}, "mrope_section"),
        (QWEN3, "audio_config", {"n_window_infer": 150}, "n_window_infer .*a multiple of twice"),
        (QWEN3, "vision_config", {"deepstack_visual_indexes": [2.0]}, "must be a list of layers"),
    ],
)
def test_what_is_refused(raw, part, changes, message):
    thinker = raw["thinker_config"]
    with pytest.raises(ModelConfigError, match=message):
        read_hf({**raw, "thinker_config": {**thinker, part: {**thinker[part], **changes}}})
    with pytest.raises(ModelConfigError, match=part):
        read_hf({**raw, "thinker_config": {**thinker, part: 3}})
