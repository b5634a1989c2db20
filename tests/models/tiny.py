"""The smallest model with grouped heads, for tests that bring their own weights."""

from __future__ import annotations

from models.config.model_config import ModelConfig

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=64,
    sliding_window=(None,) * 3,
)
