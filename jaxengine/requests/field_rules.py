"""Rules of request fields: made of what is allowed, they check and normalise values, and refuse others by name."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from jaxengine.scheduler.errors import RequestError, show_value

# (name of the field, value) -> the value as it is kept. Raises RequestError.
Rule = Callable[[str, Any], Any]


def refuse(name: str, value: Any, allowed: str) -> RequestError:
    """Returns the error for a value that is not `allowed`."""
    return RequestError(f"{name} must be {allowed}, got {show_value(value)}", param=name, value=value)


def integer(low: int, high: int, allowed: str) -> Rule:
    """Makes the rule of integers from low to high; allowed: says which, for the error."""

    def check(name: str, value: Any) -> int:
        whole = isinstance(value, Integral) and not isinstance(value, bool)  # 1.0 and True are not integers here
        if not whole or not low <= int(value) <= high:
            raise refuse(name, value, f"at most {high}" if whole and int(value) > high else allowed)
        return int(value)

    return check


def number(low: float, high: float, allowed: str) -> Rule:
    """Makes the rule of numbers from low to high; allowed: says which, for the error."""

    def check(name: str, value: Any) -> float:
        # NaN is in no range. numpy's scalars are Real, but their comparison with floats is not typed.
        inside = isinstance(value, Real) and not isinstance(value, bool) and low <= value <= high  # pyright: ignore
        if not inside:
            raise refuse(name, value, allowed)
        return float(value)

    return check


def flag(name: str, value: Any) -> bool:
    """Checks that a value is True or False: a Rule."""
    if not isinstance(value, bool):
        raise refuse(name, value, "True or False")
    return value


def optional(rule: Rule) -> Rule:
    """Makes a rule that takes None as well."""
    return lambda name, value: None if value is None else rule(name, value)


def read_as(rule: Rule, value: Any, meaning: Any) -> Rule:
    """Wraps a rule so that one allowed value is replaced by `meaning`."""

    def check(name: str, given: Any) -> Any:
        checked = rule(name, given)
        return meaning if checked == value else checked

    return check
