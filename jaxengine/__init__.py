"""Public names of jaxengine, LLM inference on JAX. They are imported on first use, so that `import jaxengine` does not
import jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxengine.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxengine.api.async_llm import AsyncLLM
    from jaxengine.api.custom_models import register_model
    from jaxengine.api.engine_client import EngineDeadError
    from jaxengine.api.llm import LLM
    from jaxengine.config.compilation_config import CompilationConfig, CompilationLevel, CompilationMode
    from jaxengine.config.engine_args import EngineArgs
    from jaxengine.config.engine_args import EngineArgs as AsyncEngineArgs
    from jaxengine.config.engine_config import EngineConfig
    from jaxengine.config.errors import ConfigError
    from jaxengine.models.config.fields import ModelConfigError
    from jaxengine.models.params.errors import ModelFileError
    from jaxengine.requests.beam_search import BeamSearchParams
    from jaxengine.requests.lora import LoRARequest
    from jaxengine.requests.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxengine.requests.pooling.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from jaxengine.requests.pooling.params import PoolingParams
    from jaxengine.requests.prepared import TextPrompt, TokensPrompt
    from jaxengine.requests.sampling_params import RequestOutputKind, SamplingParams
    from jaxengine.requests.structured.params import StructuredOutputsParams
    from jaxengine.scheduler.errors import OverloadedError, RequestError
    from jaxengine.scheduler.logits_processor import Column, LogitsProcessor, VocabColumns

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "Column",
    "CompilationConfig",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "EngineDeadError",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "ModelConfigError",
    "ModelFileError",
    "OverloadedError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "VocabColumns",
    "register_model",
]

_HOMES = {
    "LLM": "jaxengine.api.llm",
    "AsyncLLM": "jaxengine.api.async_llm",
    "BeamSearchParams": "jaxengine.requests.beam_search",
    "ClassificationRequestOutput": "jaxengine.requests.pooling.outputs",
    "Column": "jaxengine.scheduler.logits_processor",
    "CompilationConfig": "jaxengine.config.engine_config",
    "CompletionOutput": "jaxengine.requests.outputs",
    "ConfigError": "jaxengine.config.engine_config",
    "EmbeddingRequestOutput": "jaxengine.requests.pooling.outputs",
    "EngineArgs": "jaxengine.config.engine_config",
    "EngineConfig": "jaxengine.config.engine_config",
    "EngineDeadError": "jaxengine.api.engine_client",
    "LoRARequest": "jaxengine.requests.lora",
    "LogitsProcessor": "jaxengine.scheduler.logits_processor",
    "Logprob": "jaxengine.requests.outputs",
    "ModelConfigError": "jaxengine.models.config.fields",
    "ModelFileError": "jaxengine.models.params.errors",
    "OverloadedError": "jaxengine.scheduler.errors",
    "PoolingOutput": "jaxengine.requests.pooling.outputs",
    "PoolingParams": "jaxengine.requests.pooling.params",
    "PoolingRequestOutput": "jaxengine.requests.pooling.outputs",
    "RequestError": "jaxengine.scheduler.errors",
    "RequestOutput": "jaxengine.requests.outputs",
    "RequestOutputKind": "jaxengine.requests.sampling_params",
    "SamplingParams": "jaxengine.requests.sampling_params",
    "ScoringRequestOutput": "jaxengine.requests.pooling.outputs",
    "StructuredOutputsParams": "jaxengine.requests.structured.params",
    "TextPrompt": "jaxengine.requests.prepared",
    "TokensPrompt": "jaxengine.requests.prepared",
    "VocabColumns": "jaxengine.scheduler.logits_processor",
    "register_model": "jaxengine.api.custom_models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxengine' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
