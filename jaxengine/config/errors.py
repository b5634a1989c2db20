"""The error of an invalid or unsupported option."""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """An option cannot be honoured: its value is not allowed or, if made by `because`, something else prevents it.

    Attributes:
      param: name of the option.
    """

    def __init__(self, param: str, value: Any, allowed: str):
        super().__init__(f"{param} is {value!r}; allowed: {allowed}")
        self.param = param

    @classmethod
    def because(cls, param: str, problem: str, advice: str) -> ConfigError:
        """Return an error with a problem that is not a matter of allowed values, such as a missing file or a port in
        use.

        advice: what the user can do about it; it follows the problem in the message.
        """
        error = cls.__new__(cls, param, problem, advice)
        ValueError.__init__(error, f"{problem}; {advice}")
        error.param = param
        return error
