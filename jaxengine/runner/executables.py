"""Compiled programs on disk, so that a second start compiles nothing.

A file's name is a digest of everything that decides the machine code: the sources it was traced from, jax, the device,
the compiler's flags and the program's own description. Loading one runs code from the file, so the directory must
belong to the user alone; one that others may write is refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.experimental import serialize_executable

from jaxengine.config.engine_config import ConfigError
from jaxengine.runner.program_sources import source_digest
from models.cache import kernel_modules, platform_of

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32
_UNUSED_SECONDS = 30 * 24 * 3600


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "jaxengine" / "executables"


# Scatters and gathers of a few rows, which XLA:TPU would hand to the SparseCore and wait for.
_COMPILER_OPTIONS: dict[str, dict[str, bool | str]] = {
    "tpu": {
        "xla_tpu_enable_offloading_scatter_to_sparsecore": "false",
        "xla_tpu_offload_gather_to_sparsecore": "false",
        # Else tpu7x brings a head of a gigabyte into another tiling in every step, for the loop over prompt logprobs.
        "xla_tpu_control_large_2nd_minor_layout_for_x16": "false",
    }
}


def compile_program(lowered: jax.stages.Lowered, backend: str) -> jax.stages.Compiled:
    """Compiles as all our programs are compiled; backend as `jax.default_backend` names it."""
    return lowered.compile(compiler_options=_COMPILER_OPTIONS.get(backend))


class ExecutableCache:
    """Compiles programs or loads them as they were compiled before.

    Attributes:
      num_compiled, num_loaded: what `get` did so far.
    """

    def __init__(self, directory: str | None, devices: Sequence[Any], *, family: type | None = None):
        """directory: None for the user's cache directory, "" to keep nothing. devices: what the programs run on.

        family: the model's class, None for programs without a model. Nothing is kept of one whose source is unknown.
        """
        self.num_compiled = 0
        self.num_loaded = 0
        self._devices = devices
        self._family = None if family is None else _source_file(family)
        self._directory = None
        if family is not None and self._family is None:
            logger.warning("compiled steps of %s are not kept: its source is not in a file", family.__name__)
        elif directory != "":
            self._directory = Path(directory).expanduser() if directory else default_cache_dir()
            _make_private(self._directory)
            _prune(self._directory)

    def get(
        self,
        name: str,
        function: Callable,
        arguments: Sequence[Any],
        results: Any,
        *,
        donate: tuple[int, ...],
        description: str = "",
    ) -> jax.stages.Compiled:
        """The compiled program.

        Args:
          name: for messages.
          function: what to compile.
          arguments: its arguments as ShapeDtypeStructs.
          results: a pytree of the structure that `function` returns, of ShapeDtypeStructs. They are part of the key:
            right they must be where they do not follow from the arguments.
          donate: indices of donated arguments.
          description: what decides the function's meaning beyond our sources and its arguments.
        """
        path = self._path(name, arguments, results, donate, description)
        trees = jax.tree.structure((tuple(arguments), {})), jax.tree.structure(results)
        compiled = _load(path, *trees, self._devices) if path is not None else None
        if compiled is not None:
            self.num_loaded += 1
            return compiled
        lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
        compiled = compile_program(lowered, self._devices[0].platform)
        self.num_compiled += 1
        if path is not None:
            _store(path, compiled)
        return compiled

    def get_number(self, name: str, arguments: Sequence[Any], description: str, compute: Callable[[], int]) -> int:
        """A number that follows from a compilation, remembered like the program it belongs to."""
        path = self._path(name, arguments, (), (), description)
        if path is not None and (stored := _read(path)) is not None:
            return int.from_bytes(stored, "little")
        number = compute()
        if path is not None:
            _write(path, number.to_bytes(8, "little"))
        return number

    def _path(
        self, name: str, arguments: Sequence[Any], results: Any, donate: tuple[int, ...], description: str
    ) -> Path | None:
        if self._directory is None:
            return None
        shapes = [(leaf.shape, str(leaf.dtype), str(leaf.format)) for leaf in jax.tree.leaves((arguments, results))]
        devices = [device.id for device in self._devices]
        environment = _environment(self._devices[0], self._family)
        structure = str(jax.tree.structure((arguments, results)))
        key = repr((environment, devices, name, donate, shapes, structure, description))
        return self._directory / f"{hashlib.sha256(key.encode()).hexdigest()}.xla"


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError("compile_cache_dir", str(directory), "a directory of your own that nobody else may write")


def _prune(directory: Path) -> None:
    """Deletes what no start has used for a month: every change of a source or a version leaves its programs behind."""
    oldest = time.time() - _UNUSED_SECONDS
    for path in directory.glob("*.xla"):
        with contextlib.suppress(OSError):  # another process may be pruning too
            if path.stat().st_mtime < oldest:
                path.unlink()


def _source_file(family: type) -> Path | None:
    file = getattr(sys.modules.get(family.__module__), "__file__", None)
    return None if file is None else Path(file).resolve()


@functools.cache
def _environment(device: Any, family: Path | None) -> tuple[str, ...]:
    """What every program's machine code depends on."""
    return (
        source_digest(Path(__file__).resolve().parents[2], kernel_modules(platform_of(device)), family),
        jax.__version__,
        jaxlib.version.__version__,
        device.platform,
        device.device_kind,
        str(device.client.platform_version),
        str(jax.device_count()),
        platform.machine(),
        _cpu_flags(),
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get("LIBTPU_INIT_ARGS", ""),
    )


def _cpu_flags() -> str:
    """Host code is compiled for the very CPU: its features, and its number of cores, decide what is emitted."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{flags} x{os.cpu_count()}"


def _load(path: Path, in_tree: Any, out_tree: Any, devices: Sequence[Any]) -> jax.stages.Compiled | None:
    payload = _read(path)
    if payload is None:
        return None
    try:
        return serialize_executable.deserialize_and_load(payload, in_tree, out_tree, execution_devices=tuple(devices))
    except Exception as error:  # whatever the runtime dislikes about the file, compiling again is the answer
        logger.warning("cached executable %s cannot be used and is compiled again: %s", path.name, error)
        return None


def _store(path: Path, compiled: jax.stages.Compiled) -> None:
    try:
        payload, _, _ = serialize_executable.serialize(compiled)
    except ValueError as error:
        logger.warning("this platform's executables cannot be stored, every start will compile: %s", error)
        return
    _write(path, payload)


def _read(path: Path) -> bytes | None:
    """The content of a file written by `_write`; None when it is absent or damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    payload = content[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != content[:_DIGEST_BYTES]:
        logger.warning("cached executable %s is damaged and is made again", path.name)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return payload


def _write(path: Path, payload: bytes) -> None:
    """Writes digest and payload so that no reader ever sees half of them. A full disk costs the cache, not the run."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(payload).digest() + payload)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("cannot write %s: %s", path, error)
