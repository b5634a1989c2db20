"""Parsing of JSON bodies, with limits of depth, entries, texts and names.

The content of a body is counted before msgspec parses it, and a long body is parsed on a thread.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from jaxengine.server.base.workers import Workers
from jaxengine.server.http.request.errors import ApiError

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
# Longer bodies are parsed, and converted to other requests, on a thread.
LONG_BODY = 64 << 10
_PIECE_BYTES = 1 << 20
# A string (up to the end of the body if it is not closed), a bracket, or text between these, in pieces. Possessive, for
# linear time.
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]|[^"\[\]{}]{1,65536}+', re.DOTALL)
# Parts of msgspec's messages; then the first half of a surrogate pair, and how many bytes at the end of a body are
# searched for one, as msgspec reports a missing second half only if enough bytes follow.
_MALFORMED, _ENDS_EARLY, _HALVES = "JSON is malformed: ", "Input data was truncated", "utf-16 surrogate pair"
_HALF_CHARACTER, _LAST_BYTES = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}"), 12
_AT, _CONSTANT = re.compile(r"\(byte (\d+)\)"), re.compile(rb"NaN|-?Infinity")

_P = ParamSpec("_P")
_T = TypeVar("_T")


class JsonRoute(APIRoute):
    """Route whose body is JSON by the rules of `read_json`, sent as application/json.

    Stored in the request's state are names of fields: given_fields, for errors; unknown_fields and ignored_fields, for
    headers of the response; and is_long, whether the body is longer than LONG_BODY bytes.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of the route, which refuses bodies other than JSON with 415, except an empty one where the
        route has a default. For a route without a body, it is the framework's. Raises TypeError if the body is not a
        single RequestModel.
        """
        handle = super().get_route_handler()
        body = self.body_field
        model = None if body is None else body.field_info.annotation
        fields, ignored = getattr(model, "known_fields", None), getattr(model, "ignored", frozenset())
        if body is None:
            return handle
        if fields is None:
            raise TypeError(f"{self.path}: the body must be one RequestModel")

        may_lack = not body.field_info.is_required()

        async def handle_json(request: Request) -> Response:
            """Answer a request. Raises ApiError (415) for a body that is not application/json or is compressed."""
            headers = request.headers
            is_empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
            if not (may_lack and is_empty):
                kind = headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json":
                    raise ApiError(415, "Content-Type must be application/json")
                coding = headers.get("content-encoding", "identity")
                if coding.strip().lower() not in ("", "identity"):
                    raise ApiError(415, f"Content-Encoding is {coding[:40]!r}; allowed: identity, a body as it is")
            return await handle(_JsonRequest(request.scope, request.receive, fields(), ignored))

        return handle_json


class _JsonRequest(Request):
    """Request that parses its body as JSON by the rules of `read_json`, with one copy of the body in memory besides its
    value.

    fields: names that the route declares or refuses. ignored: names of fields without effect.
    """

    def __init__(self, scope: Scope, receive: Receive, fields: frozenset[str], ignored: frozenset[str]):
        super().__init__(scope, receive)
        self._fields = fields
        self._ignored = ignored - fields
        # Grows in place. Joining separate parts would take twice the memory.
        self._raw = bytearray()

    async def body(self) -> bytes:
        """Receive the body, and return a placeholder for it (b"" if it is empty), as FastAPI would keep a copy."""
        async for part in self.stream():
            self._raw += part
        return b"..." if self._raw else b""

    async def json(self) -> Any:
        """Return the body's value, and store the names of its known, unknown and ignored fields, and whether it is
        long, in the request's state. A long body is parsed on a thread. Call it after `body`.

        Raises ApiError (400) for a body that `read_json` refuses and for more than MAX_FIELDS fields, OverloadedError
        if too many bodies wait for a thread.
        """
        self.state.is_long = len(self._raw) > LONG_BODY
        value = await convert(self, self._read)
        if isinstance(value, dict):
            if len(value) > MAX_FIELDS:
                raise ApiError(400, f"the body has {len(value)} fields; allowed: {MAX_FIELDS}")
            self.state.given_fields = {name for name in value if name in self._fields}
            other = [name for name in value if name not in self._fields]
            self.state.unknown_fields = [name for name in other if name not in self._ignored]
            self.state.ignored_fields = [name for name in other if name in self._ignored and value[name] is not None]
        return value

    def _read(self) -> Any:
        """Parse the body, release its bytes, and return its value. Raises ApiError (400) for a body that `read_json`
        refuses.
        """
        raw, self._raw = self._raw, bytearray()
        return read_json(raw)


async def convert(request: Request, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return the result of a function of the request's body, or raise its exception. The function runs on one of the
    application's threads if `request.state.is_long` (JsonRoute), otherwise on the caller's. Raises OverloadedError if
    too many calls wait for a thread.
    """
    workers: Workers = request.app.state.workers
    return await workers.run(function, *args, **kwargs) if request.state.is_long else function(*args, **kwargs)


