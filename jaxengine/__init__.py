"""jaxengine: LLM inference on JAX. The public names are here and are imported when first used, so that
`import jaxengine` stays free of jax."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxengine import _siblings as _siblings
from jaxengine.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxengine.api.async_llm import AsyncLLM
    from jaxengine.api.llm import LLM
    from jaxengine.config.engine_config import CompilationConfig, EngineConfig
    from jaxengine.requests.outputs import RequestOutput
    from jaxengine.requests.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "CompilationConfig", "EngineConfig", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "jaxengine.api.llm",
    "AsyncLLM": "jaxengine.api.async_llm",
    "CompilationConfig": "jaxengine.config.engine_config",
    "EngineConfig": "jaxengine.config.engine_config",
    "RequestOutput": "jaxengine.requests.outputs",
    "SamplingParams": "jaxengine.requests.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxengine' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
