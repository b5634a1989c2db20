"""The one error of everything that reads a model's files. Knows no file format."""

from __future__ import annotations

import os

MAX_WHAT, MAX_WHERE = 1500, 100  # characters


class ModelFileError(ValueError):
    """A model file that cannot be used: missing, cut short, inconsistent, or of a kind that is not read.

    Attributes:
      path: the file or folder, as text.
      what: what is wrong, with the offending value and what is allowed.
      where: the key, tensor name or byte offset at which it was found; None when it concerns the whole file.

    All three quote what somebody else wrote: the message is one line that any terminal and any log can take, and
    however long a name or a value is, it is cut.
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
