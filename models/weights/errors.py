"""The one error of everything that reads a model's files. Knows no file format."""

from __future__ import annotations

import os


class ModelFileError(ValueError):
    """A model file that cannot be used: missing, cut short, inconsistent, or of a kind that is not read.

    Attributes:
      path: the file or folder, as text.
      what: what is wrong, with the offending value and what is allowed.
      where: the key, tensor name or byte offset at which it was found; None when it concerns the whole file.
    """

    def __init__(self, path: str | os.PathLike[str], what: str, where: str | None = None):
        self.path = os.fspath(path)
        self.what = what
        self.where = where
        super().__init__(f"{self.path}: {what}" + (f" (at {_shown(where)})" if where else ""))


def _shown(where: str) -> str:
    """Names come out of the file: one line of at most about a hundred characters reaches a log."""
    shown = where if where.isprintable() else repr(where)
    return shown if len(shown) <= 100 else shown[:100] + "..."
