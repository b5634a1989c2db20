"""Towers of published checkpoints whose pictures are squares, and what is wrong with those that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.model_classes import MODELS
from jaxengine.models.registry import model_for_hf, read_hf
from scripts.model_names import read_names
from tests.models.config.published import GEMMA3_VISION
from tests.models.config.test_published_towers import QWEN2_VL
from tests.tables import each_row

# llava-hf/llava-1.5-7b-hf
LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
# llava-hf/llava-interleave-qwen-0.5b-hf
LLAVA_SIGLIP = LLAVA | {
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "max_position_embeddings": 32768,
        "model_type": "qwen2",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 152000,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 26,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
# llava-hf/llava-v1.6-mistral-7b-hf
LLAVA_NEXT = LLAVA | {
    "architectures": ["LlavaNextForConditionalGeneration"],
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "text_config": {
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32064,
    },
}
# HuggingFaceTB/SmolVLM-256M-Instruct
SMOLVLM = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_token_id": 49190,
    "scale_factor": 4,
    "text_config": {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "vocab_size": 49280,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "intermediate_size": 3072,
        "model_type": "idefics3_vision",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "patch_size": 16,
    },
}
# OpenGVLab/InternVL3-1B-hf
INTERNVL = {
    "architectures": ["InternVLForConditionalGeneration"],
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "image_token_id": 151667,
    "text_config": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rope_theta": 1000000.0,
        "vocab_size": 151674,
    },
    "vision_config": {
        "attention_bias": True,
        "hidden_size": 1024,
        "image_size": [448, 448],
        "intermediate_size": 4096,
        "model_type": "internvl_vision",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
        "use_mean_pooling": True,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}

NAMED = {row.names[0]: row.config for row in read_names()}
ONEVISION, PALIGEMMA = (
    NAMED[name] for name in ("llava-hf/llava-onevision-qwen2-7b-ov-hf", "google/paligemma-3b-pt-224")
)
GOT_OCR, LIGHTON_OCR = (NAMED[name] for name in ("stepfun-ai/GOT-OCR-2.0-hf", "lightonai/LightOnOCR-1B-1025"))
# Whether layers have windows, by the text's model_type.
_COHERES = {"cohere": False, "cohere2": True}
AYA, COMMAND_A = (NAMED[f"CohereLabs/{name}"] for name in ("aya-vision-8b", "command-a-vision-07-2025"))


@pytest.mark.parametrize(
    ("raw", "unit", "rows", "features", "layers"),
    [
        (LLAVA, 576, 576, 588, 32),
        (LLAVA_SIGLIP, 729, 729, 588, 24),
        (LLAVA_NEXT, 576 + 24, 600, 588, 32),  # 24 ends of lines behind the patches of each tile
        (SMOLVLM, 1024, 64, 768, 30),
        (INTERNVL, 1024, 256, 588, 24),
        (GEMMA3_VISION, 4096, 256, 588, 48),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_published(raw, unit, rows, features, layers):
    config = read_hf(raw)
    assert config.tower is not None
    assert (config.tower.unit, config.tower.unit // config.tower.merge, config.tower.num_features) == (
        unit,
        rows,
        features,
    )
    assert config.num_layers == layers and config.tower.columns == () and config.tower.num_parts == 1
    assert config.tower.attends_both_ways == (raw is GEMMA3_VISION)


# Types of texts -> families, the first ones with Llama's layers.
LIKE_LLAMA = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "ernie4_5": "Ernie4_5",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
}
TEXTS = LIKE_LLAMA | {
    "gemma": "Gemma",
    "phi3": "Phi3",
    "cohere2": "Cohere2",
    "olmo2": "Olmo2",
    "stablelm": "StableLm",
    "glm4": "Glm4",
    "nemotron": "Nemotron",
    "starcoder2": "Starcoder2",
}


@each_row("kind", TEXTS)
def test_texts_of_llava(kind):
    """They are read as alone, by any family of decoders, whose layers and names of tensors they have."""
    fields = {"sliding_window": None, "head_dim": 64, "bos_token_id": 3, "eos_token_id": 5, "hidden_act": "silu"}
    text, family = LLAVA_SIGLIP["text_config"] | {"model_type": kind} | fields, MODELS[f"{TEXTS[kind]}ForCausalLM"]
    seen, alone = read_hf(LLAVA | {"text_config": text}), read_hf(text | {"architectures": [family.__name__]})
    assert replace(seen, tower=None, architecture=family.__name__) == alone
    model: Any = model_for_hf(seen.architecture)
    assert model.make_layer is family.make_layer and model.gguf_architecture is None
    assert (seen.architecture == "LlavaForConditionalGeneration") == (kind in LIKE_LLAMA)
    assert model.checkpoint_names.renamed("language_model.model.layers.0.mlp.x") == "model.layers.0.mlp.x"


def test_embeddings_of_images_are_multiplied_as_those_of_tokens():
    """Granite multiplies what towers give in any case, Gemma where a transformers before 5.4 wrote the file."""
    for kind, version, factor in (
        ("gemma", "4.39.0", 32.0),
        ("gemma2", "5.3.0", 32.0),
        ("gemma2", "5.4.0", 1.0),
        ("gemma", "5.24.0", 1.0),
        ("granite", "5.24.0", 3.0),
    ):
        text = LLAVA_SIGLIP["text_config"] | {"model_type": kind, "head_dim": 64, "embedding_multiplier": 3.0}
        raw = LLAVA | {"text_config": text, "transformers_version": version}
        assert read_hf(raw).tower.multiplier == factor, (kind, version)


def test_heads_of_wrapped_texts_have_no_bias():
    """Since transformers 4.52, of which classes with a tower have their own heads."""
    text = LLAVA_SIGLIP["text_config"] | {"model_type": "phi"}
    for version, has_bias in (("4.51.3", True), ("4.52.0", False), ("5.24.0", False)):
        assert read_hf(LLAVA | {"text_config": text, "transformers_version": version}).declared.head_bias == has_bias


def test_towers_of_internvl_without_positions():
    raw = changed(INTERNVL, use_absolute_position_embeddings=False)
    assert [read_hf(each).tower.has_positions for each in (raw, INTERNVL)] == [False, True]


@each_row(
    ("name", "unit", "rows", "features", "whole_prompt"),
    [
        ("llava-hf/llava-onevision-qwen2-7b-ov-hf", 729 + 27, 756, 588, 0),
        ("google/paligemma-3b-pt-224", 256, 256, 588, 8192),
        ("google/paligemma2-3b-pt-224", 256, 256, 588, 4096),  # a window
        ("CohereLabs/aya-vision-8b", 676, 169, 588, 0),
        ("CohereLabs/command-a-vision-07-2025", 1024, 256, 768, 0),
    ],
)
def test_published_by_name(name, unit, rows, features, whole_prompt):
    tower = read_hf(NAMED[name]).tower
    assert tower is not None
    assert (tower.unit, tower.unit // tower.merge, tower.num_features) == (unit, rows, features)
    assert tower.whole_prompt == whole_prompt and tower.attends_both_ways == (whole_prompt > 0)


def test_command_a_vision_takes_both_kinds_of_text():
    kinds = {kind: read_hf(with_text(COMMAND_A, model_type=kind)) for kind in _COHERES}
    assert {kind: any(each.window for each in config.attention) for kind, config in kinds.items()} == _COHERES
    assert all(each.rope for each in kinds["cohere"].attention)
    assert not all(each.rope for each in kinds["cohere2"].attention)


def test_text_that_lacks_what_its_class_has():
    """Files leave out what equals the defaults of the text's class."""
    qwen = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "max_position_embeddings": 32768}
    qwen |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 32)
    qwen |= {"sliding_window": 4096, "max_window_layers": 28}
    for raw in (ONEVISION, GOT_OCR, LIGHTON_OCR, INTERNVL):
        kind = "qwen3" if raw is LIGHTON_OCR else "qwen2"
        for window in (False, True):
            own = {"rope_theta": 1e6, "use_sliding_window": window}
            found = read_hf(raw | {"text_config": own}).attention
            assert found == read_hf(raw | {"text_config": own | qwen | {"model_type": kind}}).attention
            assert [each.window for each in found] == [None] * 28 + [4096 if window else None] * 4


