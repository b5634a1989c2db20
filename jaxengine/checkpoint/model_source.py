"""From the word a user gives for a model to its configuration, weights and tokenizer.

A GGUF file, a Hugging Face folder, a hub id (downloaded first), or nothing for the embedded default model. Only data is
read from any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxengine.checkpoint.default_model import default_model_path
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.tokens.tokenizer import Tokenizer
from models.config.fields import MAX_HEAD_DIM, ModelConfigError
from models.config.model_config import ModelConfig
from models.registry import read_folder, read_gguf
from models.weights.errors import ModelFileError
from models.weights.files import inside, read_object
from models.weights.gguf import GGUFFile
from models.weights.load import HEAD, ROPE_FACTORS
from models.weights.orbax import LAYOUT_FILE
from models.weights.safetensors import SafetensorsCheckpoint
from models.weights.source import WeightSource

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_OTHER_FILES = ("*.json", "*.jinja", "tokenizer.model")
_GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ModelSource:
    """An opened model.

    Attributes:
      path: file or folder.
      config: the model's shape.
      weights: None for load_format="dummy", the folder itself where weights lie as devices hold them (`convert`).
      generation_defaults: sampling parameters the model's authors suggest.
    """

    path: Path
    config: ModelConfig
    weights: WeightSource | Path | None
    generation_defaults: dict[str, Any]

    def close(self) -> None:
        """Closes the weights' files."""
        if self.weights is not None and not isinstance(self.weights, Path):
            self.weights.close()

    def files_beside_weights(self) -> list[Path]:
        """Configuration, tokenizer and templates of a model folder. Raises ModelFileError for a link out of it."""
        found = {file for pattern in _OTHER_FILES for file in self.path.glob(pattern)}
        found -= {file for pattern in _WEIGHT_FILES for file in self.path.glob(pattern)}
        for file in found:
            inside(self.path, file.name)
        return sorted(found)

    def load_tokenizer(self, config: EngineConfig) -> Tokenizer | None:
        """The model's tokenizer, the one asked for instead, or None when it is to be skipped."""
        if config.skip_tokenizer_init:
            return None
        if config.tokenizer is not None:
            return Tokenizer.from_hf_folder(config.tokenizer)
        if self.path.is_dir():
            return Tokenizer.from_hf_folder(self.path)
        with GGUFFile(self.path) as file:
            return Tokenizer.from_gguf(file.metadata, path=str(self.path))


def open_model(config: EngineConfig) -> ModelSource:
    """Opens what `config.model` names.

    Raises:
      ConfigError: no such file, folder or hub model.
      ModelFileError: a file of it cannot be used.
    """
    path = default_model_path() if config.model is None else _find(config)
    if path.is_file():
        return _open_gguf(path, config)
    return _open_folder(path, config)


def _find(config: EngineConfig) -> Path:
    assert config.model is not None
    try:
        path = Path(config.model).expanduser()
        if path.exists():
            return path
    except (OSError, ValueError, RuntimeError) as error:  # no file can have such a name, or nobody may look
        raise ConfigError(
            "model", config.model[:200], f"a file or folder that can be read: {str(error)[:200]}"
        ) from None
    parts = config.model.split("/")
    if len(parts) != 2 or not all(parts) or config.model.startswith((".", "~")):
        raise ConfigError("model", config.model, "a GGUF file, a Hugging Face folder, or a hub id like org/name")
    return _download(config)


def _download(config: EngineConfig) -> Path:
    import huggingface_hub

    assert config.model is not None
    try:
        folder = huggingface_hub.snapshot_download(
            config.model,
            revision=config.revision,
            cache_dir=config.download_dir,
            allow_patterns=[*_WEIGHT_FILES, *_OTHER_FILES],
        )
    except Exception as error:  # the hub client has no common base for "not there", "not allowed" and "no network"
        raise ConfigError(
            "model", config.model, f"no such file or folder, and the hub does not give it: {str(error)[:500]}"
        ) from error
    return Path(folder)


def _open_gguf(path: Path, config: EngineConfig) -> ModelSource:
    if config.load_format not in ("auto", "gguf", "dummy"):
        raise ConfigError("load_format", config.load_format, "auto, gguf or dummy for a file")
    file = GGUFFile(path)
    tied = HEAD not in file.names()
    try:
        model = read_gguf(file.metadata, tie_word_embeddings=tied, rope_factors=_rope_factors(file))
    except ModelConfigError as error:
        raise ModelFileError(path, str(error)) from error
    return ModelSource(path, model, None if config.load_format == "dummy" else file, {})


def _rope_factors(file: GGUFFile) -> tuple[float, ...]:
    if ROPE_FACTORS not in file.names():
        return ()
    shape = file.shape(ROPE_FACTORS)
    if len(shape) != 1 or shape[0] > MAX_HEAD_DIM:
        text = f"rope factors must be a list of at most {MAX_HEAD_DIM}, got {shape}"
        raise ModelFileError(file.path, text, ROPE_FACTORS)
    return tuple(float(factor) for factor in file.read(ROPE_FACTORS))


def _open_folder(path: Path, config: EngineConfig) -> ModelSource:
    if not path.is_dir():
        raise ModelFileError(path, "must be a regular file or a folder")
    converted = (path / LAYOUT_FILE).is_file()
    allowed = ("auto", "orbax" if converted else "safetensors", "dummy")
    if config.load_format not in allowed:
        raise ConfigError("load_format", config.load_format, f"{', '.join(allowed)} for {path}")
    model = read_folder(path)
    weights = None if config.load_format == "dummy" else path if converted else SafetensorsCheckpoint(path)
    defaults = {} if config.generation_config == "vllm" else _generation_defaults(path)
    return ModelSource(path, model, weights, defaults)


def _generation_defaults(folder: Path) -> dict[str, Any]:
    """The sampling parameters of a generation_config.json; values are checked when they are used."""
    content = read_object(folder, "generation_config.json") or {}
    defaults = {name: content[name] for name in _GENERATION_FIELDS if content.get(name) is not None}
    if content.get("max_new_tokens") is not None:
        defaults["max_tokens"] = content["max_new_tokens"]
    return defaults
