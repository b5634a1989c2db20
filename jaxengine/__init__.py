"""jaxengine: LLM inference on JAX. The public names are here and are imported when first used, so that
`import jaxengine` stays free of jax."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxengine import _siblings as _siblings

if TYPE_CHECKING:
    from jaxengine.async_llm import AsyncLLM
    from jaxengine.config import CompilationConfig, EngineConfig
    from jaxengine.llm import LLM
    from jaxengine.outputs import RequestOutput
    from scheduler.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "AsyncLLM", "CompilationConfig", "EngineConfig", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "jaxengine.llm",
    "AsyncLLM": "jaxengine.async_llm",
    "CompilationConfig": "jaxengine.config",
    "EngineConfig": "jaxengine.config",
    "RequestOutput": "jaxengine.outputs",
    "SamplingParams": "scheduler.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxengine' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
