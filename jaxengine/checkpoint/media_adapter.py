"""The LoRA adapter that a checkpoint has for prompts with sounds (Granite Speech) or images (Phi-4-multimodal)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jaxengine.checkpoint.model_source import ModelSource
from jaxengine.config.base.errors import ConfigError
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.features.lora import RANKS
from jaxengine.models.params.files import read_object
from jaxengine.models.weights.adapters.config import AdapterConfig
from jaxengine.models.weights.adapters.folder import CONFIG_FILE


def media_adapter(source: ModelSource) -> Path | None:
    """Return the folder of the model's own LoRA adapter; None if it has none, or was opened without the tower whose
    prompts it is for.
    """
    named = (source.path / tower.adapter for tower in source.config.towers if tower.adapter is not None)
    return next((folder for folder in named if (folder / CONFIG_FILE).exists()), None)


def with_media_adapter(config: EngineConfig, source: ModelSource) -> EngineConfig:
    """Return the config with room for the model's own adapter; the config itself if there is none.

    Without enable_lora it is enabled, with the least rank that fits. Raises ModelFileError for an invalid adapter,
    ConfigError if LoRA is enabled with a max_lora_rank that is too low.
    """
    folder = media_adapter(source)
    if folder is None:
        return config
    largest = AdapterConfig(folder / CONFIG_FILE, read_object(folder, CONFIG_FILE) or {}).largest_rank
    rank = next((each for each in RANKS if each >= largest), largest)
    if not config.enable_lora:
        return replace(config, enable_lora=True, max_lora_rank=rank)
    if config.max_lora_rank < rank:
        problem = f"max_lora_rank is {config.max_lora_rank}, and the adapter of {folder} has {largest}"
        raise ConfigError.because("max_lora_rank", problem, f"give {rank} or more")
    return config
