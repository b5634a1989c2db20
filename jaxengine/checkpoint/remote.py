"""Models in object stores and on web servers: s3://, gs://, https:// and others, through fsspec's file systems.

Configuration and tokenizer files are downloaded. Weights are not: the loader reads the bytes that it needs, in ranges
that several threads fetch at a time. What a store sends is not trusted, just as a model's files are not. Credentials
are those that its package finds, such as AWS_ACCESS_KEY_ID; a URL with some is refused, as names of models are shown.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jaxengine.checkpoint.hub_model import OTHER_FILES
from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.stores import RangeError, brief, is_url, open_store, unreadable
from jaxengine.models.config.readers.hf import CONFIG_FILE
from jaxengine.models.config.readers.mistral import PARAMS_FILE
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import ADAPTER_CONFIG, ADAPTER_FILES
from jaxengine.models.weights.formats.safetensors import CONSOLIDATED, INDEX_FILE, files_of

# File names that are requested from web servers, which do not list folders.
_NAMES = (
    *ADAPTER_FILES,
    *(CONFIG_FILE, "generation_config.json", INDEX_FILE, "tokenizer.json", "tokenizer_config.json", "vocab.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.txt"),
    *("tokenizer.model", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *(PARAMS_FILE, files_of(CONSOLIDATED)[1], "tekken.json", "tokenizer.model.v1", "tokenizer.model.v2"),
    *("tokenizer.model.v3", "tokenizer.model.v7", "merges.txt", "sentencepiece.bpe.model"),
)
# Files of which a model has at least one.
CONFIGS = (CONFIG_FILE, PARAMS_FILE)
# Limits of the downloaded files: one's size in bytes, and their number.
_MOST_BYTES, _MOST_FILES = 2 << 30, 256
# Ranges that are fetched at a time, and their size in bytes; attempts for each, and seconds before the second one.
_NUM_THREADS, _RANGE_BYTES = 16, 8 << 20
_ATTEMPTS, _WAIT_SECONDS = 4, 0.5

T = TypeVar("T")


class RemoteFolder:
    """Folder of a model at a URL, in an object store or on a web server.

    Attributes:
      url: its URL without slashes at the end.
    """

    def __init__(self, url: str, param: str = "model"):
        """Check the URL and make the file system of its scheme. No file is read yet.

        url: scheme://address of the folder. param: the option that names it, for errors. Raises the ConfigErrors of
        `open_store`.
        """
        self._fs, self._root = open_store(param, url)
        self.url, self._param = url.rstrip("/"), param
        self._lists = not self.url.lower().startswith(("http:", "https:"))
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="weights")

    def download(
        self, cache: str | None = None, patterns: Sequence[str] = OTHER_FILES, needed: Sequence[str] = CONFIGS
    ) -> Path:
        """Download the files that match `patterns`, by default configuration and tokenizer; return their local folder.

        The folder is created in `cache`, None for that of hub downloads, and its name is a digest of the content; if it
        exists already, it is not replaced. needed: files of which one must be there. Raises ConfigError if the URL
        cannot be read, has none of `needed` or more than _MOST_FILES that match, ModelFileError for a file of more than
        _MOST_BYTES, OSError if the cache cannot be written.
        """
        from huggingface_hub.constants import HF_HUB_CACHE

        names = self._names(patterns)
        if not {*needed} & {*names}:
            problem = f"{self._param} {self.url!r} has no {needed[0]}"
            raise ConfigError.because(self._param, problem, f"name a folder with {needed[0]} and *.safetensors")
        folder = Path(cache or HF_HUB_CACHE).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        made, digest = Path(tempfile.mkdtemp(prefix="remote-", dir=folder)), hashlib.sha256()
        try:
            for name in names:
                with open(made / name, "wb") as file:
                    for piece in self._pieces(name):
                        digest.update(piece)
                        file.write(piece)
                    digest.update(f"\0{name}\0{file.tell()}\0".encode())
            target = folder / f"remote-{digest.hexdigest()[:32]}"
            try:
                os.replace(made, target)
            except OSError:
                if not target.is_dir():  # else it was there, or another process has just made it
                    raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return target

    def open(self, name: str) -> RemoteFile:
        """Open a file of the folder; only its size is read. Raises ModelFileError if it cannot be read or its size is
        unknown.
        """
        path = f"{self._root}/{name}"
        try:
            size = self._fs.size(path)
        except Exception as error:  # each file system has errors of its own
            raise ModelFileError(f"{self.url}/{name}", f"cannot be read: {brief(error)}") from None
        if not isinstance(size, int):
            raise ModelFileError(f"{self.url}/{name}", "the server does not report its size")
        return RemoteFile(self._fs, path, f"{self.url}/{name}", size, self._threads)

    def _names(self, patterns: Sequence[str]) -> list[str]:
        """Return the sorted names of the files that match `patterns`.

        A web server, which cannot list its files, is asked for each name in _NAMES. Raises ConfigError if the store
        cannot be read, or has more than _MOST_FILES such files.
        """
        if not self._lists:
            asked = [name for name in _NAMES if any(fnmatch(name, one) for one in patterns)]
            return sorted(name for name in asked if self._exists(name))
        listed = self._read("", lambda: self._fs.ls(self._root, detail=False))
        names = {str(path).rstrip("/").rpartition("/")[2] for path in listed}
        found = sorted(name for name in names if any(fnmatch(name, one) for one in patterns))
        if len(found) > _MOST_FILES:
            problem = f"{self._param} {self.url!r} has {len(found)} files of {', '.join(patterns)}"
            advice = f"allowed: {_MOST_FILES}; move those that are not the model's to another folder"
            raise ConfigError.because(self._param, problem, advice)
        return found

    def _exists(self, name: str) -> bool:
        """Whether the folder has a file of this name. Raises ConfigError if the store does not answer."""
        return self._read(name, lambda: self._fs.exists(f"{self._root}/{name}"))

    def _pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file in pieces of _RANGE_BYTES, or in one piece if its size is unknown.

        Raises ConfigError if it cannot be read, ModelFileError before the first piece if it is larger than _MOST_BYTES.
        """
        path = f"{self._root}/{name}"
        size = self._read(name, lambda: self._fs.size(path))
        if not isinstance(size, int):
            content = self._read(name, lambda: self._fs.cat_file(path, start=0, end=_MOST_BYTES + 1))
            size, pieces = len(content), iter([content])
        else:
            file = RemoteFile(self._fs, path, f"{self.url}/{name}", size, self._threads)
            pieces = (self._read(name, partial(file.fetch, at)) for at in range(0, size, _RANGE_BYTES))
        if size > _MOST_BYTES:
            raise ModelFileError(f"{self.url}/{name}", f"must be at most {_MOST_BYTES} bytes, got {size}")
        yield from pieces

    def _read(self, name: str, function: Callable[[], T]) -> T:
        """Return the result of `function`. Any exception is raised as ConfigError. name: name of the file that it
        reads, "" for the folder.
        """
        try:
            return function()
        except Exception as error:  # each file system has errors of its own
            raise unreadable(self._param, self.url, error, name) from None


