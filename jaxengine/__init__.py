"""Public names of jaxengine, LLM inference on JAX. They are imported on first use; `import jaxengine` does not import
jax.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxengine import vllm_names
from jaxengine.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxengine.api.async_llm import AsyncLLM
    from jaxengine.api.async_llm import AsyncLLM as AsyncLLMEngine
    from jaxengine.api.engine_client import EngineDeadError
    from jaxengine.api.llm import LLM
    from jaxengine.api.llm_engine import LLMEngine
    from jaxengine.api.weights import ScannedLayers
    from jaxengine.checkpoint.control_vectors import read_control_vector
    from jaxengine.checkpoint.custom_models import register_model
    from jaxengine.config.base.errors import ConfigError
    from jaxengine.config.base.flexible_parser import FlexibleArgumentParser
    from jaxengine.config.engine_args import EngineArgs
    from jaxengine.config.engine_args import EngineArgs as AsyncEngineArgs
    from jaxengine.config.engine_config import EngineConfig
    from jaxengine.config.execution.compilation_config import CompilationConfig, CompilationLevel, CompilationMode
    from jaxengine.config.features.pooler_config import PoolerConfig
    from jaxengine.models.config.fields import ModelConfigError
    from jaxengine.models.params.errors import ModelFileError
    from jaxengine.requests.beam_search import BeamSearchParams
    from jaxengine.requests.output.flat_logprobs import FlatLogprobs
    from jaxengine.requests.output.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxengine.requests.params.lora import LoRARequest
    from jaxengine.requests.params.prepared import Prompt as PromptType
    from jaxengine.requests.params.prepared import TextPrompt, TokensPrompt
    from jaxengine.requests.params.repetition import RepetitionDetectionParams
    from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
    from jaxengine.requests.pooling.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from jaxengine.requests.pooling.params import PoolingParams
    from jaxengine.requests.structured.params import StructuredOutputsParams
    from jaxengine.rl.open_model import OpenModel, open_model
    from jaxengine.scheduler.base.errors import OverloadedError, RequestError
    from jaxengine.scheduler.base.logits_processor import Column, LogitsProcessor, VocabColumns

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "Column",
    "CompilationConfig",
    "CompilationLevel",
    "CompilationMode",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "EngineDeadError",
    "FlatLogprobs",
    "FlexibleArgumentParser",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "ModelConfigError",
    "ModelFileError",
    "OpenModel",
    "OverloadedError",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScannedLayers",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "VocabColumns",
    "open_model",
    "read_control_vector",
    "register_model",
]

# Name -> module, or module:name where it has another name there.
_HOMES = {
    "LLM": "jaxengine.api.llm",
    "AsyncEngineArgs": "jaxengine.config.engine_args:EngineArgs",
    "AsyncLLM": "jaxengine.api.async_llm",
    "AsyncLLMEngine": "jaxengine.api.async_llm:AsyncLLM",
    "BeamSearchParams": "jaxengine.requests.beam_search",
    "ClassificationOutput": "jaxengine.requests.pooling.outputs",
    "ClassificationRequestOutput": "jaxengine.requests.pooling.outputs",
    "Column": "jaxengine.scheduler.base.logits_processor",
    "CompilationConfig": "jaxengine.config.execution.compilation_config",
    "CompilationLevel": "jaxengine.config.execution.compilation_config",
    "CompilationMode": "jaxengine.config.execution.compilation_config",
    "CompletionOutput": "jaxengine.requests.output.outputs",
    "ConfigError": "jaxengine.config.base.errors",
    "EmbeddingOutput": "jaxengine.requests.pooling.outputs",
    "EmbeddingRequestOutput": "jaxengine.requests.pooling.outputs",
    "EngineArgs": "jaxengine.config.engine_args",
    "EngineConfig": "jaxengine.config.engine_config",
    "EngineDeadError": "jaxengine.api.engine_client",
    "FlatLogprobs": "jaxengine.requests.output.flat_logprobs",
    "FlexibleArgumentParser": "jaxengine.config.base.flexible_parser",
    "LLMEngine": "jaxengine.api.llm_engine",
    "LoRARequest": "jaxengine.requests.params.lora",
    "LogitsProcessor": "jaxengine.scheduler.base.logits_processor",
    "Logprob": "jaxengine.requests.output.outputs",
    "ModelConfigError": "jaxengine.models.config.fields",
    "ModelFileError": "jaxengine.models.params.errors",
    "OpenModel": "jaxengine.rl.open_model",
    "OverloadedError": "jaxengine.scheduler.base.errors",
    "PoolerConfig": "jaxengine.config.features.pooler_config",
    "PoolingOutput": "jaxengine.requests.pooling.outputs",
    "PoolingParams": "jaxengine.requests.pooling.params",
    "PoolingRequestOutput": "jaxengine.requests.pooling.outputs",
    "PromptType": "jaxengine.requests.params.prepared:Prompt",
    "RepetitionDetectionParams": "jaxengine.requests.params.repetition",
    "RequestError": "jaxengine.scheduler.base.errors",
    "RequestOutput": "jaxengine.requests.output.outputs",
    "RequestOutputKind": "jaxengine.requests.params.sampling_params",
    "SamplingParams": "jaxengine.requests.params.sampling_params",
    "ScannedLayers": "jaxengine.api.weights",
    "ScoringOutput": "jaxengine.requests.pooling.outputs",
    "ScoringRequestOutput": "jaxengine.requests.pooling.outputs",
    "StructuredOutputsParams": "jaxengine.requests.structured.params",
    "TextPrompt": "jaxengine.requests.params.prepared",
    "TokensPrompt": "jaxengine.requests.params.prepared",
    "VocabColumns": "jaxengine.scheduler.base.logits_processor",
    "open_model": "jaxengine.rl.open_model",
    "read_control_vector": "jaxengine.checkpoint.control_vectors",
    "register_model": "jaxengine.checkpoint.custom_models",
}

vllm_names.install()


def __getattr__(name: str) -> Any:
    """Import a public name, or a module that vLLM has under this name, on first use, and return it.

    Garbage is not collected during the import, where it would free nothing. Raises NotBuiltImportError for what vLLM
    has and this engine does not, AttributeError for any other name.
    """
    if vllm_names.is_module(name):  # in vLLM, a module that need not be imported first
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        vllm_names.refuse(__name__, name)
        raise AttributeError(f"module 'jaxengine' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        value = getattr(import_module(module), attribute or name)
    finally:
        if is_collecting:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
