"""Opens a model to plan for: its configuration and the headers of its files. No weights are read or downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxengine.check.model.drafts import settled as settled_head
from jaxengine.check.model.shapes import SHAPES, largest_items, model_config
from jaxengine.checkpoint.hub_model import OTHER_FILES, from_hub
from jaxengine.checkpoint.model_source import ModelSource, as_it_sees
from jaxengine.config.base.files import named_path
from jaxengine.config.base.lengths import given_length
from jaxengine.config.base.platforms import Platform
from jaxengine.config.engine_config import EngineConfig, ResolvedConfig
from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.registry import build_model
from jaxengine.models.weights.load import check_headers
from jaxengine.runner.extensions.settle import item_sizes
from jaxengine.runner.start.open import settle_model

_WEIGHTS = ("*.safetensors", "*.gguf")


@dataclass(frozen=True)
class PlannedModel:
    """An opened model, for the chips of one platform.

    Attributes:
      source: its configuration and files.
      config: the engine's options, settled for the model except for parallel sizes.
      platform: default options of the chips.
      items: by modality, (embeddings, patches) of the largest item.
      file_bytes: size of its weight files; 0 if they are not here.
      note: remark for the report on what is assumed; "" for none.
    """

    source: ModelSource
    config: EngineConfig
    platform: Platform
    items: Mapping[str, tuple[int, int]]
    file_bytes: int
    note: str

    def resolved(self, **parallel: int | bool) -> ResolvedConfig:
        """Return the config with all defaults and the options `parallel` (parallel sizes, max_model_len) replaced.
        Raises ConfigError for values that are invalid or do not divide the model.
        """
        return replace(self.config, **parallel).resolved(self.source.config, self.platform, self.items)

    def close(self) -> None:
        """Close the model's files."""
        self.source.close()


def open_planned(config: EngineConfig, platform: Platform) -> PlannedModel:
    """Open the model that config.model names, as an engine does, or a shape that `jaxengine check` knows.

    Of a hub id only the configuration and the tokenizer are downloaded; a GGUF file of the hub is downloaded whole.
    Without weights, from the hub or in a folder, the plan follows from the configuration (load_format "dummy"), and its
    `note` says so. platform: default options of the chips. The caller closes the result. Raises the engine's
    ConfigError, ModelConfigError and ModelFileError, also for weights that are wrong or missing as far as the headers
    of the files show it.
    """
    name = config.model
    if name is not None and name.lower() in SHAPES and not Path(name).exists():
        return _open_shape(name, config, platform)
    note, file_bytes = "", 0
    path = None if name is None else named_path("model", name)
    if path is not None and not path.exists() and len(path.parts) == 2 and ":" not in path.name:
        folder = from_hub("model", str(name), OTHER_FILES, config.revision, config)
        config, path = replace(config, model=str(folder), load_format="dummy"), folder
        note = "shapes follow from config.json; the weights were not downloaded"
    elif path is not None and path.is_dir() and not _weight_files(path) and config.load_format == "auto":
        config = replace(config, load_format="dummy")
        note = "shapes follow from config.json; there are no weights here"
    source, config = settle_model(config, platform)
    with source.closing_on_error():
        _check_weights(source, platform.dtype if config.dtype == "auto" else config.dtype)
    if not note:
        file_bytes = sum(file.stat().st_size for file in _weight_files(source.path))
    return PlannedModel(source, config, platform, item_sizes(source, config), file_bytes, note)


def _check_weights(source: ModelSource, dtype: str) -> None:
    """Raise ModelFileError for weights of `source` that do not match the model, as far as headers show: names, shapes
    and, except in GGUF files, types.

    dtype: name of the model's dtype. A model that cannot be built raises nothing here. A folder in device layout, and a
    source without weights, are not checked.
    """
    if source.weights is None or isinstance(source.weights, Path):
        return
    try:
        model = build_model(source.config, Build(dtype))
    except (ModelConfigError, ValueError):  # the error comes when it is split
        return
    check_headers(model, source.weights, kinds=source.path.suffix != ".gguf")


def _open_shape(name: str, config: EngineConfig, platform: Platform) -> PlannedModel:
    """Return the PlannedModel of the published shape `name`, one of SHAPES, which has no files. config, platform:
    arguments of `open_planned`. Raises ConfigError for options that contradict it.
    """
    shape = model_config(name, config.quantization, keep_tables=platform.keeps_tables)
    shape = as_it_sees(shape, config)
    longest = given_length(config.max_model_len) or shape.max_position_embeddings
    source = ModelSource(path=Path(name), config=shape.up_to(longest), generation_defaults={})
    config = settled_head(replace(config, load_format="dummy"), shape)
    note = "a published shape; images are taken to have 16,384 patches" if shape.tower else "a published shape"
    return PlannedModel(source, config, platform, largest_items(shape), 0, note)


def _weight_files(path: Path) -> list[Path]:
    """Return the weight files in a folder, those of safetensors first, or [path] if it is a file."""
    return [path] if path.is_file() else [file for pattern in _WEIGHTS for file in path.glob(pattern)]
