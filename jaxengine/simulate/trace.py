"""Traces: arrival times and lengths of requests. Reads three formats: our own, Mooncake's and Azure's.

Our own format is JSON lines. The first line has `jaxengine_trace` and `block_size`, each other line is a request:
`arrival` seconds, `prompt_tokens`, `output_tokens`, and optionally `max_tokens` and `hash_ids`. A trace has no text and
no token ids: requests with the same ids of blocks of `block_size` tokens share these tokens.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import named_path
from jaxengine.records.trace_file import VERSION, TraceRequest

MOONCAKE_BLOCK = 512
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOST_TOKENS = 1 << 24  # largest number of tokens of one request
MOST_LINE = 1 << 24  # largest number of bytes of a line
MOST_ID = 1 << 63
MOST_SECONDS = 1e9
# Token that ends a request before its max_tokens. Tokens of blocks have larger numbers.
STOP = 0


@dataclass(frozen=True)
class Trace:
    """Requests and their arrivals.

    Attributes:
      name: name of the file or of the kind of synthetic trace.
      requests: requests in order of arrival.
      block_size: number of tokens for which each of a request's `hash_ids` stands.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    block_size: int

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """Map from each hash id to a small number. Numbers count up from STOP + 1 in the order in which ids first
        occur.
        """
        found: dict[int, int] = {}
        for request in self.requests:
            for block in request.hash_ids:
                found.setdefault(block, STOP + 1 + len(found))
        return found

    def tokens(self, index: int) -> np.ndarray:
        """Return substitute token ids of the prompt and output of request `index`, i32[num_prompt + num_output].
        Requests have equal tokens exactly where they share blocks. All tokens that belong to no block are one number,
        which no other request has.
        """
        request, numbers = self.requests[index], self._numbers
        total = request.num_prompt + request.num_output
        tokens = np.full(total, STOP + 1 + len(numbers) + index, np.int32)
        known = np.repeat([numbers[block] for block in request.hash_ids], self.block_size)[:total]
        tokens[: len(known)] = known
        return tokens

    def at_once(self) -> Trace:
        """Return a copy of the trace in which all requests arrive at time 0."""
        return replace(self, requests=tuple(replace(each, arrival=0.0) for each in self.requests))

    def faster(self, factor: float) -> Trace:
        """Return a copy of the trace with all arrival times divided by `factor`."""
        return replace(self, requests=tuple(replace(each, arrival=each.arrival / factor) for each in self.requests))

    def first(self, count: int | None) -> Trace:
        """Return a copy of the trace with only the first `count` requests; None for all."""
        return replace(self, requests=self.requests[:count])


class _LineError(ValueError):
    """Error of a line of a trace. Arguments: the fault, and what is allowed."""


def read_trace(path: str) -> Trace:
    """Read a trace in any of the three formats, which the first line distinguishes.

    Requests are sorted by arrival, and all arrival times shifted so that the first is 0. The trace's name is the
    file's. Raises ConfigError, with the number of the line, for an invalid line and for a file without requests;
    OSError if the file cannot be read.
    """
    with named_path("trace", path).open("rb") as file:
        lines = _lines(path, file)
        number, first = next(lines, (1, ""))
        if first.lstrip("\ufeff").startswith("{"):
            value = _checked(path, number, _json_object, first)
            if "jaxengine_trace" in value:
                block, read, rest = _checked(path, number, _header, value), _own, lines
            else:
                block, read, rest = MOONCAKE_BLOCK, _mooncake, _with(number, first, lines)
            parsed = (
                _checked(path, line, read, _checked(path, line, _json_object, text), block) for line, text in rest
            )
        elif tuple(name.strip() for name in first.lstrip("\ufeff").split(",")) == AZURE:
            block, parsed = 1, (_checked(path, line, _azure, text) for line, text in lines)
        else:
            allowed = f"JSON lines of jaxengine or Mooncake, or CSV that begins with {','.join(AZURE)}"
            raise _error(path, number, f"begins with {first[:60]!r}", allowed)
        requests = list(parsed)
    if not requests:
        raise _error(path, number, "is the last one, without a request before it", "at least one request")
    start = min(request.arrival for request in requests)
    moved = [replace(each, arrival=each.arrival - start) for each in sorted(requests, key=lambda each: each.arrival)]
    return Trace(Path(path).name, tuple(moved), block)


