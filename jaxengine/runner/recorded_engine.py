"""Description of the engine that ran recorded steps, for their `engine.json`."""

from __future__ import annotations

import hashlib
import importlib.metadata
from typing import Any

from jaxengine.config.execution.recording import replayed_options
from jaxengine.models.kernel_rows import kernel_rows, without_rows
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.version import __version__

_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


def about_engine(runner: ModelRunner) -> dict[str, Any]:
    """Return a description of a runner's engine as plain JSON values: "versions" by package, "platform", "device",
    "options", "model" (its architecture, sizes and digest), "kernels" (without those that it does not use) and
    "products" (the forms of products of weights).
    """
    config, programs = runner.config, runner.last.programs
    model = programs.model.config
    with without_rows(runner.last.executables.unused):
        kernels = kernel_rows(programs.platform)
    return {
        "versions": {"jaxengine": __version__, **_versions()},
        "platform": programs.platform,
        "device": runner.device.device_kind,
        "options": replayed_options(config),
        "model": {
            "architecture": model.architecture,
            "layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "digest": model_digest(model),
        },
        "kernels": kernels,
        "products": [{name: str(value) for name, value in row.items()} for row in runner.weight_rows],
    }


def model_digest(model: Any) -> str:
    """Return the SHA-256 digest, in hexadecimal, of a model's configuration (its repr)."""
    return hashlib.sha256(repr(model).encode()).hexdigest()


def _versions() -> dict[str, str]:
    """Return the versions of jax and of the compilers that are installed, by package."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
