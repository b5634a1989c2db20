"""Shapes of well-known models by name, as published in their config.json, and a function that reads any other model's.

A check needs no weights: a name of this table needs no files at all, a hub id only its config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxengine.check.model.published import CONFIGS
from jaxengine.checkpoint.hub import download
from jaxengine.checkpoint.model_source import as_asked, open_model
from jaxengine.config.base.files import named_path
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.inputs.multimodal import AUDIO, IMAGE
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import CONFIG_FILE, QUANTIZATION_FILE
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.registry import read_folder, read_hf

_MOST_PATCHES = 16384
_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_LLAMA31: dict[str, Any] = {**_LLAMA3, "max_position_embeddings": 131072}
_QWEN2: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "attention": {"bias": True},
}
_QWEN3: dict[str, Any] = {
    **_QWEN2,
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "attention": {"qk_norm": True},
}
_SMOLLM2: dict[str, Any] = {"vocab_size": 49152, "rms_norm_eps": 1e-5, "head_dim": 64, "tie_word_embeddings": True}


def _llama_rope(factor: float) -> RopeScaling | None:
    """Return Llama 3.1's scaling of rotary frequencies by `factor`, from 8,192 to 131,072 positions."""
    return RopeScaling.from_hf(
        {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        131072,
    )


def _model(
    architecture: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    *,
    rope_theta: float,
    rope_scaling: RopeScaling | None = None,
    head_dim: int | None = None,
    attention: Mapping[str, Any] = MappingProxyType({}),
    windows: tuple[int | None, ...] = (None,),
    **fields: Any,
) -> ModelConfig:
    """Return the shape of a text model.

    architecture: name in config.json. hidden, intermediate: sizes of activations and of the feed-forward part.
    rope_theta: base of the rotary frequencies. rope_scaling: their scaling; None if they are not scaled. head_dim: None
    for hidden // heads. attention: additional fields of every layer's LayerAttention. windows: attention windows,
    repeated over the layers. fields: other fields of ModelConfig.
    """
    head_dim = head_dim or hidden // heads
    rope = Rope(head_dim, rope_theta, rope_scaling)
    kinds = [LayerAttention(heads, kv_heads, head_dim, rope, window=window, **attention) for window in windows]
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=intermediate,
        attention=tuple(kinds[layer % len(kinds)] for layer in range(layers)),
        **fields,
    )


_LLAMA, _QWEN2_NAME, _QWEN3_NAME = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"

SHAPES: dict[str, ModelConfig] = {
    "smollm2-135m": _model(_LLAMA, 30, 576, 1536, 9, 3, rope_theta=1e5, max_position_embeddings=8192, **_SMOLLM2),
    "smollm2-360m": _model(_LLAMA, 32, 960, 2560, 15, 5, rope_theta=1e5, max_position_embeddings=8192, **_SMOLLM2),
    "smollm2-1.7b": _model(_LLAMA, 24, 2048, 8192, 32, 32, rope_theta=1.3e5, max_position_embeddings=8192, **_SMOLLM2),
    "llama-3.2-1b": _model(
        _LLAMA, 16, 2048, 8192, 32, 8, tie_word_embeddings=True, rope_scaling=_llama_rope(32.0), **_LLAMA31
    ),
    "llama-3.2-3b": _model(
        _LLAMA, 28, 3072, 8192, 24, 8, tie_word_embeddings=True, rope_scaling=_llama_rope(32.0), **_LLAMA31
    ),
    "llama-3.1-8b": _model(_LLAMA, 32, 4096, 14336, 32, 8, rope_scaling=_llama_rope(8.0), **_LLAMA31),
    "llama-3.3-70b": _model(_LLAMA, 80, 8192, 28672, 64, 8, rope_scaling=_llama_rope(8.0), **_LLAMA31),
    "mistral-7b-v0.3": _model(
        "MistralForCausalLM",
        32,
        4096,
        14336,
        32,
        8,
        vocab_size=32768,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        max_position_embeddings=32768,
    ),
    "qwen2.5-0.5b": _model(
        _QWEN2_NAME,
        24,
        896,
        4864,
        14,
        2,
        vocab_size=151936,
        tie_word_embeddings=True,
        **_QWEN2,
    ),
    "qwen2.5-7b": _model(_QWEN2_NAME, 28, 3584, 18944, 28, 4, vocab_size=152064, **_QWEN2),
    "qwen3-0.6b": _model(_QWEN3_NAME, 28, 1024, 3072, 16, 8, tie_word_embeddings=True, **_QWEN3),
    "qwen3-8b": _model(_QWEN3_NAME, 36, 4096, 12288, 32, 8, **_QWEN3),
    "qwen3-32b": _model(_QWEN3_NAME, 64, 5120, 25600, 64, 8, **_QWEN3),
    "qwen3-moe-30b-a3b": _model(
        "Qwen3MoeForCausalLM",
        48,
        2048,
        6144,
        32,
        4,
        experts=ExpertsConfig(num_experts=128, num_per_token=8, intermediate_size=768),
        **_QWEN3,
    ),
    "phi-3-mini": _model(
        "Phi3ForCausalLM",
        32,
        3072,
        8192,
        32,
        32,
        vocab_size=32064,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=4096,
        windows=(2047,),
    ),
    "gemma-2-2b": _model(
        "Gemma2ForCausalLM",
        26,
        2304,
        9216,
        8,
        4,
        vocab_size=256000,
        rms_norm_eps=1e-6,
        head_dim=256,
        rope_theta=1e4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        attention={"scale": 256**-0.5, "soft_cap": 50.0},
        windows=(4096, None),
        logit_soft_cap=30.0,
    ),
    "mixtral-8x7b": _model(
        "MixtralForCausalLM",
        32,
        4096,
        14336,
        32,
        8,
        vocab_size=32000,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        max_position_embeddings=32768,
        experts=ExpertsConfig(num_experts=8, num_per_token=2, intermediate_size=14336),
    ),
    **{name: read_hf(raw) for name, raw in CONFIGS.items()},
}


