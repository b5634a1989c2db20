"""What the `tokenizers` library does with files it was not made for: bare exceptions, and panics of its Rust code.

A panic reaches Python as a BaseException, which nobody's `except Exception` holds: a thread would end of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from models.weights.errors import ModelFileError


def is_panic(error: BaseException) -> bool:
    """Whether this is a panic of Rust code: pyo3 gives its class no place to import it from."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def rust_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever goes wrong while the library reads a file becomes a ModelFileError about `path`."""
    try:
        yield
    except ModelFileError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelFileError(path, f"cannot be used: {str(error)[:300]}") from None
