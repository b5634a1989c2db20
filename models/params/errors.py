"""ModelFileError, the one error of everything that reads a model's files, of any format."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

MAX_WHAT, MAX_WHERE = 1500, 100  # characters


class Faults:
    """Collector of errors in a model's files, which are raised together as one error."""

    def __init__(self) -> None:
        self._found: list[ModelFileError] = []

    def add(self, error: ModelFileError) -> None:
        """Append `error` to those collected."""
        self._found.append(error)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Return a context manager that appends a ModelFileError raised in its block to those collected, instead of
        raising it.
        """
        try:
            yield
        except ModelFileError as error:
            self.add(error)

    def check(self) -> None:
        """Raise the first collected error, a ModelFileError, with all others as its `others`. Do nothing if none was
        collected.
        """
        if self._found:
            first, *more = self._found
            texts = [(each.where or each.path, each.what) for each in more]
            raise ModelFileError(first.path, first.what, first.where, others=[*first.others, *texts]) from first


class ModelFileError(ValueError):
    """Error of a model file that cannot be used: missing, cut short, inconsistent, or of an unsupported kind.

    Attributes:
      path: the file or folder, as text.
      what: the fault, with the offending value and what is allowed; cut to MAX_WHAT characters, and escaped unless
        printable.
      where: the key, tensor name or byte offset at which it was found, uncut; None if it concerns the entire file.
      others: (where, what) of further faults of the same kind. The message counts them.

    The attributes quote untrusted text. The message is one printable line, and names and values in it are cut to a
    limit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        what: str,
        where: str | None = None,
        *,
        others: Sequence[tuple[str, str]] = (),
    ):
        self.path = os.fspath(path)
        self.what = _shown(what, MAX_WHAT)
        self.where = where
        self.others = others
        place = f" (at {_shown(where, MAX_WHERE)})" if where else ""
        more = f", and {len(others)} more of its tensors do not fit" if others else ""
        super().__init__(f"{_shown(self.path, MAX_WHAT)}: {self.what}{place}{more}")


def _shown(text: str, limit: int) -> str:
    """Return at most `limit` characters of `text`, followed by "..." if there are more. The result is escaped (`repr`)
    unless all of it is printable.
    """
    short = text if len(text) <= limit else text[:limit] + "..."
    # A lone surrogate could not even be printed.
    return short if short.isprintable() else repr(short)
