"""Middleware of the operator's own code: classes and functions that the option `middleware` names."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxengine.config.engine_config import ConfigError


def given_middleware(names: Sequence[str]) -> list[Middleware]:
    """Return an application's middlewares, imported by name, the outermost first. That is the last of `names`, as in
    vLLM.

    names: "module.NAME" of a class, an ASGI middleware, or of a coroutine function with the arguments (request,
    call_next), which is wrapped as one. The lines of a batch, which are requests of this process, are not passed
    through it: they have no client's headers, and the request that made the batch was passed. Raises ConfigError for a
    name that cannot be imported or is neither. Other errors of the module's code propagate.
    """
    return [Middleware(_OfClients, _imported(name)) for name in reversed(names)]


class _OfClients:
    """Application that passes all but lines of batches through a middleware.

    app: the application inside, which gets lines of batches directly. given: the middleware.
    """

    def __init__(self, app: ASGIApp, given: Middleware):
        self._app = app
        self._given = given.cls(app, *given.args, **given.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the middleware or, for a line of a batch, whose state has a "holder", the inner application."""
        inner = self._app if "holder" in scope.get("state", {}) else self._given
        await inner(scope, receive, send)


def _imported(name: str) -> Middleware:
    """Return the middleware called module.NAME: a class as it is, a coroutine function as the dispatch of a
    BaseHTTPMiddleware. Raises ConfigError for a name that cannot be imported or is neither.
    """
    module, _, attribute = name.rpartition(".")
    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        problem = f"middleware has {name!r}, which cannot be imported: {error}"
        advice = "give module.NAME of a module on sys.path (PYTHONPATH)"
        raise ConfigError.because("middleware", problem, advice) from error
    if isinstance(found, type):
        factory: Any = found
        return Middleware(factory)
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    raise ConfigError("middleware", name, "names of classes and of coroutine functions")
