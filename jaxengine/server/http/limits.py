"""How much of a request is read, and what counts as JSON: size of headers and body, depth, numbers that are numbers.

Owns what is settled before a field is looked at. Knows nothing of fields.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxengine.server.http.errors import ApiError, error_response

MAX_DEPTH = 64
# Arrays and objects in one body. An empty one takes two bytes there and a hundred in memory.
MAX_CONTAINERS = 500_000
# Longer bodies are parsed beside the event loop.
_LONG_BODY = 256 << 10
# A string, up to the end of the body where it is not closed, or a bracket. Possessive: linear whatever the body holds.
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
_CLOSE = {"Connection": "close"}  # what is left of a body that is too long is not waited for


class LimitsMiddleware:
    """Refuses headers and bodies that are too large; a body is counted while it comes and never held whole."""

    def __init__(self, app: ASGIApp, max_header_bytes: int, max_request_bytes: int):
        self._app = app
        self._max_header_bytes = max_header_bytes
        self._max_request_bytes = max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_headers(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        num_read = 0

        async def counted() -> Message:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_request_bytes:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _check_headers(self, scope: Scope) -> None:
        """Raises ApiError."""
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self._max_header_bytes:
            raise ApiError(431, f"the headers have {size} bytes; allowed are {self._max_header_bytes}", headers=_CLOSE)
        for name, value in scope["headers"]:
            if name == b"content-length":
                if not value.isdigit():
                    raise ApiError(400, "Content-Length is not a number", headers=_CLOSE)
                # Compared as text first: a number of many digits is slow to read.
                if len(value.lstrip(b"0")) > 20 or int(value) > self._max_request_bytes:
                    raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_request_bytes} bytes", headers=_CLOSE)


class JsonRoute(APIRoute):
    """A route whose body is JSON in the narrow sense of `read_json`, sent as application/json.

    Fields that it does not know, and those that it takes and ignores, are noted in the request's state, for headers of
    the answer.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        body = self.body_field
        model = None if body is None else body.field_info.annotation
        fields, ignored = getattr(model, "known_fields", None), getattr(model, "ignored", frozenset())
        if body is None:
            return handle
        if fields is None:
            raise TypeError(f"{self.path}: the body must be one RequestModel")

        async def handle_json(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, "Content-Type must be application/json")
            return await handle(_JsonRequest(request.scope, request.receive, fields(), ignored))

        return handle_json


class _JsonRequest(Request):
    """Has the body read as JSON by our rules."""

    def __init__(self, scope: Scope, receive: Receive, fields: frozenset[str], ignored: frozenset[str]):
        super().__init__(scope, receive)
        self._fields = fields
        self._ignored = ignored - fields

    async def json(self) -> Any:
        body = await self.body()
        value = await asyncio.to_thread(read_json, body) if len(body) > _LONG_BODY else read_json(body)
        if isinstance(value, dict):
            given = [name for name in value if name not in self._fields]
            self.state.unknown_fields = [name for name in given if name not in self._ignored]
            self.state.ignored_fields = [name for name in given if name in self._ignored and value[name] is not None]
        return value


def read_json(body: bytes) -> Any:
    """The value. Raises ApiError for what is no JSON (RFC 8259), and for what is and does harm.

    That is: other than UTF-8, halves of surrogate pairs, NaN and infinite numbers, depth beyond MAX_DEPTH, more than
    MAX_CONTAINERS arrays and objects.
    """
    _check_depth(body)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
        if _HALF_CHARACTER.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError:
        raise ApiError(400, "the body is not valid Unicode text in UTF-8") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    return value


def _check_depth(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = num_open = 0
    for match in _STRUCTURE.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth, num_open = depth + 1, num_open + 1
            if num_open > MAX_CONTAINERS:
                raise ApiError(400, f"the body holds more than {MAX_CONTAINERS} arrays and objects")
            if depth > MAX_DEPTH:
                raise _too_deep()
        elif first in b"]}":
            depth -= 1


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MAX_DEPTH}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large for a number")
    return number
