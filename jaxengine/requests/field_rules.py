"""Rules about the value of one field.

A rule is a function of the field's name and the value that was given. It returns the normalised value, or raises a
RequestError that names the field, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from jaxengine.scheduler.errors import RequestError, show_value

Rule = Callable[[str, Any], Any]


def refusal(name: str, value: Any, allowed: str) -> RequestError:
    """Return the error for a field `name` whose value is not among the allowed ones.

    allowed: words that describe these.
    """
    return RequestError(f"{name} must be {allowed}, got {show_value(value)}", param=name, value=value)


def integer(low: int, high: int, allowed: str) -> Rule:
    """Return the rule of an int from `low` to `high`. It refuses floats and booleans. allowed: description for the
    error.
    """

    def check(name: str, value: Any) -> int:
        whole = isinstance(value, Integral) and not isinstance(value, bool)  # 1.0 and True are not integers here
        if not whole or not low <= int(value) <= high:
            raise refusal(name, value, f"at most {high}" if whole and int(value) > high else allowed)
        return int(value)

    return check


def number(low: float, high: float, allowed: str) -> Rule:
    """Return the rule of a number from `low` to `high`; the rule returns a float. allowed: description
    for the error.
    """

    def check(name: str, value: Any) -> float:
        # NaN is in no range. numpy's scalars are Real, but their comparison with floats is not typed.
        inside = isinstance(value, Real) and not isinstance(value, bool) and low <= value <= high  # pyright: ignore
        if not inside:
            raise refusal(name, value, allowed)
        return float(value)

    return check


def flag(name: str, value: Any) -> bool:
    """Rule of a field that may be True or False: return the value, or raise RequestError."""
    if not isinstance(value, bool):
        raise refusal(name, value, "True or False")
    return value


def optional(rule: Rule) -> Rule:
    """Return a rule that allows None in addition to what `rule` allows."""
    return lambda name, value: None if value is None else rule(name, value)


def read_as(rule: Rule, value: Any, meaning: Any) -> Rule:
    """Return a rule that returns `meaning` where `rule` returns `value`, and otherwise the result of `rule`."""

    def check(name: str, given: Any) -> Any:
        checked = rule(name, given)
        return meaning if checked == value else checked

    return check