def model_config(
    name: str, quantization: str | None = None, *, whole: bool = False, keep_tables: bool = True
) -> ModelConfig:
    """Return the shape of a model: a name from SHAPES, in any case, a GGUF file, a Hugging Face folder, or a hub id. A
    name from SHAPES comes before a file or folder of that name; a hub id's config.json is downloaded.

    A name from SHAPES may be followed by `:N` for its first N layers, which `whole` ignores. quantization: as in
    EngineConfig; None for the model's own. keep_tables: with quantization gguf, keep token tables in their storage
    format.

    Raises:
      ConfigError: the name is none of these, or the model is quantised in another way.
      ModelFileError: the model's files cannot be used.
    """
    path = named_path("model", name)
    if path.is_file() and name.lower().partition(":")[0] not in SHAPES:
        config = EngineConfig(model=name, load_format="dummy", quantization=quantization)
        return open_model(config, keep_tables=keep_tables).config
    return as_asked(_named(name, whole=whole), quantization)


def _named(name: str, *, whole: bool) -> ModelConfig:
    """Return the shape of a model: a name from SHAPES, a folder, or a hub id, whose config.json is downloaded.

    whole: ignore `:N` after a name from SHAPES. Raises ConfigError for other names, for `:N` outside 1 to the number of
    layers, and if the download fails; ModelFileError for a folder that cannot be used.
    """
    known, _, layers = name.lower().partition(":")
    if known in SHAPES and not layers:
        return SHAPES[known]
    if known in SHAPES and layers.isdigit() and 0 < int(layers) <= SHAPES[known].num_layers:
        if whole:
            return SHAPES[known]
        return replace(SHAPES[known], attention=SHAPES[known].attention[: int(layers)])
    path = named_path("model", name)
    if path.is_dir():
        return read_folder(path)
    if len(parts := name.split("/")) != 2 or not all(parts) or name.startswith((".", "~")):
        known = f"one of {', '.join(SHAPES)} (followed by :N for N layers)"
        advice = f"name a GGUF file, a Hugging Face folder, a hub id like org/name, or {known}"
        raise ConfigError.because("model", f"there is no model at {name!r}", advice)
    return read_folder(download("model", name, [CONFIG_FILE, QUANTIZATION_FILE]))


def largest_items(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return, by modality (IMAGE, AUDIO) of the model's towers, (embeddings, patches) assumed for the largest item.

    A check has no processor that would know them. A sound's are those of one window; an image has _MOST_PATCHES
    patches, rounded up to the tower's unit.
    """
    found = {}
    for tower in model.towers:
        patches = tower.window if tower.hears else -(-_MOST_PATCHES // tower.unit) * tower.unit
        found[AUDIO if tower.hears else IMAGE] = patches // tower.merge, patches
    return found