def test_towers_that_lack_what_their_class_has():
    siglip = {"hidden_size": 768, "intermediate_size": 3072, "patch_size": 16, "image_size": 224}
    siglip |= {"num_hidden_layers": 12, "num_attention_heads": 12, "model_type": "siglip_vision_model"}
    raws = tuple(raw | {"vision_feature_layer": -1} for raw in (ONEVISION, AYA)) + (COMMAND_A, PALIGEMMA)
    for raw in raws:
        assert read_hf(raw | {"vision_config": {}}) == read_hf(raw | {"vision_config": siglip})
        with pytest.raises(ModelConfigError, match="vision_config must be a mapping, got None"):
            read_hf(raw | {"vision_config": None})
    gemma = {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "vocab_size": 256000}
    gemma |= {"num_attention_heads": 16, "num_key_value_heads": 16, "model_type": "gemma"}
    raw = PALIGEMMA | {"image_token_index": 5}
    assert read_hf(raw | {"text_config": {}}) == read_hf(raw | {"text_config": gemma})


def test_towers_of_all_kinds_have_the_same_activations():
    for raw, name in ((LLAVA, "vit"), (LIGHTON_OCR, None), (QWEN2_VL, None)):
        for each in ACTIVATIONS:
            tower: Any = read_hf(changed(raw, hidden_act=each)).tower
            assert (tower if name is None else getattr(tower, name)).activation == each


