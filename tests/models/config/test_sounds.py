"""config.json of models that take sounds in prompts: what is read, as published, and what is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.registry import model_for_hf, read_hf
from jaxengine.models.weights.load import unread_towers
from tests.tables import each_row

WHISPER = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
# Qwen/Qwen2-Audio-7B-Instruct, whose text part leaves out what transformers takes for it.
QWEN2_AUDIO: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "audio_config": {"model_type": "qwen2_audio_encoder", **WHISPER, "num_mel_bins": 128, "scale_embedding": False},
    "audio_token_index": 151646,
    "model_type": "qwen2_audio",
    "text_config": {
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "intermediate_size": 11008,
        "max_position_embeddings": 8192,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "sliding_window": 32768,
        "use_mrope": False,
        "vocab_size": 156032,
    },
    "vocab_size": 156032,
}
# mistralai/Voxtral-Mini-3B-2507
VOXTRAL: dict[str, Any] = {
    "architectures": ["VoxtralForConditionalGeneration"],
    "audio_config": {"hidden_size": 1280, "intermediate_size": 5120, "max_source_positions": 1500, "num_mel_bins": 128},
    "audio_token_id": 24,
    "model_type": "voxtral",
    "projector_hidden_act": "gelu",
    "text_config": {"head_dim": 128, "hidden_size": 3072, "model_type": "llama", "rope_theta": 100000000.0},
}
# Qwen/Qwen3-ASR-1.7B, called after a part of Qwen3-Omni.
QWEN3_ASR: dict[str, Any] = {
    "architectures": ["Qwen3ASRForConditionalGeneration"],
    "model_type": "qwen3_asr",
    "thinker_config": {
        "audio_config": {"d_model": 1024, "encoder_layers": 24, "n_window": 50, "output_dim": 2048},
        "audio_token_id": 151676,
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 65536,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "type": "mrope"},
            "rope_theta": 1000000,
            "tie_word_embeddings": True,
        },
    },
}


# google/gemma-4-E2B-it, as far as it is about sounds.
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "audio_config": {"hidden_size": 1024, "num_hidden_layers": 12, "use_clipped_linears": True},
    "vision_config": {"use_clipped_linears": True},
    "text_config": {"num_hidden_layers": 6, "vocab_size": 262144},
}


# ibm-granite/granite-speech-3.3-2b, as far as it is about sounds.
GRANITE_SPEECH: dict[str, Any] = {
    "architectures": ["GraniteSpeechForConditionalGeneration"],
    "model_type": "granite_speech",
    "audio_token_index": 49159,
    "has_lora_adapter": True,
    "downsample_rate": 5,
    "window_size": 15,
    "encoder_config": {
        "num_layers": 16,
        "hidden_dim": 1024,
        "output_dim": 256,
        "context_size": 200,
        "max_pos_emb": 512,
    },
    "projector_config": {
        "model_type": "blip_2_qformer",
        "hidden_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "encoder_hidden_size": 1024,
        "cross_attention_frequency": 1,
    },
    "text_config": {"model_type": "granite", "vocab_size": 49160, "hidden_size": 2048, "embedding_multiplier": 12.0},
}


# ibm-granite/granite-speech-4.1-2b-plus, as far as it differs.
GRANITE_PLUS: dict[str, Any] = GRANITE_SPEECH | {
    "architectures": ["GraniteSpeechPlusForConditionalGeneration"],
    "model_type": "granite_speech_plus",
    "has_lora_adapter": False,
    "encoder_config": {**GRANITE_SPEECH["encoder_config"], "cat_hidden_layers": [3]},
    "projector_config": {**GRANITE_SPEECH["projector_config"], "encoder_hidden_size": 2048},
}
# nvidia/audio-flamingo-3-hf
AUDIO_FLAMINGO: dict[str, Any] = {
    "architectures": ["AudioFlamingo3ForConditionalGeneration"],
    "model_type": "audioflamingo3",
    "audio_config": {"hidden_size": 1280, "intermediate_size": 5120, "max_source_positions": 1500, "num_mel_bins": 128},
    "audio_token_id": 151669,
    "projector_bias": True,
    "projector_hidden_act": "gelu",
    "text_config": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
        "vocab_size": 151672,
    },
}
# nvidia/music-flamingo-2601-hf, with the rotation of transformers' class.
MUSIC_FLAMINGO: dict[str, Any] = AUDIO_FLAMINGO | {
    "architectures": ["MusicFlamingoForConditionalGeneration"],
    "model_type": "musicflamingo",
    "rope_parameters": {"rope_theta": 1200.0, "partial_rotary_factor": 0.2, "rope_type": "default"},
}
# zai-org/GLM-ASR-Nano-2512, whose text part leaves out what transformers takes for it.
GLM_ASR: dict[str, Any] = {
    "architectures": ["GlmAsrForConditionalGeneration"],
    "model_type": "glmasr",
    "audio_config": {
        "head_dim": 64,
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "max_position_embeddings": 1500,
        "num_attention_heads": 20,
        "num_hidden_layers": 32,
        "num_key_value_heads": 20,
        "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
    },
    "audio_token_id": 59260,
    "projector_hidden_act": "gelu",
    "text_config": {"hidden_size": 2048, "model_type": "llama"},
}


# A Whisper with five decoder layers of three heads.
WHISPER_SMALL: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 24,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "decoder_layers": 5,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 8,
    "vocab_size": 400,
}


def test_heads_of_whisper_that_align_words():
    tower = read_hf(WHISPER_SMALL).tower
    assert tower.filter_width == 7 and not tower.aligns
    assert tower.with_generation(ConfigFields({"alignment_heads": None})) == tower
    found = tower.with_generation(ConfigFields({"alignment_heads": [[4, 2], [0, 0]]}))
    assert found.aligns and found.alignment_heads == ((4, 2), (0, 0))
    for heads in ([[5, 0]], [[0, 3]], [[0, -1]], [[0, True]], [[0]], [0], "ab", 7, [[0, 0]] * 16, [[0, 1.0]]):
        with pytest.raises(ModelConfigError, match="alignment_heads"):
            tower.with_generation(ConfigFields({"alignment_heads": heads}))
    for width in (0, 2, 33, "7"):
        with pytest.raises(ModelConfigError, match="median_filter_width"):
            read_hf({**WHISPER_SMALL, "median_filter_width": width})


def test_cohere_transcribe_and_moonshine():
    """transformers' defaults are the published models; wrong fields are named."""
    cohere = {"architectures": ["CohereAsrForConditionalGeneration"], "model_type": "cohere_asr"}
    config = read_hf(cohere)
    assert read_hf({**cohere, "encoder_config": None}) == config
    tower = config.tower
    assert (tower.num_features, tower.unit, tower.num_positions, tower.num_layers) == (128, 3504, 438, 48)
    assert (tower.num_parts, tower.decoder_heads, config.num_layers) == (2 * 8 * 438, 8, 8)
    assert not tower.has_rules and not tower.aligns
    moonshine = {"architectures": ["MoonshineForConditionalGeneration"], "model_type": "moonshine"}
    config = read_hf(moonshine)
    assert (config.tower.unit, config.tower.num_positions, config.tower.rope.rotary_dim) == (1250, 1248, 32)
    for fields, message in (
        ({**cohere, "max_audio_clip_s": 1e9}, "max_audio_clip_s must be a number > 0 and <= 120"),
        ({**cohere, "max_audio_clip_s": 0}, "max_audio_clip_s"),
        ({**cohere, "encoder_config": {"subsampling_factor": 4}}, r"encoder_config\.subsampling_factor"),
        ({**cohere, "encoder_config": {"num_mel_bins": 100}}, r"num_mel_bins must be a multiple of 8"),
        ({**cohere, "encoder_config": {"num_attention_heads": 7}}, "num_attention_heads must be a divisor"),
        ({**cohere, "encoder_config": {"conv_kernel_size": 8}}, "conv_kernel_size must be odd"),
        ({**cohere, "encoder_config": {"conv_kernel_size": 10**6}}, "conv_kernel_size"),
        ({**cohere, "num_key_value_heads": 2}, "num_key_value_heads must be 8 or absent"),
        ({**cohere, "tie_word_embeddings": True}, "tie_word_embeddings"),
        ({**cohere, "hidden_act": "unknown"}, "hidden_act must be one of"),
        ({**moonshine, "encoder_num_attention_heads": 4}, "encoder_num_attention_heads must be 8 or absent"),
        ({**moonshine, "decoder_num_key_value_heads": 4}, "decoder_num_key_value_heads must be 8"),
        ({**moonshine, "encoder_num_hidden_layers": 10**6}, "encoder_num_hidden_layers must be an integer"),
        ({**moonshine, "decoder_num_hidden_layers": 10**6}, "decoder_num_hidden_layers must be an integer"),
        ({**moonshine, "hidden_size": 290}, "decoder_num_attention_heads must be a divisor of hidden_size 290"),
        ({**moonshine, "attention_bias": 1}, "attention_bias must be true or false"),
        ({**moonshine, "decoder_hidden_act": "unknown"}, "decoder_hidden_act must be one of"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_hf(fields)


def test_gemma4_has_a_tower_for_each():
    config = read_hf(GEMMA4)
    sees, hears = config.towers
    assert (sees.hears, hears.hears, hears.num_features, hears.merge, hears.window) == (False, True, 128, 4, 3072)
    assert (hears.left, hears.right, hears.far) == (12, 0, 0) and config.tower is sees and config.sound_tower is hears
    without = read_hf({**GEMMA4, "vision_config": None})
    assert without.tower == hears and without.sound_tower is None
    # Where images are seen in both directions, sounds are not taken.
    text = GEMMA4["text_config"] | {"use_bidirectional_attention": "vision"}
    (alone,) = read_hf({**GEMMA4, "text_config": text}).towers
    assert alone.attends_both_ways


def test_granite_speech():
    tower = read_hf(GRANITE_SPEECH).tower
    # A block of four seconds and a window of 0.3 have twelve in common.
    assert (tower.num_features, tower.unit, tower.merge, tower.window) == (160, 600, 5, 15_000)
    assert (tower.multiplier, tower.adapter, tower.head_dim, tower.joined) == (12.0, ".", 128, ())
    # A plain one has no such field: transformers ignores it.
    plain = {**GRANITE_SPEECH["encoder_config"], "cat_hidden_layers": [3]}
    assert read_hf({**GRANITE_SPEECH, "encoder_config": plain}).tower == tower
    one = {**GRANITE_SPEECH["encoder_config"], "num_layers": 1}  # which adds no guess of the text
    assert read_hf({**GRANITE_SPEECH, "encoder_config": one}).tower.num_layers == 1
    plus = read_hf(GRANITE_PLUS).tower
    assert (plus.joined, plus.heard_size, plus.adapter) == ((3,), 2048, None)


def test_glm_asr():
    config = read_hf(GLM_ASR)
    assert (config.vocab_size, config.num_layers, config.tie_word_embeddings) == (59264, 28, True)
    assert (config.tower.rotated, config.tower.rope_theta, config.tower.unit, config.tower.merge) == (32, 1e4, 3000, 8)
    bare = read_hf({**GLM_ASR, "audio_config": {}, "tie_word_embeddings": False})
    assert bare.tower == config.tower and not bare.tie_word_embeddings


def test_a_text_part_without_fields_has_those_of_its_own_class():
    """Qwen3-ASR's sizes are those of a file without the part; one with a part of it has Qwen3's."""
    for part, sizes in (
        ({}, (28, 2048, 16, 8, 65536, True)),
        ({"text_config": {"num_hidden_layers": 4}}, (4, 4096, 32, 32, 32768, False)),
    ):
        for raw in (part, {"thinker_config": part}):
            audio = {"audio_config": {"output_dim": sizes[1]}}
            config = read_hf({**QWEN3_ASR, "thinker_config": None, **raw, **audio})
            own = config.attention[0]
            found = config.num_layers, config.hidden_size, own.num_heads, own.num_kv_heads
            assert (*found, config.max_position_embeddings, config.tie_word_embeddings) == sizes


def test_moss_transcribe():
    raw: dict[str, Any] = {"architectures": ["MossTranscribeDiarizeForConditionalGeneration"], "audio_config": {}}
    raw |= {"text_config": {"rms_norm_eps": 0.5, "tie_word_embeddings": False}}
    config = read_hf(raw)
    assert (config.hidden_size, config.tie_word_embeddings, config.attention[0].head_dim) == (4096, True, 128)
    assert (config.tower.merge, config.tower.unit, config.tower.norm_eps) == (8, 3000, 0.5)
    for changes in ({"audio_merge_size": 7}, {"audio_chunk_size": 16_000}):
        with pytest.raises(ModelConfigError, match=next(iter(changes))):
            read_hf(raw | changes)


def test_fun_asr_nano():
    raw: dict[str, Any] = {"architectures": ["FunAsrNanoForConditionalGeneration"], "model_type": "fun_asr_nano"}
    config, null = read_hf(raw), dict.fromkeys(("audio_config", "adaptor_config", "text_config"))
    assert (config.hidden_size, config.tie_word_embeddings, config.max_position_embeddings) == (1024, True, 40960)
    tower = config.tower
    assert (tower.num_features, tower.longest, tower.window, tower.normed) == (560, 2048, 2048, (49, 69))
    assert (tower.encoder.head_dim, tower.encoder.activation, tower.adaptor.ffn_size) == (128, "relu", 256)
    assert read_hf(raw | null) == config
    # The number of heads follows from their size, and an adaptor may have no other size than the text.
    assert read_hf(raw | {"audio_config": {"head_dim": 32}}).tower.encoder.head_dim == 32
    for changes, name in (
        ({"adaptor_config": {"hidden_size": 1028}}, "adaptor_config.hidden_size"),
        ({"audio_config": {"num_stacked_frames": 7, "num_mel_bins": 5}}, "num_stacked_frames"),
        ({"audio_config": {"num_mel_bins": 3}}, "num_mel_bins"),
        ({"audio_config": {"num_attention_heads": 3}}, "num_attention_heads"),
        ({"audio_config": {"num_timestamp_prediction_layers": 71}}, "num_timestamp_prediction_layers"),
        ({"audio_config": {"max_position_embeddings": 1 << 20}}, "max_position_embeddings"),
        ({"audio_config": {"fsmn_kernel_size": 65}}, "fsmn_kernel_size"),
        ({"audio_config": {"hidden_act": "x"}}, "hidden_act"),
    ):
        with pytest.raises(ModelConfigError, match=name):
            read_hf(raw | changes)


def test_vibevoice_asr():
    raw: dict[str, Any] = {"architectures": ["VibeVoiceAsrForConditionalGeneration"], "model_type": "vibevoice_asr"}
    acoustic, semantic = (f"{kind}_tokenizer_encoder_config" for kind in ("acoustic", "semantic"))
    config = read_hf(raw)
    tower = config.tower
    assert (tower.num_features, tower.rate, tower.context, tower.unit, config.tie_word_embeddings) == (
        *(3200, 24_000, 58, 256),
        False,
    )
    assert (tower.acoustic.size, tower.semantic.size, tower.acoustic.depths) == (64, 128, (3, 3, 3, 3, 3, 3, 8))
    null = dict.fromkeys(("text_config", acoustic, semantic))
    assert read_hf(raw | null) == config
    # An empty one has the class's own size, and depths after the last reduction count nothing.
    other = read_hf(raw | {semantic: {"depths": [3, 3, 3, 3, 3, 3, 8, 9]}}).tower
    assert other.semantic == tower.acoustic
    for changes, name in (
        ({semantic: {"downsampling_ratios": [2, 2, 4, 5, 5, 4]}}, "semantic.*downsampling_ratios"),
        ({acoustic: {"downsampling_ratios": [2, 0]}}, "downsampling_ratios"),
        ({acoustic: {"downsampling_ratios": [64] * 6}}, "downsampling_ratios"),
        ({acoustic: {"depths": [3, 3]}}, "depths"),
        ({acoustic: {"depths": [3, 3, 3, 3, 3, 3, 600]}}, "depths"),
        ({acoustic: {"channels": 2}}, "channels"),
        ({acoustic: {"kernel_size": 65}}, "kernel_size"),
        ({acoustic: {"num_filters": 1 << 14}}, "num_filters"),
        ({"acoustic_tokenizer_chunk_size": 3201}, "acoustic_tokenizer_chunk_size"),
    ):
        with pytest.raises(ModelConfigError, match=name):
            read_hf(raw | changes)


def test_music_flamingo():
    towers = [read_hf({**MUSIC_FLAMINGO, "rope_parameters": rope}).tower for rope in (None, {"rope_theta": 900})]
    assert [(each.rotated, each.theta) for each in towers] == [(256, 1200.0), (256, 900.0)]
    assert towers[0].columns == ("sound", "window") and towers[0].row_seconds == 0.04


def test_activations_of_encoders_are_those_of_the_configuration():
    for raw, name in ((QWEN2_AUDIO, "activation_function"), (GLM_ASR, "hidden_act"), (GEMMA4, "hidden_act")):
        tower = read_hf({**raw, "audio_config": {**raw["audio_config"], name: "relu"}}).towers[-1]
        assert getattr(tower, "sizes", tower).activation == "relu"
    audio = {"activation_function": "relu", "encoder_layers": 1, "d_model": 16, "downsample_hidden_size": 2}
    audio = {**QWEN3_ASR["thinker_config"]["audio_config"], **audio, "encoder_ffn_dim": 4}
    raw = {**QWEN3_ASR, "thinker_config": {**QWEN3_ASR["thinker_config"], "audio_config": audio}}
    tower = read_hf(raw).tower.make(64, Build("float32"))
    assert tower.projector.activation is tower.layers[0].mlp.activation is ACTIVATIONS["relu"]
    # transformers scales nothing by this field.
    whisper = {"activation_function": "silu", "scale_embedding": True}
    assert read_hf({**WHISPER_SMALL, **whisper}).tower.sizes.activation == "silu"


def test_whisper_without_sizes_is_tiny():
    raw = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}
    sizes = {"encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6, "decoder_attention_heads": 6}
    sizes |= {"d_model": 384, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "vocab_size": 51865}
    assert read_hf(raw) == read_hf(raw | sizes)


@each_row(
    ("towers", "unread"),
    [
        ((True, True), ()),
        ((True, False), ("model.audio_tower.", "model.embed_audio.")),
        ((False, True), ("model.vision_tower.", "model.embed_vision.")),
    ],
)
def test_tensors_of_towers_that_are_not_loaded_are_not_read(towers, unread):
    names = model_for_hf("Gemma4ForConditionalGeneration").checkpoint_names
    kept = [tower for tower, is_kept in zip(read_hf(GEMMA4).towers, towers, strict=True) if is_kept]
    assert unread_towers(names, kept) == unread
    assert set(unread_towers(names, ())) == {*names.tower, *names.sound_tower}
    alone = model_for_hf("VoxtralForConditionalGeneration").checkpoint_names
    assert unread_towers(alone, read_hf(VOXTRAL).towers) == () and unread_towers(alone, ()) == alone.tower


def test_published_configurations():
    for raw, hidden, layers, rows in (
        (QWEN2_AUDIO, 4096, 32, 750),
        (VOXTRAL, 3072, 30, 375),
        (AUDIO_FLAMINGO, 3584, 28, 750),
        (GLM_ASR, 2048, 28, 375),
        (QWEN3_ASR, 2048, 28, 160),  # of which 104 are used
    ):
        config = read_hf(raw)
        assert (config.hidden_size, config.num_layers, config.tower.hears) == (hidden, layers, True)
        assert (config.tower.unit // config.tower.merge, config.tower.num_features) == (rows, 128)
    assert config.attention[0].rope.theta == 1e6 and config.attention[0].rope.sections == ()
    inner = QWEN3_ASR["thinker_config"]
    assert read_hf(inner | {"architectures": QWEN3_ASR["architectures"]}) == config


@each_row(
    ("stored", "model"),
    [
        ("thinker.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("thinker.audio_tower.conv2d1.weight", "audio_tower.conv2d1.weight"),
        ("thinker.audio_tower.proj2.bias", "multi_modal_projector.linear_2.bias"),
        ("thinker.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.audio_tower.ln_post.bias", "audio_tower.ln_post.bias"),
        ("language_model.model.norm.weight", "model.norm.weight"),
    ],
)
def test_names_of_tensors(stored, model):
    assert model_for_hf("Qwen3ASRForConditionalGeneration").checkpoint_names.renamed(stored) == model


@each_row(
    ("raw", "part", "changes", "message"),
    [
        (QWEN2_AUDIO, "audio_config", {"encoder_attention_heads": 7}, "encoder_attention_heads .*divisor of d_model"),
        (QWEN2_AUDIO, "audio_config", {"encoder_layers": 2**31 - 1}, "encoder_layers .*<= 1024"),
        (QWEN2_AUDIO, "audio_config", {"d_model": 2, "encoder_attention_heads": 1}, "d_model .*an even number >= 4"),
        (QWEN2_AUDIO, "audio_config", {"num_mel_bins": 2**30}, "num_mel_bins .*<= 1024"),
        (QWEN2_AUDIO, "audio_config", {"max_source_positions": 1501}, "max_source_positions .*an even number"),
        (QWEN2_AUDIO, "audio_config", {"activation_function": "selu"}, "activation_function .*relu"),
        (QWEN2_AUDIO, "text_config", {"model_type": "t5"}, "model_type must be that of a decoder"),
        (VOXTRAL, "audio_config", {"intermediate_size": 5121}, "intermediate_size .*a multiple of hidden_size"),
        (VOXTRAL, "audio_config", {"num_mel_bins": 0}, "num_mel_bins"),
        (GEMMA4, "audio_config", {"num_attention_heads": 3}, "num_attention_heads .*divisor of hidden_size 1024"),
        (GEMMA4, "audio_config", {"subsampling_conv_channels": [128]}, "subsampling_conv_channels .*two integers"),
        (GEMMA4, "audio_config", {"subsampling_conv_channels": [3, 1]}, "subsampling_conv_channels .*4 to 1024"),
        (GEMMA4, "audio_config", {"subsampling_conv_channels": [10**30, 1]}, "subsampling_conv_channels .*4 to 1024"),
        (GEMMA4, "audio_config", {"output_proj_dims": 2**30}, "output_proj_dims .*<= 131072"),
        (GEMMA4, "audio_config", {"attention_context_left": 1}, "attention_context_left .*at least 2"),
        (GEMMA4, "audio_config", {"attention_context_right": 65}, "attention_context_right .*at most 64"),
        (GEMMA4, "audio_config", {"conv_kernel_size": 65}, "conv_kernel_size .*1 to 64"),
        (GEMMA4, "audio_config", {"hidden_act": "selu"}, "hidden_act .*relu"),
        (GRANITE_SPEECH, "encoder_config", {"num_layers": 0}, "num_layers .*>= 1"),
        (GRANITE_SPEECH, "encoder_config", {"input_dim": 161}, "input_dim .*an even number"),
        (GRANITE_SPEECH, "encoder_config", {"context_size": 600}, "context_size .*at most max_pos_emb 512"),
        (GRANITE_SPEECH, "encoder_config", {"context_size": 2**63}, "context_size .*<= 2147483647"),
        (GRANITE_SPEECH, "encoder_config", {"num_heads": 2048}, "dim_head .*1 to 4096"),
        (GRANITE_SPEECH, "encoder_config", {"conv_kernel_size": 65}, "conv_kernel_size .*<= 64"),
        (GRANITE_SPEECH, "encoder_config", {"output_dim": "7"}, "output_dim"),
        (GRANITE_SPEECH, "projector_config", {"use_qformer_text_input": True}, "use_qformer_text_input"),
        (GRANITE_SPEECH, "projector_config", {"encoder_hidden_size": 1408}, "encoder_hidden_size .*hidden_dim"),
        (GRANITE_SPEECH, "projector_config", {"num_attention_heads": 3}, "num_attention_heads .*divisor"),
        (GRANITE_SPEECH, "text_config", {"model_type": "t5"}, "model_type must be that of a decoder"),
        (GRANITE_PLUS, "encoder_config", {"cat_hidden_layers": [16]}, "cat_hidden_layers .*< num_layers 16"),
        (GRANITE_PLUS, "encoder_config", {"cat_hidden_layers": 3}, "cat_hidden_layers .*a list of integers"),
        (GRANITE_PLUS, "encoder_config", {"cat_hidden_layers": [True]}, "cat_hidden_layers .*a list of integers"),
        (GRANITE_PLUS, "encoder_config", {"cat_hidden_layers": [3, 3]}, "cat_hidden_layers .*different integers"),
        (GRANITE_PLUS, "encoder_config", {"cat_hidden_layers": [3, 4]}, "encoder_hidden_size .*1024, 3 times"),
        (AUDIO_FLAMINGO, "audio_config", {"max_source_positions": 1501}, "max_source_positions .*an even number"),
        (GLM_ASR, "audio_config", {"num_attention_heads": 19}, "num_attention_heads .*divisor of hidden_size"),
        (
            GLM_ASR,
            "audio_config",
            {"num_key_value_heads": 3},
            "num_key_value_heads .*divisor of num_attention_heads 20",
        ),
        (GLM_ASR, "audio_config", {"head_dim": 32}, "head_dim .*64 or absent"),
        (GLM_ASR, "audio_config", {"hidden_act": "selu"}, "hidden_act .*relu"),
        (MUSIC_FLAMINGO, "rope_parameters", {"partial_rotary_factor": 0.51}, "rope_parameters .*half of 1280"),
        (MUSIC_FLAMINGO, "rope_parameters", {"rope_theta": 749.0}, "rope_parameters .*a rope_theta of 750"),
        (MUSIC_FLAMINGO, "rope_parameters", {"rope_type": "yarn"}, "rope_parameters .*absent"),
        (GLM_ASR, "audio_config", {"intermediate_size": 2560}, "intermediate_size .*5120, the size of 4 joined"),
        (GLM_ASR, "audio_config", {"max_position_embeddings": 1502}, "max_position_embeddings .*a multiple of 4"),
        (GLM_ASR, "audio_config", {"max_position_embeddings": 2**26}, "max_position_embeddings .*at most 16384"),
        (GLM_ASR, "audio_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters .*default"),
        (GLM_ASR, "audio_config", {"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor .*share"),
        (QWEN3_ASR["thinker_config"], "audio_config", {"n_window_infer": 150}, "n_window_infer .*a multiple of twice"),
        (QWEN3_ASR["thinker_config"], "audio_config", {"output_dim": 1}, "output_dim .*hidden_size of the text model"),
    ],
)
def test_what_is_refused(raw, part, changes, message):
    architectures = raw.get("architectures", QWEN3_ASR["architectures"])
    with pytest.raises(ModelConfigError, match=message):
        read_hf({**raw, "architectures": architectures, part: {**raw[part], **changes}})
    with pytest.raises(ModelConfigError, match=part):
        read_hf({**raw, "architectures": architectures, part: 3})
