"""What counts as JSON in a request, and how much of it: depth, entries, texts, numbers that are numbers.

Everything is counted before anything is made of it, and a long body is read beside the event loop. Knows nothing of
fields.
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
# Arrays and objects in one body. One with a name in it takes seven bytes there and two hundred in memory.
MAX_CONTAINERS = 200_000
# Entries of all arrays and objects, forty bytes each: the token ids of the longest prompts, 2**20, and some more.
MAX_VALUES = 1_100_000
# Texts, names included. A name takes ten times as long to read as a number.
MAX_TEXTS = 500_000
# Names of all objects, two hundred bytes each while they are read: a bias for each id of the largest vocabularies.
MAX_NAMES = 270_000
# Names of one request, beside those of objects in it.
MAX_FIELDS = 1000
# Longer bodies are read beside the event loop,
_LONG_BODY = 64 << 10
# and those with more texts or values in pieces, which is slower and lets the event loop have its turn in between.
_MANY_TEXTS, _MANY_VALUES = 50_000, 200_000
_PIECE_CHARS, _PIECE_NAMES, _PIECE_BYTES = 64 << 10, 10_000, 1 << 20
_NUMBERS = re.compile(r"[-+.0-9eE,\s]*+")
# A string, up to the end of the body where it is not closed, a bracket, or what stands between these, in pieces.
# Possessive: linear whatever the body holds.
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]|[^"\[\]{}]{1,65536}+', re.DOTALL)
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


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
            coding = request.headers.get("content-encoding", "identity")
            if coding.strip().lower() not in ("", "identity"):
                raise ApiError(415, f"Content-Encoding is {coding[:40]!r}; allowed is identity, a body as it is")
            return await handle(_JsonRequest(request.scope, request.receive, fields(), ignored))

        return handle_json


class _JsonRequest(Request):
    """Has the body read as JSON by our rules, and no more than two copies of it in memory."""

    def __init__(self, scope: Scope, receive: Receive, fields: frozenset[str], ignored: frozenset[str]):
        super().__init__(scope, receive)
        self._fields = fields
        self._ignored = ignored - fields
        # Grows in place. Parts kept until they are joined would leave as much again to the heap.
        self._raw = bytearray()

    async def body(self) -> bytes:
        """Whether there is one: FastAPI, which asks first, would keep it beside what is made of it."""
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
        self._raw = bytearray()  # before the value is made
        return _value(text, many)


class _PatientDecoder(json.JSONDecoder):
    """The same decoder in Python: other threads run between two values, which C's lets none do before it has ended.

    Numbers are left to C, some thousand at a time.
    """

    def __init__(self, **options: Any):
        super().__init__(object_pairs_hook=_object, **options)
        self._few = json.JSONDecoder(**options)
        self.parse_object = json.decoder.JSONObject  # pyright: ignore[reportAttributeAccessIssue]
        self.parse_array = self._array
        self.scan_once = json.scanner.py_make_scanner(self)  # pyright: ignore[reportAttributeAccessIssue]

    def _array(self, text_and_start: tuple[str, int], scan_once: Any) -> tuple[list[Any], int]:
        """The array whose entries begin there, and where it ends."""
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
        # Other things than numbers, or no array: the error says where.
        return json.decoder.JSONArray(text_and_start, scan_once)  # pyright: ignore[reportAttributeAccessIssue]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for start in range(0, len(pairs), _PIECE_NAMES):
        value.update(pairs[start : start + _PIECE_NAMES])
    while pairs:
        del pairs[-_PIECE_NAMES:]
    return value


def read_json(body: bytes | bytearray) -> Any:
    """The value. Raises ApiError for what is no JSON (RFC 8259), and for what is and does harm.

    That is: other than UTF-8, halves of surrogate pairs, NaN and infinite numbers, depth beyond MAX_DEPTH, more than
    MAX_CONTAINERS arrays and objects, MAX_VALUES entries of them, MAX_TEXTS texts or MAX_NAMES names.
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
    """Whether there are many texts or values. Raises ApiError for too much of anything."""
    # Bytes counted without regard to where they stand are never too few, and for nearly all bodies few enough.
    brackets = _count(body, b"[") + _count(body, b"{")
    num_texts = _count(body, b'"')
    if num_texts > _MANY_TEXTS:  # nothing below asks for fewer, and two bytes take as long to find as four single ones
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
    """How often it occurs, give or take those that lie across two pieces: between pieces other threads run."""
    return sum(body.count(what, at, at + _PIECE_BYTES) for at in range(0, len(body), _PIECE_BYTES))


def _no_text() -> ApiError:
    return ApiError(400, "the body is not valid Unicode text in UTF-8")


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MAX_DEPTH}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is too large for a number")
    return number