def test_lighton_without_a_tower_of_its_own():
    tower = read_hf(LIGHTON_OCR | {"vision_config": None, "model_type": "lighton_ocr"}).tower
    assert tower == read_hf(LIGHTON_OCR | {"vision_config": {"hidden_act": "silu", "patch_size": 14}}).tower
    for name, value in (("vision_feature_layer", -2), ("projector_hidden_act", "relu")):  # which its class has not
        assert read_hf(LIGHTON_OCR | {name: value}) == read_hf(LIGHTON_OCR)


def test_layers_behind_the_last_that_is_needed_stay_in_the_file():
    tower = read_hf(LLAVA).tower
    assert tower is not None and tower.unused[-1] == "vision_tower.encoder.layers.23."
    assert not any(name.startswith("vision_tower.encoder.layers.22.") for name in tower.unused)


def with_text(raw: dict[str, Any], **text: Any) -> dict[str, Any]:
    return raw | {"text_config": raw["text_config"] | text}


def changed(raw: dict[str, Any], **vision: Any) -> dict[str, Any]:
    return raw | {"vision_config": raw["vision_config"] | vision}


DEEPSEEK, DEEPSEEK_FIRST, LFM2 = (
    NAMED[name] for name in ("deepseek-community/DeepSeek-OCR-2", "deepseek-ai/DeepSeek-OCR-2", "LiquidAI/LFM2-VL-1.6B")
)


def test_deepseek_ocr2_as_it_was_published_first():
    assert read_hf(DEEPSEEK_FIRST) == read_hf(DEEPSEEK)


DEEPSEEK_OCR = NAMED["deepseek-ai/DeepSeek-OCR"]
# Its sizes as transformers calls those of Unlimited-OCR.
DEEPSEEK_NAMED = DEEPSEEK | {
    "architectures": ["DeepseekOCRForCausalLM"],
    "text_config": DEEPSEEK["text_config"] | {"model_type": "unlimited_ocr_text"},
    "vision_config": {
        "sam_config": DEEPSEEK["vision_config"]["sam_config"] | {"downsample_channels": [512, 1024]},
        "encoder_config": {},
    },
}


def test_deepseek_ocr_as_it_was_published():
    assert read_hf(DEEPSEEK_OCR) == read_hf(DEEPSEEK_NAMED)


def encoder(**sizes: Any) -> dict[str, Any]:
    """DeepSeek-OCR 2 with a second encoder of these sizes, and transformers' others."""
    return changed(DEEPSEEK, encoder_config=sizes)