def trace_of(
    name: str, prompts: Sequence[Sequence[int]], outputs: Sequence[int], block_size: int, arrivals: Sequence[float] = ()
) -> Trace:
    """Return the trace of prompts, given as token ids, and the lengths of their outputs. arrivals: seconds; if empty,
    all requests arrive at 0.

    Full blocks of prompts get hash ids: two blocks get the same id if their tokens and all tokens before them are
    equal. Requests stay in the order given.
    """
    ids: dict[tuple[int, bytes], int] = {}
    requests = []
    for index, (prompt, num_output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens, chain, parent = np.asarray(prompt, np.int32), [], -1
        for start in range(0, len(tokens) - block_size + 1, block_size):
            parent = ids.setdefault((parent, tokens[start : start + block_size].tobytes()), len(ids))
            chain.append(parent)
        arrival = arrivals[index] if arrivals else 0.0
        requests.append(TraceRequest(arrival, len(tokens), num_output, None, tuple(chain)))
    return Trace(name, tuple(requests), block_size)


def _lines(path: str, file: Any) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, text without surrounding white space) of each line that is not blank. Raises ConfigError
    for a line of more than MOST_LINE bytes or not in UTF-8. path: path for errors. file: binary file, open for reading.
    """
    number = 0
    while raw := file.readline(MOST_LINE + 1):
        number += 1
        if len(raw) > MOST_LINE:
            raise _error(path, number, f"has more than {MOST_LINE} bytes", "shorter ones")
        try:
            text = raw.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise _error(path, number, "is not UTF-8", "UTF-8") from None
        if text:
            yield number, text


def _with(number: int, first: str, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield (number, first), then all lines."""
    yield number, first
    yield from lines


def _error(path: str, number: int, problem: str, allowed: str) -> ConfigError:
    """Return the ConfigError of line `number` (from 1) of a trace. problem: the text after "line N of PATH". allowed:
    what the line may have.
    """
    return ConfigError.because("trace", f"line {number} of {path} {problem}", f"allowed: {allowed}")


def _checked(path: str, number: int, read: Callable[..., Any], *arguments: Any) -> Any:
    """Call `read(*arguments)`, which parses a line, and return its result. Raises ConfigError with `path` and the
    line's number in place of _LineError.
    """
    try:
        return read(*arguments)
    except _LineError as error:
        raise _error(path, number, *error.args) from None


