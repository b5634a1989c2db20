"""Handles errors of the `tokenizers` library on invalid files: bare exceptions, and panics of its Rust code.

A panic is a BaseException in Python, which `except Exception` does not catch and which would end a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from jaxengine.models.params.errors import ModelFileError


def is_panic(error: BaseException) -> bool:
    """Return whether the error is a panic of Rust code, whose class pyo3 does not export."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def rust_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert any Exception and any panic of Rust code in this context into a ModelFileError about `path`. A
    ModelFileError passes unchanged, and so do other BaseExceptions, such as KeyboardInterrupt.
    """
    try:
        yield
    except ModelFileError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelFileError(path, f"cannot be used: {str(error)[:300]}") from None
