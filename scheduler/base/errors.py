"""Errors of requests. Their messages name the field, its value and what is allowed."""

from __future__ import annotations

import reprlib
import sys
from typing import Any

_MOST_SORTED = 1000


class RequestError(ValueError):
    """Error for a request that cannot be served as it is. It is raised before any state changes.

    Attributes:
      param: name of the invalid field, as the caller writes it; None for no particular field.
      value: value of the field.
    """

    def __init__(self, message: str, *, param: str | None = None, value: Any = None):
        """Create an error with a message for the caller, about the value of the field `param`; None if it is about no
        field.
        """
        super().__init__(message)
        self.param = param
        self.value = value


class UnknownAdapterError(RequestError):
    """Error for a request whose adapter does not exist, or no longer exists. Servers report it as an unknown model."""


class OverloadedError(RequestError):
    """Error for a valid request that is refused because too many requests are waiting.

    Attributes:
      retry_after: seconds after which the caller should try again.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0):
        """Create an error with a message for the caller; param and value are None."""
        super().__init__(message)
        self.retry_after = retry_after


def prompt_length_error(param: str, length: int, most: int, max_model_len: int, unit: str = "tokens") -> RequestError:
    """Return the error for a prompt that is empty or longer than `most`; its value is `length`.

    param: the prompt's field. length: length of the prompt in `unit`, "tokens" or, if it was not tokenised,
    "characters". max_model_len: the engine's limit in tokens, for the message. LiteLLM and Claude Code search the
    message for its first part, clients of vLLM for the second.
    """
    prefix = "" if param == "prompt" else f"{param}: "
    problem = f"{prefix}prompt is too long: {length} {unit} > {most} maximum; this model's maximum context length is"
    message = f"{problem} {max_model_len} tokens (max_model_len)" if length else f"{param} makes no tokens"
    return RequestError(message, param=param, value=length)


def invalid(name: str, value: Any, allowed: str) -> RequestError:
    """Return a RequestError, which the caller raises, that `value` of the field `name` is none of `allowed`."""
    return RequestError(f"{name} is {show_value(value)}; allowed: {allowed}", param=name, value=value)


def refuse(name: str, value: Any, allowed: str) -> RequestError:
    """Return a RequestError, which the caller raises, that `name` must be `allowed`. name: a field, or words that begin
    with one, such as field.key. The error's param is the field.
    """
    param = name.replace(" ", ".").partition(".")[0]
    return RequestError(f"{name} must be {allowed}, got {show_value(value)}", param=param, value=value)


def show_value(value: Any) -> str:
    """Return a value as short text for an error message: its repr, abbreviated by reprlib. A dict or set of more than
    1000 entries becomes "<dict of n>" or "<set of n>", and an int that Python cannot print "<int too long to print>".
    """
    # reprlib sorts all entries of an unordered collection, which would take long for large ones.
    if isinstance(value, dict | set | frozenset) and len(value) > _MOST_SORTED:
        return f"<{type(value).__name__} of {len(value)}>"
    try:
        return reprlib.repr(value)
    except ValueError:  # an int beyond sys.set_int_max_str_digits
        return f"<{type(value).__name__} too long to print>"


def plain_scalar(value: Any) -> Any:
    """Return a numpy scalar as Python's bool, int, float or str; another value unchanged."""
    numpy = sys.modules.get("numpy")  # without it there are no such values
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value
