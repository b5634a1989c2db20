"""The models there are: one row per architecture, and the abstract construction of any of them."""

from __future__ import annotations

from typing import Any

from flax import nnx

from models.causal_lm import CausalLM
from models.config import ModelConfig
from models.config_fields import ModelConfigError
from models.llama import LlamaForCausalLM, MistralForCausalLM
from models.qwen2 import Qwen2ForCausalLM
from models.qwen3 import Qwen3ForCausalLM

# Keys are the class names that config.json lists under "architectures".
MODELS: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def model_for_hf(architecture: str) -> type[CausalLM]:
    if architecture not in MODELS:
        raise ModelConfigError(f"architectures must be one of {', '.join(MODELS)}, got {architecture!r}")
    return MODELS[architecture]


def model_for_gguf(architecture: str) -> type[CausalLM]:
    by_name = {model.gguf_architecture: model for model in MODELS.values() if model.gguf_architecture is not None}
    if architecture not in by_name:
        raise ModelConfigError(f"general.architecture must be one of {', '.join(by_name)}, got {architecture!r}")
    return by_name[architecture]


def build_model(config: ModelConfig, *, dtype: Any) -> CausalLM:
    """The model of a ModelConfig with ShapeDtypeStructs for weights: nothing is allocated until load_params."""
    model = model_for_hf(config.architecture)
    return nnx.eval_shape(lambda: model(config, dtype=dtype))
