"""Compiled programs, and machine code of ours, that a folder of executables keeps between starts."""

from __future__ import annotations

import functools
from pathlib import Path

from jaxengine.models.cache import NATIVE_LIBRARY, NATIVE_ROOMS
from jaxengine.runner.executables.executable_files import ExecutableFiles, file_name
from jaxengine.runner.executables.program_sources import source_digest

_ROOT = Path(__file__).parents[3]  # the folder that holds jaxengine


class KeptPrograms:
    """Programs in a folder of executables, with the methods of a bundle that ExecutableCache calls.

    A key is a file's name. A file that cannot be read counts as missing, and a failed write is ignored.
    """

    def __init__(self, files: ExecutableFiles):
        """Store the folder of the programs."""
        self._files = files

    def program(self, name: str, key: str) -> bytes | None:
        """Return the stored program of a key; None if there is none."""
        return self._files.read(key)

    def program_bytes(self, key: str) -> int:
        """Return the size of a stored program in bytes; 0 if there is none."""
        return len(self._files.read(key) or b"")

    def add_program(self, name: str, key: str, content: bytes) -> None:
        """Store a program under its key, if possible."""
        self._files.write(key, content)

    def number(self, name: str, key: str) -> int | None:
        """Return the stored number of a key; None if there is none."""
        stored = self._files.read(key)
        return None if stored is None else int.from_bytes(stored, "little")

    def add_number(self, key: str, number: int) -> None:
        """Store a number, 0 to 2**64 - 1, under its key, if possible."""
        self._files.write(key, number.to_bytes(8, "little"))


class KeptCode:
    """Machine code of ours in a folder of executables, as jaxengine.pallas_kernels.native.library.CodeStore."""

    def __init__(self, files: ExecutableFiles, changed: str):
        """Store the folder and the digest of a user's code that has changed jaxengine's own."""
        self._files, self._changed = files, changed

    def read(self, facts: tuple[str, ...]) -> bytes | None:
        return self._files.read(self._name(facts))

    def write(self, facts: tuple[str, ...], code: bytes) -> None:
        self._files.write(self._name(facts), code)

    @functools.cached_property
    def _sources(self) -> str:
        """Digest of the sources of the code, those of the programs included."""
        return source_digest(_ROOT, (NATIVE_LIBRARY, *(f"{room}.code" for room in NATIVE_ROOMS)))

    def _name(self, facts: tuple[str, ...]) -> str:
        """Return the name of the file of code with these facts: a digest of them and of the sources."""
        return file_name(repr(("machine code", self._sources, self._changed, facts)))
