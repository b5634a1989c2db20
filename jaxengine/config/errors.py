"""The error of an option that cannot be honoured. Knows no option."""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """An option that cannot be honoured: a value that is not allowed, or, with `because`, what stands in its way.

    Attributes:
      param: the option's name.
    """

    def __init__(self, param: str, value: Any, allowed: str):
        super().__init__(f"{param} is {value!r}; allowed: {allowed}")
        self.param = param

    @classmethod
    def because(cls, param: str, problem: str, advice: str) -> ConfigError:
        """Of what no list of values tells, a missing file or a port that is taken: what is wrong, then what to do."""
        error = cls.__new__(cls, param, problem, advice)
        ValueError.__init__(error, f"{problem}; {advice}")
        error.param = param
        return error
