"""Errors of requests; an error names the field, the value and what is allowed."""

from __future__ import annotations

import reprlib
from typing import Any

_MOST_SORTED = 1000


class RequestError(ValueError):
    """Error of a request that cannot be served as given. Raised before any state changes.

    Attributes:
      param: name of the faulty field, as the caller spells it.
      value: the value given.
    """

    def __init__(self, message: str, *, param: str | None = None, value: Any = None):
        """Create an error with a message for the caller, and the field and value that it is about; None for no
        particular field.
        """
        super().__init__(message)
        self.param = param
        self.value = value


class UnknownAdapterError(RequestError):
    """Error of a request whose adapter does not exist (any more). Servers answer that there is no such model."""


class OverloadedError(RequestError):
    """Error of a valid request that is refused because too many requests wait already.

    Attributes:
      retry_after: seconds after which to try again.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0):
        """Create an error with a message for the caller; param and value are None."""
        super().__init__(message)
        self.retry_after = retry_after


def prompt_length_error(param: str, length: int, most: int, max_model_len: int, unit: str = "tokens") -> RequestError:
    """Return the error for a prompt that has no tokens, or more than `most` of them.

    param: the prompt's field. length: of the prompt, in `unit`: "tokens", or "characters" if it was not tokenised.
    max_model_len: named in the message. Clients look for its words, to shorten a conversation or to choose another
    model: LiteLLM and Claude Code for the first part, vLLM's for the second.
    """
    place = "" if param == "prompt" else f"{param}: "
    problem = f"{place}prompt is too long: {length} {unit} > {most} maximum; this model's maximum context length is"
    message = f"{problem} {max_model_len} tokens (max_model_len)" if length else f"{param} makes no tokens"
    return RequestError(message, param=param, value=length)


def show_value(value: Any) -> str:
    """Return a value as short text for an error message: reprlib's abbreviated repr. Dicts and sets of more than 1000
    entries give "<set of n>" with their type, an int that is too long for Python to print "<int too long to print>".
    """
    # reprlib sorts the entries of unordered collections, however many there are.
    if isinstance(value, dict | set | frozenset) and len(value) > _MOST_SORTED:
        return f"<{type(value).__name__} of {len(value)}>"
    try:
        return reprlib.repr(value)
    except ValueError:  # an int beyond sys.set_int_max_str_digits
        return f"<{type(value).__name__} too long to print>"
