"""Reading of JSON bodies, with limits of depth, entries, texts and names.

Everything is counted before it is parsed, and a long body is read off the event loop.
"""

from __future__ import annotations

import json
import json.scanner
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from jaxengine.server.http.errors import ApiError
from jaxengine.server.workers import Workers

MAX_DEPTH = 64
# Limit of arrays and objects in a body. An object with a name takes seven bytes there and two hundred in memory.
MAX_CONTAINERS = 200_000
# Limit of entries of all arrays and objects, forty bytes each: the token ids of the longest prompts, 2**20, and more.
MAX_VALUES = 1_100_000
# Limit of texts, including names. A name takes ten times as long to read as a number.
MAX_TEXTS = 500_000
# Limit of names in all objects, two hundred bytes each while read: a bias for each id of the largest vocabularies.
MAX_NAMES = 270_000
# Limit of a request's top-level names.
MAX_FIELDS = 1000
# Longer bodies are read in a thread,
_LONG_BODY = 64 << 10
# and those with more texts or values in pieces, which is slower but lets the event loop run in between.
_MANY_TEXTS, _MANY_VALUES = 50_000, 200_000
_PIECE_CHARS, _PIECE_NAMES, _PIECE_BYTES = 64 << 10, 10_000, 1 << 20
_NUMBERS = re.compile(r"[-+.0-9eE,\s]*+")
# A string (up to the end of the body if it is not closed), a bracket, or text between these, in pieces. Possessive, for
# linear time.
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]|[^"\[\]{}]{1,65536}+', re.DOTALL)
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class JsonRoute(APIRoute):
    """A route whose body is JSON by the rules of `read_json`, sent as application/json.

    Unknown fields, and known ones that are ignored, are recorded in the request's state, for headers of the response.
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
            coding = request.headers.get("content-encoding", "identity")
            if coding.strip().lower() not in ("", "identity"):
                raise ApiError(415, f"Content-Encoding is {coding[:40]!r}; allowed is identity, a body as it is")
            return await handle(_JsonRequest(request.scope, request.receive, fields(), ignored))

        return handle_json


class _JsonRequest(Request):
    """Reads the body as JSON by these rules, with at most two copies of it in memory."""

    def __init__(self, scope: Scope, receive: Receive, fields: frozenset[str], ignored: frozenset[str]):
        super().__init__(scope, receive)
        self._fields = fields
        self._ignored = ignored - fields
        # Grows in place. Joining separate parts would take twice the memory.
        self._raw = bytearray()

    async def body(self) -> bytes:
        """Reads the body; returns a placeholder if there is one, because FastAPI would keep a copy in addition to the
        parsed value.
        """
        async for part in self.stream():
            self._raw += part
        return b"..." if self._raw else b""

    async def json(self) -> Any:
        workers: Workers = self.app.state.workers
        value = await workers.run(self._read) if len(self._raw) > _LONG_BODY else self._read()
        if isinstance(value, dict):
            if len(value) > MAX_FIELDS:
                raise ApiError(400, f"the body has {len(value)} fields; allowed are {MAX_FIELDS}")
            given = [name for name in value if name not in self._fields]
            self.state.unknown_fields = [name for name in given if name not in self._ignored]
            self.state.ignored_fields = [name for name in given if name in self._ignored and value[name] is not None]
        return value

    def _read(self) -> Any:
        many, text = _measure(self._raw), _decode(self._raw)
        self._raw = bytearray()  # freed before the value is parsed
        return _value(text, many)


class _PatientDecoder(json.JSONDecoder):
    """Python's JSON decoder, which lets other threads run between two values, unlike the one in C.

    Numbers are decoded in C, some thousand at a time.
    """

    def __init__(self, **options: Any):
        super().__init__(object_pairs_hook=_object, **options)
        self._few = json.JSONDecoder(**options)
        self.parse_object = json.decoder.JSONObject  # pyright: ignore[reportAttributeAccessIssue]
        self.parse_array = self._array
        self.scan_once = json.scanner.py_make_scanner(self)  # pyright: ignore[reportAttributeAccessIssue]

    def _array(self, text_and_start: tuple[str, int], scan_once: Any) -> tuple[list[Any], int]:
        """Decodes the array whose entries begin there; returns it and its end."""
        text, start = text_and_start
        end, values = text.find("]", start), []
        while start <= end:
            cut = text.find(",", start + _PIECE_CHARS, end)
            piece = text[start : end if cut < 0 else cut]
            if not _NUMBERS.fullmatch(piece) or (values or cut >= 0) and not piece.strip():
                break
            try:
                values += self._few.decode(f"[{piece}]")
            except json.JSONDecodeError:
                break
            if cut < 0:
                return values, end + 1
            start = cut + 1
        # Not only numbers, or invalid: this decoder reports the position.
        return json.decoder.JSONArray(text_and_start, scan_once)  # pyright: ignore[reportAttributeAccessIssue]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for start in range(0, len(pairs), _PIECE_NAMES):
        value.update(pairs[start : start + _PIECE_NAMES])
    while pairs:
        del pairs[-_PIECE_NAMES:]
    return value


def read_json(body: bytes | bytearray) -> Any:
    """Parses JSON (RFC 8259). Raises ApiError for invalid or harmful bodies.

    Refused are: encodings other than UTF-8, halves of surrogate pairs, NaN and infinite numbers, depth beyond
    MAX_DEPTH, and more than MAX_CONTAINERS arrays and objects, MAX_VALUES entries, MAX_TEXTS texts or MAX_NAMES names.
    """
    return _value(many=_measure(body), text=_decode(body))


def _decode(body: bytes | bytearray) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeError:
        raise _no_text() from None


def _value(text: str, many: bool) -> Any:
    decoder = _PatientDecoder if many else json.JSONDecoder
    try:
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark")
        value = decoder(parse_constant=_refuse_constant, parse_float=_finite).decode(text)
        if any(_HALF_CHARACTER.search(text, at, at + _PIECE_BYTES + 3) for at in range(0, len(text), _PIECE_BYTES)):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError:
        raise _no_text() from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    return value


def _measure(body: bytes | bytearray) -> bool:
    """Whether the body has many texts or values. Raises ApiError if a limit is exceeded."""
    # Counting bytes regardless of context never gives too few, and is sufficient for nearly all bodies.
    brackets = _count(body, b"[") + _count(body, b"{")
    num_texts = _count(body, b'"')
    if num_texts > _MANY_TEXTS:  # only needed above this; two bytes take as long to find as four single ones
        num_texts -= _count(body, b'\\"')
    num_values = _count(body, b",") + brackets
    few = brackets <= MAX_DEPTH and num_values < MAX_VALUES and num_texts <= MAX_TEXTS
    if few and _count(body, b":") <= MAX_NAMES:
        return num_texts > _MANY_TEXTS or num_values > _MANY_VALUES
    depth = num_open = num_values = num_texts = num_names = 0
    for match in _STRUCTURE.finditer(body):
        start = match.start()
        first = body[start]
        if first == b'"'[0]:
            num_texts += 1
            if num_texts > MAX_TEXTS:
                raise ApiError(400, f"the body holds more than {MAX_TEXTS} texts")
        elif first in b"[{":
            depth, num_open, num_values = depth + 1, num_open + 1, num_values + 1
            if num_open > MAX_CONTAINERS:
                raise ApiError(400, f"the body holds more than {MAX_CONTAINERS} arrays and objects")
            if depth > MAX_DEPTH:
                raise _too_deep()
        elif first in b"]}":
            depth -= 1
        else:
            num_values += body.count(b",", start, match.end())
            if num_values > MAX_VALUES:
                raise ApiError(400, f"the body holds more than {MAX_VALUES} values")
            num_names += body.count(b":", start, match.end())
            if num_names > MAX_NAMES:
                raise ApiError(400, f"the body holds more than {MAX_NAMES} names")
    return num_texts > _MANY_TEXTS or num_values > _MANY_VALUES


def _count(body: bytes | bytearray, what: bytes) -> int:
    """Number of occurrences, except those across pieces; other threads can run between pieces."""
    return sum(body.count(what, at, at + _PIECE_BYTES) for at in range(0, len(body), _PIECE_BYTES))


def _no_text() -> ApiError:
    return ApiError(400, "the body is not valid Unicode text in UTF-8")


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MAX_DEPTH}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large for a number")
    return number
