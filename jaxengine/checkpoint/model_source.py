"""From the word a user gives for a model to its configuration, weights and tokenizer.

A GGUF file, a Hugging Face folder, a hub id (downloaded first), or nothing for the embedded default model. Only data is
read from any of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxengine.checkpoint.default_model import GENERATION_DEFAULTS, default_model_path
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.tokens.tokenizer import Tokenizer
from models.config.hf import read_config_json
from models.config.model_config import ModelConfig
from models.registry import read_gguf, read_hf
from models.weights.errors import ModelFileError
from models.weights.gguf import GGUFFile
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
        """Configuration, tokenizer and templates of a model folder."""
        found = {file for pattern in _OTHER_FILES for file in self.path.glob(pattern)}
        return sorted(found - {file for pattern in _WEIGHT_FILES for file in self.path.glob(pattern)})

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
    if config.model is None:
        defaults = {} if config.generation_config == "vllm" else GENERATION_DEFAULTS
        return replace(_open_gguf(default_model_path(), config), generation_defaults=dict(defaults))
    path = _find(config)
    if path.is_file():
        return _open_gguf(path, config)
    return _open_folder(path, config)


def _find(config: EngineConfig) -> Path:
    assert config.model is not None
    path = Path(config.model).expanduser()
    if path.exists():
        return path
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
            "model", config.model, f"no such file or folder, and the hub does not give it: {error}"
        ) from error
    return Path(folder)


def _open_gguf(path: Path, config: EngineConfig) -> ModelSource:
    if config.load_format not in ("auto", "gguf", "dummy"):
        raise ConfigError("load_format", config.load_format, "auto, gguf or dummy for a file")
    file = GGUFFile(path)
    factors = tuple(float(x) for x in file.read("rope_freqs.weight")) if "rope_freqs.weight" in file.names() else ()
    model = read_gguf(file.metadata, tie_word_embeddings="lm_head.weight" not in file.names(), rope_factors=factors)
    return ModelSource(path, model, None if config.load_format == "dummy" else file, {})


def _open_folder(path: Path, config: EngineConfig) -> ModelSource:
    converted = (path / LAYOUT_FILE).is_file()
    allowed = ("auto", "orbax" if converted else "safetensors", "dummy")
    if config.load_format not in allowed:
        raise ConfigError("load_format", config.load_format, f"{', '.join(allowed)} for {path}")
    model = read_hf(read_config_json(path))
    weights = None if config.load_format == "dummy" else path if converted else SafetensorsCheckpoint(path)
    defaults = {} if config.generation_config == "vllm" else _generation_defaults(path / "generation_config.json")
    return ModelSource(path, model, weights, defaults)


def _generation_defaults(path: Path) -> dict[str, Any]:
    """The sampling parameters of a generation_config.json; values are checked when they are used."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ModelFileError(str(path), f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelFileError(str(path), "not a JSON object")
    defaults = {name: content[name] for name in _GENERATION_FIELDS if content.get(name) is not None}
    if content.get("max_new_tokens") is not None:
        defaults["max_tokens"] = content["max_new_tokens"]
    return defaults
