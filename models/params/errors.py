"""ModelFileError, the one error of everything that reads a model's files, of any format."""

from __future__ import annotations

import os

MAX_WHAT, MAX_WHERE = 1500, 100  # characters


class ModelFileError(ValueError):
    """A model file that cannot be used: missing, cut short, inconsistent, or of an unsupported kind.

    Attributes:
      path: the file or folder, as text.
      what: the fault, with the offending value and what is allowed.
      where: the key, tensor name or byte offset at which it was found; None when it concerns the entire file.

    All three quote untrusted text: the message is one printable line, and names and values in it are cut to a limit.
    """

    def __init__(self, path: str | os.PathLike[str], what: str, where: str | None = None):
        self.path = os.fspath(path)
        self.what = _shown(what, MAX_WHAT)
        self.where = where
        super().__init__(
            f"{_shown(self.path, MAX_WHAT)}: {self.what}" + (f" (at {_shown(where, MAX_WHERE)})" if where else "")
        )


def _shown(text: str, limit: int) -> str:
    short = text if len(text) <= limit else text[:limit] + "..."
    # A lone surrogate could not even be printed.
    return short if short.isprintable() else repr(short)
