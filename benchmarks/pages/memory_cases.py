"""Engines whose memory is measured: the default model in several ways, and models of other families.

A model of another family is the recorded checkpoint of the tests with larger sizes, without weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.picture_checkpoints import whole_checkpoint

# Few steps, so that a start compiles little.
FEW: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "compilation_config": {"cudagraph_capture_sizes": [16], "prefill_sizes": [256]},
}
# Engine options by case, for the default model.
DEFAULT: dict[str, dict[str, Any]] = {
    "default": {},
    "default, bfloat16": {"dtype": "bfloat16", **FEW},
    "default, GGUF kept": {"quantization": "gguf", **FEW},
    "default, ngram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, **FEW},
    "default, draft model": {
        "speculative_config": {"method": "draft_model", "model": "first layers", "num_speculative_tokens": 3},
        **FEW,
    },
    "default, adapters": {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16, **FEW},
    "default, tp 2": {"tensor_parallel_size": 2, **FEW},
    "default, pp 2": {"pipeline_parallel_size": 2, **FEW},
}
_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
}
_EXPERTS = {**_SIZES, "moe_intermediate_size": 1024}
_MAMBA = {"mamba_d_head": 64, "mamba_d_ssm": 2048, "mamba_n_heads": 32, "mamba_d_state": 64, "mamba_n_groups": 1}
_MLA = {"kv_lora_rank": 256, "q_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "qk_head_dim": 96}
_LINEAR = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 8}
# By case: the recorded checkpoint, and fields of its config.json that are replaced.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {**_SIZES, "num_hidden_layers": 4}),
    "Llama, int8": ("llama", {**_SIZES, "num_hidden_layers": 4}),
    "Mistral": ("mistral", {**_SIZES, "sliding_window": 128, "num_hidden_layers": 4}),
    "Qwen 2": ("qwen2", {**_SIZES, "sliding_window": 128}),
    "Qwen 3": ("qwen3", {**_SIZES, "vocab_size": 64000}),
    "Phi-3": ("phi3", {**_SIZES, "num_key_value_heads": 16, "sliding_window": 128}),
    "Gemma 2": ("gemma2", {**_SIZES, "sliding_window": 128, "query_pre_attn_scalar": 64}),
    "OLMo 2": ("olmo2", {**_SIZES, "num_hidden_layers": 4}),
    "Qwen 3 MoE": ("qwen3_moe", {**_EXPERTS}),
    "Mixtral": ("mixtral", {**_SIZES, "intermediate_size": 1024, "sliding_window": 128}),
    "gpt-oss": ("gpt_oss", {**_SIZES, "intermediate_size": 1024, "sliding_window": 128}),
    "DeepSeek-V3": ("deepseek_v3", {**_EXPERTS, **_MLA, "num_key_value_heads": 16, "v_head_dim": 64}),
    "Falcon-H1": ("falcon_h1", {**_SIZES, **_MAMBA}),
    "Qwen 3 Next": ("qwen3_next", {**_EXPERTS, **_LINEAR, "linear_num_value_heads": 16}),
    "Qwen 2 VL": ("qwen2_vl_vision", {}),
}
# Further engine options of cases in FAMILIES. The default model is quantised already.
_OPTIONS: dict[str, dict[str, Any]] = {"Llama, int8": {"quantization": "int8"}}
_TEXT = {**{name: size for name, size in _SIZES.items() if name != "vocab_size"}, "num_hidden_layers": 6}
# Text of a picture in a prompt of the model that sees, and the sides of one that its processor leaves as it is.
PICTURE, PICTURE_SIDE = "<|vision_start|><|image_pad|><|vision_end|>", 64
_VISION = {"embed_dim": 512, "hidden_size": 1024, "num_heads": 8, "mlp_ratio": 4, "depth": 8}


def devices_of(options: dict[str, Any]) -> int:
    """Return the number of devices of an engine with these options: tensor_parallel_size * pipeline_parallel_size."""
    return options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)


def write_family(name: str, folder: Path) -> dict[str, Any]:
    """Write the model of a case in FAMILIES, without weights, to `folder`, which does not exist; return the engine
    options for it. A model that sees also gets its tokenizer and processor.
    """
    recorded, fields = FAMILIES[name]
    sees = recorded.endswith("_vision")
    if sees:
        whole_checkpoint(recorded, folder)
        for file in folder.glob("*.safetensors"):
            file.unlink()
    else:
        folder.mkdir()
    config = json.loads((FOLDER / recorded / "config.json").read_text())
    config |= fields
    if sees:
        text, rope = config["text_config"], config["text_config"]["rope_parameters"]
        config["text_config"] = {**text, **_TEXT, "rope_parameters": {**rope, "mrope_section": [8, 12, 12]}}
        config["text_config"]["layer_types"] = ["full_attention"] * _TEXT["num_hidden_layers"]
        config["vision_config"] |= _VISION
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": not sees,
        **FEW,
        **_OPTIONS.get(name, {}),
    }
