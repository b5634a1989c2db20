"""A GGUF file as new weights of a model that was opened before, in the formats in which that model stores them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WeightSource
from jaxengine.models.quantization.base.rules import Quantization
from jaxengine.models.quantization.schemes.gguf import METHOD
from jaxengine.models.registry import build_model
from jaxengine.models.weights.gguf.file import GGUFFile
from jaxengine.models.weights.gguf.kept import read_formats
from jaxengine.models.weights.views.split_latent import SplitLatentSource

_MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, judged by its first bytes. False for a folder or a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):  # a folder, no permission; a NUL byte in the path
        return False


def open_gguf_weights(path: Path, model: ModelConfig) -> WeightSource:
    """Open a GGUF file as weights of `model`: quantised if the model holds GGUF formats, else dequantised.

    The returned source owns the file, which is closed if this fails. Raises ModelFileError for an invalid file, and, if
    the model holds GGUF formats, for a file with other formats.
    """
    file = GGUFFile(path)
    try:
        stored = model.quantization
        if isinstance(stored, Quantization) and stored.method == METHOD:
            build = partial(build_model, replace(model, quantization=None))
            found, kept = read_formats(file.formats(), build, keep_tables=stored.with_tables)
            if found != stored:
                raise ModelFileError(path, "stores matrices in other formats than the engine holds them")
            file.keep(kept)
    except BaseException:
        file.close()
        raise
    return SplitLatentSource(file)