def local_adapter(path: str) -> str:
    """Return the local path of an adapter's folder: `path` itself, or a downloaded folder if `path` is a URL.

    Raises ModelFileError if it cannot be downloaded.
    """
    if not is_url(path):
        return path
    try:
        return str(RemoteFolder(path, "lora_path").download(None, ADAPTER_FILES, (ADAPTER_CONFIG,)))
    except ConfigError as error:
        raise ModelFileError("adapter", str(error)) from None


class RemoteFile:
    """File in an object store, read in ranges. It implements jaxengine.models.weights.formats.safetensors.ByteFile.

    Attributes:
      size: bytes of the file.
    """

    by_row = False

    def __init__(self, fs: Any, path: str, url: str, size: int, threads: ThreadPoolExecutor):
        """Describe a file of `size` bytes at `path` of the file system `fs`; nothing is opened.

        url: address without secrets, for errors. threads: fetch ranges.
        """
        self._fs, self._path, self._url, self._threads = fs, path, url, threads
        self.size = size

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read bytes from `offset` on into `view` until it is full or the file ends; return how many, 0 beyond the end.

        Several threads fetch ranges concurrently, and all are waited for. Raises RangeError, an OSError, if a range
        fails repeatedly.
        """
        end = min(offset + len(view), self.size)

        def fetch(start: int) -> None:
            data = self.fetch(start, end)
            view[start - offset : start - offset + len(data)] = data

        list(self._threads.map(fetch, range(offset, end, _RANGE_BYTES)))
        return max(end - offset, 0)

    def close(self) -> None:
        """Do nothing: no connection is open between two reads."""

    def fetch(self, start: int, end: int | None = None) -> bytes:
        """Return up to _RANGE_BYTES bytes from `start` on, not beyond `end` or the end of the file.

        Tries again after a failure, with waits that double. Raises RangeError, an OSError, after _ATTEMPTS failures.
        """
        stop = min(start + _RANGE_BYTES, self.size if end is None else end)
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_WAIT_SECONDS * 2 ** (attempt - 1))
            try:
                data = self._fs.cat_file(self._path, start=start, end=stop)
                problem = f"{len(data)} bytes came instead of {stop - start}"
                if len(data) == stop - start:
                    return data
            except Exception as error:  # each file system has errors of its own
                problem = brief(error)
        raise RangeError(0, f"{problem}, {_ATTEMPTS} times")
