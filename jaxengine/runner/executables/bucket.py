"""Executables in an object store, which the engines of many machines share.

A bucket does not tell who may write to it, so a file there is trusted by the bucket's own rules: docs/containers.md.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import Any

from jaxengine.config.base.stores import brief, open_store

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32
# Stores that can be written. A file:// URL names a folder, whose owner is checked (executable_files).
SCHEMES = ("s3", "gs", "memory")


class Bucket:
    """Folder of executables at a URL.

    Attributes:
      path: the URL, for messages.
    """

    def __init__(self, url: str):
        """Make the store's file system; nothing is read. Raises the ConfigErrors of `open_store`, for
        compile_cache_dir.
        """
        self._fs, self._root = open_store("compile_cache_dir", url, SCHEMES)
        self.path = url.rstrip("/")
        self._answers, self._said_refused = True, False

    def read(self, name: str) -> bytes | None:
        """Return the payload of a file that `write` wrote; None if it is missing or, with a warning, damaged or not
        readable. A store that does not answer is not asked again.
        """
        if not self._answers:
            return None
        try:
            content: Any = self._fs.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return None
        except Exception as error:  # each file system has errors of its own
            self._failed(error)
            return None
        digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if not hmac.compare_digest(hashlib.sha256(payload).digest(), digest):
            logger.warning("%s/%s is damaged and is made again", self.path, name)
            return None
        return payload

    def names(self) -> list[str]:
        """Return the names of the folder's files: none if it is missing, if the store has stopped answering or, with a
        warning, if it cannot be listed.
        """
        if not self._answers:
            return []
        try:
            self._fs.invalidate_cache()
            return [str(each).rpartition("/")[2] for each in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        except Exception as error:  # each file system has errors of its own
            self._failed(error)
            return []

    def write(self, name: str, payload: bytes) -> None:
        """Write a file, the payload's digest and the payload, which replaces an earlier one atomically. Raises OSError,
        without the store's own text, if it cannot be written.
        """
        try:
            self._fs.pipe_file(f"{self._root}/{name}", hashlib.sha256(payload).digest() + payload)
        except Exception as error:  # each file system has errors of its own
            raise OSError(brief(error)) from None

    def _failed(self, error: Exception) -> None:
        """Log a read that failed. Unless only this file was refused, which is logged once, remember that the store does
        not answer.
        """
        is_refused = isinstance(error, PermissionError)  # also of a missing file, without the right to list
        if not is_refused or not self._said_refused:
            logger.warning("compiled steps in %s cannot be read: %s", self.path, brief(error))
        self._answers, self._said_refused = self._answers and is_refused, self._said_refused or is_refused
