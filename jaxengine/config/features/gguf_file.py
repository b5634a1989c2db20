"""vLLM's earlier way of naming a GGUF file: a folder or hub repository as `model`, and the file as `gguf_file`."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from jaxengine.config.base.errors import ConfigError

NAME = "gguf_file"


def with_gguf_file(options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the options without gguf_file; if it is given, `model` becomes "MODEL/GGUF_FILE".

    Raises ConfigError for a file that does not end in .gguf or lies outside of the model's folder, and for a file
    without a model.
    """
    others = {name: value for name, value in options.items() if name != NAME}
    file = options.get(NAME)
    if file is None:
        return others
    if not isinstance(file, str) or not file.endswith(".gguf"):
        raise ConfigError(NAME, file, "the name of a .gguf file in the model's folder or repository")
    path, model = PurePosixPath(file), others.get("model")
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(NAME, file, "a name within the model's folder or repository; else give it as model")
    if not isinstance(model, str) or not model:
        problem = f"gguf_file is {file[:200]!r}, but no model is named"
        raise ConfigError.because(NAME, problem, "name its folder or hub repository as model, or the file itself")
    return {**others, "model": f"{model.rstrip('/')}/{file}"}