@each_row(
    ("raw", "message"),
    [
        (LLAVA | {"vision_config": None}, "vision_config must be a mapping, got None"),
        (changed(LLAVA, model_type="vit"), "vision_config.model_type must be clip_vision_model or siglip"),
        (changed(LLAVA, num_attention_heads=15), "vision_config.num_attention_heads must be a divisor"),
        (changed(LLAVA, image_size=1 << 20), "vision_config.image_size must be an integer >= 1 and <= 4096"),
        (changed(LLAVA, image_size=[336, 224]), "vision_config.image_size must be the same for height and width"),
        (changed(LLAVA, patch_size=400), "vision_config.image_size must be >= patch_size 400, got 336"),
        (changed(LLAVA, hidden_act="prelu"), "vision_config.hidden_act must be one of gelu, "),
        (changed(LLAVA, num_channels=4), "vision_config.num_channels must be 3 or absent, got 4"),
        (LLAVA | {"vision_feature_layer": -26}, "vision_feature_layer must be an integer from -25 to 24, got -26"),
        (LLAVA | {"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy must be default or full"),
        (LLAVA_NEXT | {"vision_feature_select_strategy": "full"}, "strategy must be 'default' for a clip_vision_model"),
        (
            LLAVA | {"text_config": {"model_type": "t5"}},
            "model_type must be that of a decoder (...ForCausalLM) in docs/models.md, got",
        ),
        (SMOLVLM | {"scale_factor": 5}, "scale_factor must be such that it divides the 32 patches"),
        (INTERNVL | {"downsample_ratio": 0.3}, "downsample_ratio must be one divided by an integer, got 0.3"),
        (INTERNVL | {"downsample_ratio": 1e-310}, "downsample_ratio must be one divided by an integer, got 1e-310"),
        (
            ONEVISION | {"vision_aspect_ratio": "anyres_max_65"},
            "vision_aspect_ratio must be anyres_max_N with N from 1",
        ),
        (ONEVISION | {"vision_aspect_ratio": "square"}, "vision_aspect_ratio must be anyres_max_N with N from 1 to 64"),
        (AYA | {"downsample_factor": 3}, "downsample_factor must be such that it divides the 26 patches"),
        (AYA | {"alignment_intermediate_size": 5}, "alignment_intermediate_size must be an even number, got 5"),
        (AYA | {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy must be"),
        (
            AYA | {"text_config": {"model_type": "coherent"}},
            "(...ForCausalLM) in docs/models.md, the nearest are cohere, ",
        ),
        (with_text(PALIGEMMA, model_type="llama"), "model_type must be gemma or gemma2 in"),
        (changed(PALIGEMMA, model_type="clip_vision_model"), 'vision_config.model_type must be "siglip_vision_model"'),
        (
            PALIGEMMA | {"text_config": PALIGEMMA["text_config"] | {"use_bidirectional_attention": False}},
            "use_bidirectional_attention must be true or absent, got False",
        ),
        (changed(DEEPSEEK, sam_config={"image_size": 960}), "image_size must be a multiple of 16 * patch_size = 256"),
        (encoder(), "downsample_channels must be two sizes up to 131072, the second encoder_config.hidden_size 4096"),
        (
            changed(DEEPSEEK, sam_config={"downsample_channels": [1 << 30, 896]}),
            "downsample_channels must be two sizes up to 131072",
        ),
        *(
            (DEEPSEEK_FIRST | {name: DEEPSEEK_FIRST.get(name, {}) | {field: value}}, f"{name}.{field} must be")
            for name, field, value in (
                ("language_config", "use_mla", True),
                ("language_config", "moe_layer_freq", 2),
                ("projector_config", "projector_type", "downsample_mlp_gelu"),
            )
        ),
        (changed(DEEPSEEK_NAMED, encoder_config={"image_size": 210}), "image_size must be such that it has 16 patches"),
        (changed(DEEPSEEK_NAMED, sam_config={"downsample_channels": [1, 9]}), "downsample_channels must be two sizes"),
        (with_text(DEEPSEEK_NAMED, layer_types=["reference_sliding_attention"] * 12), "layer_types must be ["),
        (with_text(DEEPSEEK_NAMED, model_type="deepseek_ocr2_text"), "model_type must be unlimited_ocr_text in text_c"),
        (DEEPSEEK_FIRST | {"tile_tag": "1D"}, "tile_tag must be \"2D\" or absent, got '1D'"),
        (LFM2 | {"projector_hidden_size": 1 << 30}, "projector_hidden_size must be an integer >= 1 and <= 1048576"),
        (encoder(use_sliding_window=True), "use_sliding_window must be false or absent"),
        (encoder(num_key_value_heads=5), "num_key_value_heads must be a divisor of num_attention_heads 32, got 5"),
        (encoder(rope_parameters={"rope_type": "yarn"}), 'rope_parameters must be a mapping with the rope_type "defa'),
        (with_text(DEEPSEEK, mlp_layer_types=["dense"]), "mlp_layer_types must be a list of 12 of dense, sparse"),
        (with_text(DEEPSEEK, norm_topk_prob=True), "norm_topk_prob must be false or absent, got True"),
        (with_text(DEEPSEEK, topk_method="noaux_tc"), "topk_method must be 'greedy' or 'group_limited_greedy'"),
        (changed(LFM2, num_patches=255), "vision_config.num_patches must be a square, got 255"),
        (changed(LFM2, model_type="siglip_vision_model"), 'vision_config.model_type must be "siglip2_vision_model"'),
        (LFM2 | {"downsample_factor": 3}, "downsample_factor must be 1, 2, 4 or 8, got 3"),
        (LFM2 | {"vision_feature_layer": -2}, "vision_feature_layer must be -1 or absent, got -2"),
        (with_text(LFM2, model_type="lfm2_moe"), "model_type must be lfm2 in text_config, got 'lfm2_moe'"),
        (changed(INTERNVL, norm_type="batch"), "vision_config.norm_type must be one of layer_norm, rms_norm"),
        (
            GEMMA3_VISION | {"mm_tokens_per_image": 200},
            "mm_tokens_per_image must be a square whose side divides",
        ),
    ],
)
def test_refused(raw, message):
    with pytest.raises(ModelConfigError) as error:
        read_hf(raw)
    assert message in str(error.value)
