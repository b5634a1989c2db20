"""Values that transformers' configuration classes have for fields that a file lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN2 = ("qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text")
# Field -> default -> values of model_type whose class has it. For fields whose default is the same in most families,
# such as as many key/value heads as query heads; classes with latent attention, which has none, are left out.
_DEFAULTS: dict[str, dict[int, tuple[str, ...]]] = {
    "head_dim": {64: ("sarvam_moe",)},
    "num_key_value_heads": {
        2: (
            *("ernie4_5", "glm", "glm4", "glm4v_text", "internlm3", "paddleocr_vl_text", "qwen3_5_moe_text"),
            *("qwen3_next", "starcoder2"),
        ),
        4: (
            *("ernie4_5_moe", "ernie4_5_vl_moe_text", "flint", "gemma2", "gemma3_text", "gemma4_text"),
            *("gemma4_unified_text", "granite_swa", "kolibri1", "lara_mini", "lfm3", "mellum", "mimo_v2_flash"),
            *("qwen2_5_omni_text", "qwen3_5_text", "qwen3_moe", "qwen3_omni_moe_text", "sarvam_moe", "smollm3"),
            "vaultgemma",
        ),
        5: ("bitnet",),
        8: (
            *("bamba", "beam", "cwm", "exaone", "falcon_h1", "glm4_moe", "glm4v_moe_text", "glm_ocr_text", "gpt_oss"),
            *("hy_v3", "iquestcoder", "jamba", "laguna", "lfm2", "lfm2_moe", "llama4_text", "minimax", "minimax_m2"),
            *("ministral", "ministral3", "mistral", "mixtral", "nemotron_h", "phimoe", "qwen2_5_vl"),
            *("qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text", "seed_oss", "solar_open"),
        ),
        16: ("gemma", "qwen2_moe", "qwen3_vl_moe_text"),
        20: ("helium",),
        32: ("dots1", "exaone4", "exaone_moe", "qwen2", "qwen3", "qwen3_vl_text", "stablelm"),
    },
    "sliding_window": {4096: ("ministral", "mistral", "qwen3", *_QWEN2), 32768: ("qwen2_5_omni_text",)},
}


def with_class_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of one mapping of fields of a config.json in which absent fields have the defaults of the class of
    its `model_type`. A field that is null stays null.
    """
    kind = raw.get("model_type")
    defaults = {field: each for field, rows in _DEFAULTS.items() for each, kinds in rows.items() if kind in kinds}
    return {**defaults, **raw}
