"""Values that transformers' configuration classes of models with towers have for nested configurations that a file
lacks, for fields that a nested configuration lacks, and for fields that it has under another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VISION, _TEXT, _AUDIO, _ENCODER = "vision_config", "text_config", "audio_config", "encoder_config"
_MODEL_TYPE = "model_type"
_CLIP = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
_SMALL_QWEN = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
_SHORT_EPS = {"rms_norm_eps": 1e-5}
_CLIP_VISION, _SIGLIP_VISION = "clip_vision_model", "siglip_vision_model"


def _theta(theta: float) -> dict[str, Any]:
    """Return the field rope_parameters of a plain rope with the base `theta`."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


# model_type -> nested configuration -> its model_type, and fields in which an absent one differs from an empty one.
# Without text_config where fields of the text may be outside of it.
_PARTS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "aria": {_VISION: ("idefics3_vision", {}), _TEXT: ("aria_text", {})},
    "audioflamingo3": {_AUDIO: ("audioflamingo3_encoder", {}), _TEXT: ("qwen2", {})},
    "aya_vision": {_VISION: (_SIGLIP_VISION, _SIGLIP | {"num_attention_heads": 14}), _TEXT: ("cohere2", {})},
    "blip-2": {
        _VISION: ("blip_2_vision_model", {}),
        _TEXT: ("opt", {}),
        "qformer_config": ("blip_2_qformer", {}),
    },
    "cohere2_vision": {
        _VISION: (_SIGLIP_VISION, {"hidden_size": 1152, "num_hidden_layers": 27, "image_size": 512}),
        _TEXT: ("cohere2", {}),
    },
    "cohere_asr": {_ENCODER: ("parakeet_encoder", {})},
    "deepseek_ocr2": {_VISION: ("deepseek_ocr2_vision", {}), _TEXT: ("deepseek_ocr2_text", {})},
    "deepseek_vl": {_VISION: (_SIGLIP_VISION, {}), _TEXT: ("llama", {})},
    "embedding_gemma2": {_TEXT: ("embedding_gemma2_text", {})},
    "ernie4_5_vl_moe": {_VISION: ("ernie4_5_vl_moe_vision", {})},
    "exaone4_5": {_VISION: ("exaone4_5_vision", {}), _TEXT: ("exaone4", {})},
    "fun_asr_nano": {
        _AUDIO: ("fun_asr_nano_encoder", {}),
        _TEXT: ("qwen3", {**_SMALL_QWEN, "max_position_embeddings": 40960, "tie_word_embeddings": True}),
    },
    "gemma3": {_VISION: (_SIGLIP_VISION, {}), _TEXT: ("gemma3_text", {})},
    "gemma3n": {_TEXT: ("gemma3n_text", {})},
    "gemma4": {_TEXT: ("gemma4_text", {})},
    "gemma4_unified": {_TEXT: ("gemma4_unified_text", {})},
    "glm4v": {_VISION: ("glm4v_vision", {}), _TEXT: ("glm4v_text", {})},
    "glm4v_moe": {_VISION: ("glm4v_moe_vision", {}), _TEXT: ("glm4v_moe_text", {})},
    "glm_ocr": {_VISION: ("glm_ocr_vision", {}), _TEXT: ("glm_ocr_text", {})},
    "glmasr": {_AUDIO: ("glmasr_encoder", {}), _TEXT: ("llama", {})},
    "got_ocr2": {
        _VISION: ("got_ocr2_vision", {}),
        _TEXT: (
            "qwen2",
            {
                "vocab_size": 151860,
                "hidden_size": 1024,
                "intermediate_size": 2816,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "tie_word_embeddings": True,
                **_theta(1e6),
            },
        ),
    },
    "granite_docling": {_VISION: ("granite_docling_vision", {}), _TEXT: ("granite_docling_text", {})},
    "granite4_vision": {
        _VISION: (_CLIP_VISION, {}),
        _TEXT: ("granite4_vision_text", {}),
        "qformer_config": ("blip_2_qformer", {"num_hidden_layers": 1, "cross_attention_frequency": 1}),
    },
    **{
        kind: {
            _ENCODER: (f"{kind}_encoder", {}),
            _TEXT: ("granite", {}),
            "projector_config": ("blip_2_qformer", {}),
        }
        for kind in ("granite_speech", "granite_speech_plus")
    },
    "hunyuan_vl": {_VISION: ("hunyuan_vl_vision", {})},
    "hy_v4_vl": {_VISION: ("hy_v4_vl_vision", {}), _TEXT: ("hy_v4_vl_text", {})},
    "hyperclovax_vision_v2": {_VISION: ("qwen2_5_vl_vision", {}), _TEXT: ("hyperclovax", {})},
    "idefics2": {
        _VISION: ("idefics2_vision", {}),
        _TEXT: ("mistral", {"max_position_embeddings": 32768, **_SHORT_EPS}),
        "perceiver_config": ("idefics2_perceiver", {}),
    },
    "idefics3": {_VISION: ("idefics3_vision", {}), _TEXT: ("llama", _SHORT_EPS)},
    "internvl": {_VISION: ("internvl_vision", {}), _TEXT: ("qwen2", {})},
    "janus": {_VISION: ("janus_vision_model", {}), _TEXT: ("llama", {})},
    "lfm2_vl": {_VISION: ("siglip2_vision_model", {}), _TEXT: ("lfm2", {})},
    "lfm3_vl": {_VISION: ("lfm3_vl_vision", {}), _TEXT: ("lfm3", {})},
    "lighton_ocr": {
        _VISION: ("pixtral", {"image_size": 1540, "patch_size": 14, "hidden_act": "silu"}),
        _TEXT: ("qwen3", {**_SMALL_QWEN, "max_position_embeddings": 40960, **_theta(1e6)}),
    },
    "llama4": {_VISION: ("llama4_vision_model", {}), _TEXT: ("llama4_text", {})},
    **{
        kind: {_VISION: (_CLIP_VISION, _CLIP), _TEXT: ("llama", {})}
        for kind in ("llava", "llava_next", "llava_next_video", "vipllava")
    },
    "llava_onevision": {_VISION: (_SIGLIP_VISION, _SIGLIP), _TEXT: ("qwen2", {})},
    **{
        kind: {_VISION: (f"{kind}_vision", {}), _TEXT: ("qwen3_5_text", {})}
        for kind in ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr")
    },
    "mistral3": {
        _VISION: ("pixtral", {"image_size": 1540, "patch_size": 14}),
        _TEXT: (
            "mistral",
            {
                "vocab_size": 131072,
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "num_hidden_layers": 40,
                "head_dim": 128,
                "sliding_window": None,
                **_SHORT_EPS,
                **_theta(1e9),
            },
        ),
    },
    "mllama": {_VISION: ("mllama_vision_model", {}), _TEXT: ("mllama_text_model", {})},
    "moss_transcribe_diarize": {
        _AUDIO: ("moss_transcribe_diarize_audio", {}),
        _TEXT: ("qwen3", {**_SMALL_QWEN, "max_position_embeddings": 131072, **_theta(1e6)}),
    },
    "musicflamingo": {_AUDIO: ("audioflamingo3_encoder", {}), _TEXT: ("qwen2", {})},
    "ovis2": {_VISION: ("ovis2_vision", {}), _TEXT: ("qwen2", {})},
    "paddleocr_vl": {_VISION: ("paddleocr_vl_vision", {})},
    "paligemma": {
        _VISION: (_SIGLIP_VISION, _SIGLIP | {"intermediate_size": 4096, "num_hidden_layers": 27, "image_size": 224}),
        _TEXT: (
            "gemma",
            {
                "vocab_size": 257152,
                "hidden_size": 2048,
                "intermediate_size": 16384,
                "num_hidden_layers": 18,
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
            },
        ),
    },
    "phi4_multimodal": {_VISION: ("phi4_multimodal_vision", {})},
    "qianfan_ocr": {_VISION: ("qianfan_ocr_vision", {}), _TEXT: ("qwen3", {})},
    **{
        kind: {
            _VISION: (f"{kind.removesuffix('_thinker')}_vision_encoder", {}),
            _AUDIO: (f"{kind.removesuffix('_thinker')}_audio_encoder", {}),
            _TEXT: (f"{kind.removesuffix('_thinker')}_text", {}),
        }
        for kind in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
    },
    **{kind: {_VISION: (f"{kind}_vision", {})} for kind in ("qwen2_vl", "qwen2_5_vl")},
    "qwen2_audio": {_AUDIO: ("qwen2_audio_encoder", {}), _TEXT: ("qwen2", {})},
    "qwen3_asr": {
        _AUDIO: ("qwen3_asr_encoder", {}),
        _TEXT: (
            "qwen3",
            _SMALL_QWEN
            | {
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "max_position_embeddings": 65536,
                "tie_word_embeddings": True,
            },
        ),
    },
    **{
        kind: {_VISION: (f"{kind}_vision", {}), _TEXT: (f"{kind}_text", {})}
        for kind in ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp")
    },
    "smolvlm": {_VISION: ("smolvlm_vision", {}), _TEXT: ("llama", _SHORT_EPS)},
    "vibevoice_asr": {
        _TEXT: ("qwen2", {}),
        "acoustic_tokenizer_encoder_config": ("vibevoice_acoustic_tokenizer_encoder", {}),
        "semantic_tokenizer_encoder_config": ("vibevoice_acoustic_tokenizer_encoder", {"hidden_size": 128}),
    },
    "video_llama_3": {_VISION: ("video_llama_3_vision", {}), _TEXT: ("qwen2", {})},
    "voxtral": {_AUDIO: ("voxtral_encoder", {}), _TEXT: ("llama", {})},
}
_COLUMNS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
_DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# model_type of a nested configuration -> values of _COLUMNS, or none, and further fields, for those that it lacks.
# Types whose readers have such values themselves are left out.
_SIZES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "ernie4_5_vl_moe_text": ((103424, 2560, 12288, 28, 20, 131072), {}),
    "exaone4": ((102400, 4096, 16384, 32, 32, 2048), {}),
    "glm4v_moe_text": ((151424, 4096, 10944, 46, 96, 65536), {}),
    "glm4v_text": ((151552, 4096, 13696, 40, 32, 32768), {}),
    "glm_ocr_text": ((59392, 1024, 4096, 16, 16, 131072), {}),
    "hunyuan_vl_text": ((290943, 4096, 11008, 32, 32, 2048), {}),
    "hyperclovax": ((32000, 4096, 11008, 32, 32, 2048), {}),
    "lfm2": ((65536, 2560, 12288, 32, 32, 128000), {}),
    "lfm3": ((128000, 2048, 7680, 24, 16, 128000), {}),
    "llama4_text": ((202048, 5120, 8192, 48, 40, 131072), {"num_local_experts": 16, "num_experts_per_tok": 1}),
    "mistral": ((32000, 4096, 14336, 32, 32, 131072), {}),
    "opt": ((50272, 768, 3072, 12, 12, 2048), {"bos_token_id": 2, "eos_token_id": 2}),
    "paddleocr_vl_text": ((103424, 1024, 3072, 18, 16, 131072), {}),
    "qwen2_vl_text": ((152064, 8192, 29568, 80, 64, 32768), {}),
    "qwen2_5_vl_text": ((152064, 8192, 29568, 80, 64, 32768), {}),
    "qwen2_5_omni_vision_encoder": ((), {"hidden_size": 3584}),
    "qwen2_5_vl_vision": ((), {"hidden_size": 3584}),
    "qwen3_5_moe_text": (
        (248320, 2048, 512, 40, 16, 32768),
        {
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            **_DELTA,
        },
    ),
    "qwen3_5_text": ((248320, 4096, 12288, 32, 16, 32768), _DELTA),
    "qwen3_omni_moe_text": ((3584, 2048, 18944, 28, 28, 32768), {}),
    "qwen3_vl_moe_text": (
        (151936, 2048, 5632, 24, 16, 128000),
        {"num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
    ),
    "qwen3_vl_text": ((151936, 4096, 22016, 32, 32, 128000), {}),
}
_LLAMA = (32000, 4096, 11008, 32, 32, 2048)
_GEMMA_IDS = {"bos_token_id": 2, "eos_token_id": 1}
_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_QWEN = ((151936, 4096, 22016, 32, 32, 32768), {"max_window_layers": 28})
# The same of text models under a tower, for fields that are absent after all others have been filled in.
_TEXTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "cohere": ((256000, 8192, 22528, 40, 64, 8192), {}),
    "cohere2": ((256000, 8192, 22528, 40, 64, 8192), {}),
    "gemma": ((256000, 3072, 24576, 28, 16, 8192), _GEMMA_IDS),
    "gemma2": ((256000, 2304, 9216, 26, 8, 8192), _GEMMA_IDS),
    "granite": (_LLAMA, {}),
    "llama": (_LLAMA, _IDS),
    "mistral": ((), _IDS),
    "qwen2": _QWEN,
    "qwen3": _QWEN,
}
# model_type -> other names of fields, which count where the field itself is absent.
_OTHER_NAMES: dict[str, dict[str, str]] = {
    "ernie4_5_vl_moe_text": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    **{
        kind: {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
        for kind in (
            *("ernie4_5_vl_moe_vision", "exaone4_5_vision", "glm4v_moe_vision", "glm4v_vision", "glm_ocr_vision"),
            *("qwen2_5_omni_vision_encoder", "qwen2_5_vl_vision", "qwen2_vl_vision", "qwen3_5_moe_vision"),
            *("qwen3_5_vision", "qwen3_omni_moe_vision_encoder", "qwen3_vl_moe_vision", "qwen3_vl_vision"),
            "qwen4_exp_vision",
        )
    },
    "glm5_next_text": {"num_local_experts": "n_routed_experts"},
    "granite_speech_encoder": {"hidden_size": "hidden_dim"},
    "granite_speech_plus_encoder": {"hidden_size": "hidden_dim"},
    "hunyuan_vl_text": {"org_vocab_size": "vocab_size"},
    "hy_v4_vl_text": {"num_local_experts": "n_routed_experts"},
    "hy_v4_vl_vision": {"attention_heads": "num_attention_heads", "layer_norm_eps": "rms_norm_eps"},
    "lfm3": {"rms_norm_eps": "norm_eps"},
    "moonshine": {
        name: f"decoder_{name}"
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act")
    },
    **{
        kind: {
            "num_hidden_layers": "encoder_layers",
            "hidden_size": "d_model",
            "num_attention_heads": "encoder_attention_heads",
            "intermediate_size": "encoder_ffn_dim",
        }
        for kind in ("qwen2_5_omni_audio_encoder", "qwen2_audio_encoder")
    },
    "openai_privacy_filter": {"num_local_experts": "num_experts"},
    "whisper": {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    },
}


def with_parts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config.json with the nested configurations of transformers' class of its `model_type`. One
    that is absent or null becomes the class's own; one without model_type gets the class's usual one. A file whose
    model_type is not in _PARTS, and a nested configuration that is not a mapping, are returned unchanged.
    """
    found = dict(raw)
    for name, (kind, differing) in _PARTS.get(str(raw.get(_MODEL_TYPE)), {}).items():
        own = raw.get(name)
        if own is None:
            found[name] = {_MODEL_TYPE: kind, **differing}
        elif isinstance(own, Mapping) and own.get(_MODEL_TYPE) is None:
            found[name] = {**own, _MODEL_TYPE: kind}
    return found


def with_sizes(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a nested configuration in which absent fields, but not null ones, have the sizes of
    transformers' class of its `model_type`.
    """
    sizes, more = _SIZES.get(str(part.get(_MODEL_TYPE)), ((), {}))
    return {**dict(zip(_COLUMNS, sizes, strict=False)), **more, **part}


def with_text_sizes(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the configuration of a text model under a tower in which absent fields, but not null ones, have
    the sizes of transformers' class of its `model_type`.
    """
    sizes, more = _TEXTS.get(str(text.get(_MODEL_TYPE)), ((), {}))
    return with_sizes({**dict(zip(_COLUMNS, sizes, strict=False)), **more, **text})


def with_usual_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of one mapping of fields in which a field that is absent, but present under the other name that
    transformers' class of its `model_type` has for it, has its value.
    """
    names = _OTHER_NAMES.get(str(raw.get(_MODEL_TYPE)), {})
    return {**{name: raw[other] for other, name in names.items() if raw.get(other) is not None}, **raw}
