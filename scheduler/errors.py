"""The errors a request may get: a bad one names the field, the value and what is allowed."""

from __future__ import annotations

import reprlib
from typing import Any

_MOST_SORTED = 1000


class RequestError(ValueError):
    """A request that cannot be served as asked. Raised before any state changes.

    Attributes:
      param: name of the offending field, as the caller spells it.
      value: what was given.
    """

    def __init__(self, message: str, *, param: str | None = None, value: Any = None):
        super().__init__(message)
        self.param = param
        self.value = value


class UnknownAdapterError(RequestError):
    """A request that names an adapter which is not there, or not any more: there is no such model."""


class OverloadedError(RequestError):
    """A sound request that is refused because too many wait already.

    Attributes:
      retry_after: seconds after which trying again is worth while.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


def show_value(value: Any) -> str:
    """A value as an error message shows it: short, whatever it is."""
    # reprlib sorts what has no order, however many there are.
    if isinstance(value, dict | set | frozenset) and len(value) > _MOST_SORTED:
        return f"<{type(value).__name__} of {len(value)}>"
    try:
        return reprlib.repr(value)
    except ValueError:  # an int beyond sys.set_int_max_str_digits
        return f"<{type(value).__name__} too long to print>"
