"""Limits of sampling parameters, rules that check single values, and the kinds of output. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from numbers import Integral, Real
from typing import Any

from jaxengine.scheduler.base.errors import RequestError, show_value

# vLLM's own limit of `n`; the server sets a lower one.
MAX_N = 16384
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_TOKENS = 1024
# Limit of all bad words together: more characters than that many tokens have.
MAX_BAD_WORDS_CHARS = 32 * MAX_BAD_WORDS_TOKENS
MAX_STOP_CHARS = 16384
# Entries of a list of token ids; no vocabulary is larger.
MAX_TOKEN_IDS = 2**20
MAX_EXTRA_ARGS = 256
GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 0.01
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


class RequestOutputKind(Enum):
    """Content of each RequestOutput of a stream."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # one output, at the end


# (name of a field, value) -> the checked and normalised value. Rules raise RequestError.
Rule = Callable[[str, Any], Any]


def refuse(name: str, value: Any, allowed: str) -> RequestError:
    """Return a RequestError, which the caller raises, that the field `name` must be `allowed`."""
    return RequestError(f"{name} must be {allowed}, got {show_value(value)}", param=name, value=value)


def integer(low: int, high: int, allowed: str) -> Rule:
    """Return a rule that accepts integers, but no bool, from `low` to `high`, and returns an int. allowed: description
    for the error; a value above `high` is reported as "at most" instead.
    """

    def check(name: str, value: Any) -> int:
        whole = isinstance(value, Integral) and not isinstance(value, bool)  # 1.0 and True are not integers here
        if not whole or not low <= int(value) <= high:
            raise refuse(name, value, f"at most {high}" if whole and int(value) > high else allowed)
        return int(value)

    return check


def real(low: float, high: float, allowed: str) -> Rule:
    """Return a rule that accepts real numbers, but no bool or NaN, from `low` to `high`, and returns a float. allowed:
    description for the error.
    """

    def check(name: str, value: Any) -> float:
        # NaN is in no range. numpy's scalars are Real, but their comparison with floats is not typed.
        inside = isinstance(value, Real) and not isinstance(value, bool) and low <= value <= high  # pyright: ignore
        if not inside:
            raise refuse(name, value, allowed)
        return float(value)

    return check


def flag(name: str, value: Any) -> bool:
    """Return a bool unchanged. Raises RequestError for other types."""
    if not isinstance(value, bool):
        raise refuse(name, value, "True or False")
    return value


def optional(rule: Rule) -> Rule:
    """Return a rule that returns None for None, and the result of `rule` for other values."""
    return lambda name, value: None if value is None else rule(name, value)


def read_as(rule: Rule, value: Any, meaning: Any) -> Rule:
    """Return a rule that checks with `rule`, and returns `meaning` if the checked value equals `value`."""

    def check(name: str, given: Any) -> Any:
        checked = rule(name, given)
        return meaning if checked == value else checked

    return check
