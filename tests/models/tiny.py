"""The smallest model with grouped heads, for tests that bring their own weights, and changes of a configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.rope import Rope

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    attention=(LayerAttention(num_heads=4, num_kv_heads=2, head_dim=6, rope=Rope(6)),) * 3,
)


def with_attention(config: ModelConfig, *, num_layers: int | None = None, **changes: Any) -> ModelConfig:
    """The configuration with these fields of LayerAttention changed in all layers, which are then alike."""
    changed = replace(config.attention[0], **changes)
    return replace(config, attention=(changed,) * (num_layers or config.num_layers))


def with_windows(config: ModelConfig, *windows: int | None) -> ModelConfig:
    """The configuration with one layer for each of the windows."""
    return replace(config, attention=tuple(replace(config.attention[0], window=window) for window in windows))


def windows_of(config: ModelConfig) -> list[int | None]:
    """The window of each layer."""
    return [layer.window for layer in config.attention]
