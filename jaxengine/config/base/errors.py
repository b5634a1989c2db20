"""The error of an invalid or unsupported option, and the reading of an option that is a JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

# Limits, in characters, of a value and of a problem in a message: a path is shown whole, a megabyte of text is not.
_MOST_SHOWN, _MOST_OF_PROBLEM = 1000, 4000


class ConfigError(ValueError):
    """Error for an option that cannot be honoured: its value is not allowed or, if made by `because`, something else
    prevents it.

    Attributes:
      param: name of the option.
    """

    def __init__(self, param: str, value: Any, allowed: str):
        super().__init__(f"{param} is {_shown(value)}; allowed: {allowed}")
        self.param = param

    @classmethod
    def because(cls, param: str, problem: str, advice: str) -> ConfigError:
        """Return an error for a problem other than a value that is not allowed, such as a missing file or a port in
        use.

        param: name of the option. problem: what is wrong, cut to 4000 characters. advice: what the user can do about
        it; it follows the problem in the message.
        """
        error = cls.__new__(cls, param, problem, advice)
        ValueError.__init__(error, f"{cut(problem, _MOST_OF_PROBLEM)}; {advice}")
        error.param = param
        return error


def not_built(param: str, name: str, value: Any, neutral: Iterable[Any]) -> ConfigError:
    """Return the error of a field whose value is none of `neutral`, those without an effect."""
    problem = f"{name} is {_shown(value)}, which is not supported yet"
    return ConfigError.because(param, problem, f"leave it at {' or '.join(map(repr, neutral))}")


def json_object(option: str, value: Any) -> Mapping[str, Any]:
    """Return the value of an option as a mapping. value: a mapping, returned unchanged, or a JSON object as text, which
    is parsed.

    Raises ConfigError, which names the option, for any other value.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError.because(option, f"{option} is not JSON: {error}", "write a JSON object") from None
    if not isinstance(value, Mapping):
        raise ConfigError(option, value, "a dict, or a JSON object as text")
    return value


def printable(option: str, value: Any) -> Any:
    """Return the value of an option unchanged. Raises ConfigError for one that no message can show: 64 levels of dicts
    and lists, or a number of thousands of digits.
    """
    level, depth = [value], 0
    while level and depth < 64 and not any(isinstance(each, int) and each.bit_length() > 14_000 for each in level):
        lists = [[*each.values()] if isinstance(each, Mapping) else each for each in level]
        # By id, or a dict that contains itself twice doubles with each level.
        level = [*{id(item): item for each in lists if isinstance(each, list | tuple) for item in each}.values()]
        depth += 1
    if level:
        problem = f"{option} has more than 64 levels, or a number of thousands of digits"
        raise ConfigError.because(option, problem, "give less")
    return value


def _shown(value: Any) -> str:
    """Return the repr of a value for a message, with "..." for its middle if it is longer than 1000 characters; a note
    with its type's name if it has none.
    """
    try:
        text = repr(value)
    except Exception:  # as of a value that `printable` refuses
        return f"<{type(value).__name__} that cannot be printed>"
    return cut(text, _MOST_SHOWN)


def cut(text: str, most: int) -> str:
    """Return a text, escaped unless it can be printed in a line, with "..." in place of its middle if it is longer than
    `most` characters.
    """
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"
