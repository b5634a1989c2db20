"""Safe opening of a model's files: inside of their folder, regular, of bounded size, and JSON of bounded depth.

Models are untrusted: a link may expose other files of the host, and a pipe or a device never ends. Every fault is one
ModelFileError.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxengine.models.params.errors import ModelFileError

# Formats of a model's files, as options name them: transformers', or Mistral AI's own; AUTO is the first that there is.
AUTO, HF, MISTRAL = "auto", "hf", "mistral"
FORMATS = (AUTO, HF, MISTRAL)
# Files of a LoRA adapter that PEFT has saved.
ADAPTER_FILES = ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_JSON_BYTES = 16 << 20
# Most nested objects and lists; configurations have five, and code that walks them may be recursive.
MAX_JSON_DEPTH = 64
# Flags that neither wait for the other end of a pipe nor make a terminal the controlling one.
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def inside(folder: str | os.PathLike[str], name: str) -> Path:
    """Return the resolved path of the file `name` of a model's folder; the file need not exist.

    Raises ModelFileError if `name` is empty, absolute, or has "..", a backslash or NUL, if a link leads out of the
    folder, and if the path cannot be resolved. Links of the Hugging Face cache, from <model>/snapshots/<revision> to
    <model>/blobs, are allowed.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\\" in name or "\0" in name:
        raise ModelFileError(folder, "file names must be relative and stay inside the folder", name)
    try:
        home, target = Path(folder).resolve(), (Path(folder) / name).resolve()
    # RuntimeError: links in a circle, before Python 3.13; ValueError: no file can have such a name.
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelFileError(folder, f"cannot be resolved: {error}", name) from error
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise ModelFileError(folder, "links must not lead out of the folder", name)
    return target


def open_regular(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Open a regular file for reading and return (descriptor, size in bytes). The caller must close the descriptor.

    Raises FileNotFoundError or NotADirectoryError if it does not exist, and ModelFileError if it cannot be opened or is
    not a regular file.
    """
    try:
        descriptor = os.open(path, _OPEN)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        raise ModelFileError(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ModelFileError(path, "must be a regular file")
    return descriptor, status.st_size


def read_bytes(folder: str | os.PathLike[str], name: str, limit: int) -> bytes | None:
    """Return the content of a file of a model's folder; None if there is no such file.

    Raises ModelFileError if the file is outside the folder, not a regular file, longer than `limit` bytes, unreadable,
    or of another length than its size.
    """
    path = inside(folder, name)
    try:
        descriptor, size = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(descriptor, "rb") as file:
        if size > limit:
            raise ModelFileError(Path(folder) / name, f"must be at most {limit} bytes, got {size}")
        try:
            raw = file.read(size + 1)
        except OSError as error:
            raise ModelFileError(path, f"cannot be read: {error.strerror}") from None
    if len(raw) != size:  # files of /proc report a size of 0
        raise ModelFileError(Path(folder) / name, f"has {size} bytes, but {len(raw)} or more were read")
    return raw


def read_text(folder: str | os.PathLike[str], name: str, limit: int) -> str | None:
    """Return the UTF-8 text of a file of a model's folder; None if there is no such file. Raises ModelFileError in the
    cases of `read_bytes`, and if the content is not UTF-8.
    """
    raw = read_bytes(folder, name, limit)
    try:
        return None if raw is None else raw.decode()
    except UnicodeDecodeError:
        raise ModelFileError(Path(folder) / name, "not UTF-8 text") from None


def read_object(folder: str | os.PathLike[str], name: str, limit: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
    """Return the JSON object in a file of a model's folder, of at most `limit` bytes; None if there is no such file.

    Raises ModelFileError in the cases of `read_text` and `parse_object`.
    """
    source = read_text(folder, name, limit)
    return None if source is None else parse_object(Path(folder) / name, source)


def parse_object(
    path: str | os.PathLike[str], source: str, pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> dict[str, Any]:
    """Return the JSON object that `source` has, of at most MAX_JSON_DEPTH levels of objects and lists. Without a hook
    the last of repeated keys counts.

    pairs_hook: json's object_pairs_hook, which may raise ModelFileError itself, or None. Raises ModelFileError, which
    names `path`, for anything else.
    """
    try:
        value = json.loads(source, object_pairs_hook=pairs_hook)
    except ModelFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(path, f"must hold a JSON object, got {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return value
    raise ModelFileError(path, f"holds JSON of more than {MAX_JSON_DEPTH} levels")
