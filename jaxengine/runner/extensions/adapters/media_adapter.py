"""Room in an engine for the LoRA adapter that a checkpoint has for prompts with sounds or images."""

from __future__ import annotations

from dataclasses import replace

from jaxengine.checkpoint.input_source import InputSource
from jaxengine.config.base.errors import ConfigError
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.features.lora import RANKS
from jaxengine.models.params.files import ADAPTER_CONFIG, read_object
from jaxengine.models.weights.adapters.config import AdapterConfig


def with_media_adapter(config: EngineConfig, source: InputSource) -> EngineConfig:
    """Return the config with room for the model's own adapter; the config itself if there is none.

    Without enable_lora it is enabled, with the least rank that fits. Raises ModelFileError for an invalid adapter,
    ConfigError if LoRA is enabled with a max_lora_rank that is too low.
    """
    folder = source.media_adapter
    if folder is None:
        return config
    largest = AdapterConfig(folder / ADAPTER_CONFIG, read_object(folder, ADAPTER_CONFIG) or {}).largest_rank
    rank = next((each for each in RANKS if each >= largest), largest)
    if not config.enable_lora:
        return replace(config, enable_lora=True, max_lora_rank=rank)
    if config.max_lora_rank < rank:
        problem = f"max_lora_rank is {config.max_lora_rank}, and the adapter of {folder} has {largest}"
        raise ConfigError.because("max_lora_rank", problem, f"give {rank} or more")
    return config
