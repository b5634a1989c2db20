"""Opens a checkpoint's MediaProcessor from the checkpoint's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxengine.media.base.processor import MediaProcessor
from jaxengine.media.registry import processor_for
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.config.readers.overrides import overridden
from jaxengine.models.params.files import AUTO


def open_processor(
    path: Path,
    model: ModelConfig,
    overrides: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    config_format: str = AUTO,
) -> MediaProcessor | None:
    """Return the media processor of the model at `path`; None for a model without a tower.

    overrides: hf_overrides, which replace fields of config.json; None if nothing is replaced. tokenizer: the model's
    Tokenizer; None without one, which some families refuse. config_format: the option of this name, AUTO, HF or
    MISTRAL. Raises ModelFileError or ModelConfigError for missing or invalid files and settings.
    """
    if model.tower is None:
        return None
    return processor_for(path, overridden(read_config_json(path, config_format), overrides or {}), model, tokenizer)