def read_json(body: bytes | bytearray) -> Any:
    """Return the value of a JSON text (RFC 8259). Raises ApiError (400) for invalid or harmful bodies.

    Refused are encodings other than UTF-8, unpaired surrogates, NaN and infinite numbers, depth beyond MAX_DEPTH, and
    more than MAX_CONTAINERS arrays and objects, MAX_VALUES entries, MAX_TEXTS texts or MAX_NAMES names.
    """
    if _measure(body):
        _verify_depth(value := _value(body))
        return value
    return _value(body)


def _value(body: bytes | bytearray) -> Any:
    """Return the parsed value of a body. Raises ApiError (400) for a body that is not JSON in UTF-8, or is nested too
    deeply for the parser.
    """
    try:
        return msgspec.json.decode(body)
    except UnicodeError:
        raise _no_text() from None
    except RecursionError:
        raise _too_deep() from None
    except msgspec.MsgspecError as error:
        raise _fault(body, str(error)) from None


def _fault(body: bytes | bytearray, problem: str) -> ApiError:
    """Return the error (400) for a body that msgspec refuses. It says that the body is not UTF-8 text, or what is wrong
    with the JSON.

    problem: msgspec's message.
    """
    ends_early = problem == _ENDS_EARLY
    # A body that ends within a surrogate pair lacks its second half.
    if _HALVES in problem or ends_early and _HALF_CHARACTER.search(body[-_LAST_BYTES:]):
        return _no_text()
    try:
        body.decode("utf-8")
    except UnicodeError:
        return _no_text()
    if body.startswith(codecs.BOM_UTF8):
        problem = "it begins with a byte order mark"
    elif ends_early:
        problem = "it ends too early"
    elif (at := _AT.search(problem)) and (name := _CONSTANT.search(body, max(0, int(at[1]) - 1), int(at[1]) + 8)):
        problem = f"{name[0].decode()} is not a JSON number"
    # Without msgspec's path, which leaves out the names of fields.
    return ApiError(400, f"the body is not valid JSON: {problem.removeprefix(_MALFORMED).partition(' - at `')[0]}")


def _measure(body: bytes | bytearray) -> bool:
    """Count the values in a body, and raise ApiError if a limit is exceeded. Return whether the value may be nested too
    deeply, which the caller must then check; False if the depth has been checked already.
    """
    # Counting bytes regardless of context never gives too few, and is sufficient for nearly all bodies.
    brackets = _count(body, b"[") + _count(body, b"{")
    num_texts = (_count(body, b'"') + 1) // 2
    num_values = _count(body, b",") + brackets
    few = brackets <= MAX_CONTAINERS and num_values < MAX_VALUES and num_texts <= MAX_TEXTS
    if few and _count(body, b":") <= MAX_NAMES:
        return brackets > MAX_DEPTH
    _measure_structure(body)
    return False


def _measure_structure(body: bytes | bytearray) -> None:
    """Raise ApiError (400) if a body exceeds MAX_DEPTH, MAX_CONTAINERS, MAX_VALUES, MAX_TEXTS or MAX_NAMES. The content
    of texts does not count. The body need not be valid JSON.
    """
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


def _verify_depth(value: Any) -> None:
    """Raise ApiError (400) for a value with more than MAX_DEPTH levels of dicts and lists."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(MAX_DEPTH):
        entries = (parent.values() if type(parent) is dict else parent for parent in level)
        level = [each for own in entries for each in own if type(each) in (dict, list)]
        if not level:
            return
    raise _too_deep()


def _count(body: bytes | bytearray, what: bytes) -> int:
    """Return the number of occurrences of `what`, a single byte, in the body. The body is searched piece by piece, so
    that other threads can run in between.
    """
    return sum(body.count(what, at, at + _PIECE_BYTES) for at in range(0, len(body), _PIECE_BYTES))


def _no_text() -> ApiError:
    """Return the error (400) for a body that is not UTF-8."""
    return ApiError(400, "the body is not valid Unicode text in UTF-8")


def _too_deep() -> ApiError:
    """Return the error (400) for a body that is nested too deeply."""
    return ApiError(400, f"the body is nested deeper than {MAX_DEPTH}")