def _json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a line, which may begin with a byte order mark. Raises _LineError if the line is not a
    JSON object.
    """
    try:
        value = json.loads(text.lstrip("\ufeff"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _LineError(f"begins with {text[:60]!r}", "a JSON object")
    return value


def _header(value: dict[str, Any]) -> int:
    """Return the block size, from 1 to MOST_TOKENS, in the first line of a trace in our own format. Raises _LineError
    for an unsupported version or an invalid size.
    """
    if value["jaxengine_trace"] != VERSION or isinstance(value["jaxengine_trace"], bool):
        raise _LineError(f"has jaxengine_trace {value['jaxengine_trace']!r:.60}", f"{VERSION}")
    return _whole(value, "block_size", 1, MOST_TOKENS)


def _own(value: dict[str, Any], block: int) -> TraceRequest:
    """Return the request in a line of our own format. block: tokens of a block. Raises _LineError for an invalid value,
    for max_tokens (optional) below output_tokens, and for too many hash ids.
    """
    most = _whole(value, "max_tokens", 1, MOST_TOKENS) if value.get("max_tokens") is not None else None
    request = TraceRequest(
        _number(value, "arrival", MOST_SECONDS),
        _whole(value, "prompt_tokens", 1, MOST_TOKENS),
        _whole(value, "output_tokens", 1, MOST_TOKENS),
        most,
        _hash_ids(value),
    )
    if most is not None and most < request.num_output:
        raise _LineError(f"has max_tokens {most}", f"at least output_tokens, {request.num_output}")
    return _fitting(request, request.num_prompt + request.num_output, block)


def _mooncake(value: dict[str, Any], block: int) -> TraceRequest:
    """Return the request in a line of Mooncake's format: timestamp in milliseconds, input_length, output_length, of
    which 0 counts as one token, and hash_ids (optional), of the prompt only. block: tokens of a block. Raises
    _LineError for an invalid value and for too many hash ids.
    """
    request = TraceRequest(
        _number(value, "timestamp", 1e3 * MOST_SECONDS) / 1e3,  # milliseconds
        _whole(value, "input_length", 1, MOST_TOKENS),
        max(1, _whole(value, "output_length", 0, MOST_TOKENS)),
        None,
        _hash_ids(value),
    )
    return _fitting(request, request.num_prompt, block)


def _azure(text: str) -> TraceRequest:
    """Return the request in a line of Azure's CSV: TIMESTAMP, prompt tokens, output tokens. Its arrival is in seconds
    since 1970. A timestamp without a time zone is in this machine's. An output of no tokens counts as one token. Raises
    _LineError for an invalid line.
    """
    try:
        fields = next(csv.reader([text]))
    except csv.Error as error:
        raise _LineError(f"is not a line of CSV: {error}", ", ".join(AZURE)) from None
    if len(fields) != len(AZURE):
        raise _LineError(f"has {len(fields)} fields", f"{len(AZURE)}: {', '.join(AZURE)}")
    stamp, *counts = (field.strip() for field in fields)
    try:
        # Seven digits of a second, of which Python reads six; a time zone may follow.
        whole, _, share = stamp.partition(".")
        digits = share[: len(share) - len(share.lstrip("0123456789"))]
        arrival = datetime.fromisoformat(whole + share[len(digits) :]).timestamp() + float(f"0.{digits or 0}")
    except (ValueError, OverflowError, OSError):
        raise _LineError(f"has TIMESTAMP {stamp[:60]!r}", "a date and time, such as 2023-11-16 18:15:46.68") from None
    values: dict[str, Any] = dict(zip(AZURE[1:], counts, strict=True))
    for name, count in values.items():
        values[name] = int(count) if count.isascii() and count.isdigit() and len(count) < 20 else count
    prompt = _whole(values, AZURE[1], 1, MOST_TOKENS)
    return TraceRequest(arrival, prompt, max(1, _whole(values, AZURE[2], 0, MOST_TOKENS)))


def _whole(value: dict[str, Any], name: str, least: int, most: int) -> int:
    """Return the whole number value[name], which must be from `least` to `most`, both included. Raises _LineError if it
    is not or is absent.
    """
    found = value.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
        raise _LineError(f"has {name} {_shown(found)}", f"a whole number from {least} to {most}")
    return found


def _number(value: dict[str, Any], name: str, most: float) -> float:
    """Return the number value[name] as a float, which must be from 0 to `most`, both included. Raises _LineError if it
    is not or is absent.
    """
    found = value.get(name)
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if not is_number or not 0 <= found <= most:  # type: ignore[operator]
        raise _LineError(f"has {name} {_shown(found)}", f"a number from 0 to {most:g}")
    return float(found)  # type: ignore[arg-type]


def _hash_ids(value: dict[str, Any]) -> tuple[int, ...]:
    """Return the hash ids of a request, each from 0 to MOST_ID - 1; () if it has none. Raises _LineError for other
    values.
    """
    found = value.get("hash_ids", [])
    if not isinstance(found, list):
        raise _LineError(f"has hash_ids {_shown(found)}", "a list of whole numbers")
    for each in found:
        if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < MOST_ID:
            raise _LineError(f"has {_shown(each)} in hash_ids", "whole numbers from 0 to 2**63 - 1")
    return tuple(found)


def _fitting(request: TraceRequest, total: int, block: int) -> TraceRequest:
    """Return the request unchanged. Raises _LineError if it has more hash ids than `total` tokens have blocks of
    `block` tokens, a partial last block included.
    """
    most = -(-total // block)
    if len(request.hash_ids) > most:
        raise _LineError(
            f"has {len(request.hash_ids)} hash_ids", f"at most {most}, {total} tokens in blocks of {block}"
        )
    return request


def _shown(value: Any) -> str:
    """Return a value's repr for error messages, cut to 60 characters; "nothing" for None."""
    return "nothing" if value is None else f"{value!r:.60}"
