"""Facts about optional capabilities that must be settled before any part of an engine is loaded."""

from __future__ import annotations

from jaxengine.checkpoint.model_source import ModelSource
from jaxengine.config.base.errors import ConfigError
from jaxengine.config.engine_config import EngineConfig
from jaxengine.media.open import open_processor


def settled(config: EngineConfig, source: ModelSource) -> EngineConfig:
    """Return the config with its draft model or head, if it names one, downloaded and named by its path, and with room
    for the adapter that the checkpoint has for prompts with sounds or images.

    source: the opened target model. Raises ConfigError or ModelFileError for a draft or an adapter that is missing or
    cannot be used.
    """
    if source.media_adapter is not None:
        from jaxengine.runner.extensions.adapters.media_adapter import with_media_adapter

        config = with_media_adapter(config, source)
    if config.speculative_config is None:
        return config
    from jaxengine.runner.extensions.drafts.open import settle_draft

    return settle_draft(config, source.config)


def item_sizes(source: ModelSource, config: EngineConfig) -> dict[str, tuple[int, int]]:
    """Return (embeddings, patches) of the largest item that requests may have, by modality; {} for a text model.
    Modalities that `limit_mm_per_prompt` excludes are left out.

    Reads the model's processor and tokenizer. Raises ModelFileError or ModelConfigError for invalid ones, and
    ConfigError for `mm_processor_kwargs` that the processor refuses.
    """
    if source.config.tower is None:
        return {}
    processor = open_processor(
        source.path, source.config, config.hf_overrides, source.load_tokenizer(config), config.config_format
    )
    assert processor is not None
    try:
        processor = processor.with_options(config.mm_processor_kwargs or {})
    except ValueError as error:
        raise ConfigError.because("mm_processor_kwargs", str(error), "give an allowed value") from None
    found = {}
    for modality in processor.modalities:
        if config.mm_limit(modality):
            largest = processor.largest(modality, config.mm_size(modality), config.mm_frames(modality))
            found[modality] = largest.num_rows, len(largest.patches)
    return found
