"""Middleware of the operator's own code: classes and functions that the option `middleware` names."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware

from jaxengine.config.engine_config import ConfigError


def given_middleware(names: Sequence[str]) -> list[Middleware]:
    """Return an application's middlewares, imported by name, the outermost first. That is the last of `names`, as in
    vLLM.

    names: "module.NAME" of a class, an ASGI middleware, or of a coroutine function with the arguments (request,
    call_next), which is wrapped as one. Raises ConfigError for a name that cannot be imported or is neither. Other
    errors of the module's code propagate.
    """
    return [_imported(name) for name in reversed(names)]


def _imported(name: str) -> Middleware:
    """Return the middleware called module.NAME. Raises ConfigError as `given_middleware` does."""
    module, _, attribute = name.rpartition(".")
    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"middleware has {name!r}, which cannot be imported: {error}"
        advice = "give module.NAME of a module on sys.path (PYTHONPATH)"
        raise ConfigError.because("middleware", problem, advice) from error
    if isinstance(found, type):
        factory: Any = found
        return Middleware(factory)
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    raise ConfigError("middleware", name, "names of classes and of coroutine functions")
