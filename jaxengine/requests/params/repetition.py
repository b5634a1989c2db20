"""Parameters of `repetition_detection`, as in vLLM, by which an output that repeats the same tokens is ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxengine.requests.params.param_limits import INT32_MAX
from jaxengine.scheduler.base.errors import RequestError, refuse, show_value

# Every token is compared with as many before it.
MAX_PATTERN_SIZE = 1024
_FIELDS = ("max_pattern_size", "min_pattern_size", "min_count")


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """Parameters by which an output ends whose last tokens are one pattern of tokens, several times in a row.

    Attributes:
      max_pattern_size: tokens of the longest pattern that is looked for, at most 1024; 0 looks for none.
      min_pattern_size: tokens of the shortest one, at most max_pattern_size; 0 means 1.
      min_count: how often the pattern must occur, one occurrence right after the other: at least 2, or any with
        max_pattern_size 0.

    Raises RequestError for other values.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name, most in zip(_FIELDS, (MAX_PATTERN_SIZE, MAX_PATTERN_SIZE, INT32_MAX), strict=True):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= most:
                raise refuse(f"repetition_detection.{name}", value, f"an int from 0 to {most}")
        if self.min_pattern_size > self.max_pattern_size:
            allowed = f"at most max_pattern_size ({self.max_pattern_size})"
            raise refuse("repetition_detection.min_pattern_size", self.min_pattern_size, allowed)
        if self.max_pattern_size and self.min_count < 2:
            raise refuse("repetition_detection.min_count", self.min_count, "an int >= 2 with a max_pattern_size")


def read_repetition_detection(name: str, value: Any) -> RepetitionDetectionParams | None:
    """Return the field `name` of a request, RepetitionDetectionParams or a mapping of their fields, as
    RepetitionDetectionParams; None if max_pattern_size is 0.

    Raises RequestError for other types, and for unknown or invalid fields.
    """
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in _FIELDS]
        if unknown:
            problem = f"{name} has {show_value(unknown[0])}; it may have {', '.join(_FIELDS)}"
            raise RequestError(problem, param=name, value=value)
        value = RepetitionDetectionParams(**value)
    if not isinstance(value, RepetitionDetectionParams):
        allowed = f"None, RepetitionDetectionParams or a dict of {', '.join(_FIELDS)}"
        raise refuse(name, value, allowed)
    return value if value.max_pattern_size else None
