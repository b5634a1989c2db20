"""`jaxengine collect-env`: prints a text about the machine for a bug report. It contains no keys and no passwords."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxengine.paths import HOME
from jaxengine.version import __version__

# Packages that decide how the engine runs.
_PACKAGES = """
    jax jaxlib libtpu jax-cuda12-plugin jax-cuda13-plugin flax numpy ml_dtypes transformers tokenizers safetensors
    huggingface_hub orbax-checkpoint llguidance msgspec pyzmq fastapi uvicorn pydantic grpcio ray pillow av
"""
# Beginnings of the names of variables that change how a program runs here.
_VARIABLES = ("JAX", "XLA", "TPU", "LIBTPU", "CUDA", "NVIDIA", "NCCL", "HF_", "TF_", "XDG_CACHE", "TOKENIZERS", "LD_")
_SECRET = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASS|AUTH|CREDENTIAL|COOKIE", re.IGNORECASE)
# User and password in a URL.
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_DEVICES = """
import jax
print("backend:", jax.default_backend(), "in", jax.process_count(), "process(es)")
for device in jax.devices():
    stats = device.memory_stats() or {}
    size = f", {stats['bytes_limit'] / 2**30:.1f} GiB" if "bytes_limit" in stats else ""
    print(f"device {device.id}: {device.device_kind}{size}")
"""
_DEVICE_SECONDS = 90
_GPUS = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Set `run` as the function that executes `jaxengine collect-env`. The command has no arguments."""
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the text about this machine, line by line, and return 0. args: not used."""
    for line in collected():
        print(line, flush=True)
    return 0


def collected() -> Iterator[str]:
    """Yield the lines of the report, as they become known, with the home folder replaced by ~: for each section the
    line "== TITLE" and its lines.
    """
    for title, lines in (
        ("jaxengine", _ours()),
        ("system", _system()),
        ("packages", _packages()),
        ("devices", _devices()),
        ("environment", variables(os.environ)),
    ):
        yield f"== {title}"
        yield from map(without_home, lines)


def variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a line NAME=VALUE for each environment variable whose name begins as in _VARIABLES, sorted by name.

    Only "(set)" is shown for a variable whose name suggests a secret, and users and passwords in URLs are replaced by
    dots.
    """
    for name, value in sorted(environment.items()):
        if name.startswith(_VARIABLES):
            yield f"{name}=" + ("(set)" if _SECRET.search(name) else _LOGIN.sub("...", value))


def without_home(line: str) -> str:
    """Return a line in which the path of the home folder, which has the user's name, is replaced by ~."""
    home = os.path.expanduser("~")
    return line.replace(home, "~") if len(home) > 1 else line


def _ours() -> Iterator[str]:
    """Yield lines about the version, the folder of the installation, and Python."""
    yield f"version: {__version__}"
    yield f"installed in: {HOME}"
    yield f"Python: {sys.version.split()[0]} ({platform.python_implementation()}), {sys.executable}"


def _system() -> Iterator[str]:
    """Yield lines about the operating system, its distribution, the processor and its usable cores, memory and the
    limit of the control group, and whether this is a container. What /etc, /proc or /sys does not say is left out.
    """
    yield f"platform: {platform.platform()}"
    release = _read("/etc/os-release")
    if found := re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE):
        yield f"distribution: {found[1]}"
    model = re.search(r"^model name\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"processor: {model[1] if model else platform.processor() or platform.machine()}, {usable} usable cores"
    if total := re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE):
        limit = _read("/sys/fs/cgroup/memory.max").strip()
        bound = f", limited to {int(limit) / 2**30:.1f} GiB" if limit.isdigit() else ""
        yield f"memory: {int(total[1]) / 2**20:.1f} GiB{bound}"
    yield f"container: {'yes' if Path('/.dockerenv').exists() or os.environ.get('KUBERNETES_SERVICE_HOST') else 'no'}"


def _packages() -> Iterator[str]:
    """Yield "NAME: VERSION" for each package in _PACKAGES, with "-" for one that is not installed."""
    for name in _PACKAGES.split():
        try:
            yield f"{name}: {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name}: -"


def _devices() -> Iterator[str]:
    """Yield lines about the devices.

    A separate process lists jax's devices, because another program may hold them exclusively. nvidia-smi is run if it
    is installed.
    """
    yield from _output([sys.executable, "-c", _DEVICES], "jax's devices cannot be listed")
    if shutil.which(_GPUS[0]):
        yield from _output([*_GPUS], "nvidia-smi fails")


def _output(command: list[str], failure: str) -> Iterator[str]:
    """Run a command and yield the lines that it prints, then a line of `failure` and the reason if it fails or takes
    more than _DEVICE_SECONDS.

    Blocks until the command ends. Raises OSError if there is no such command.
    """
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_DEVICE_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        yield f"{failure}: no answer within {_DEVICE_SECONDS} s"
        return
    yield from ended.stdout.splitlines()
    if ended.returncode:
        yield f"{failure}: {(ended.stderr.strip().splitlines() or ['no reason given'])[-1]}"


def _read(path: str) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
