"""What optional capabilities must know or say of an engine before anything of it is loaded."""

from __future__ import annotations

from jaxengine.checkpoint.model_source import ModelSource
from jaxengine.config.engine_config import EngineConfig
from jaxengine.media.open import open_processor


def settled(config: EngineConfig, source: ModelSource) -> EngineConfig:
    """The config, whose draft model or head, if it names one, is found or downloaded and then named by its path.

    source: the opened model that is drafted for. Raises ConfigError or ModelFileError, as `settle_draft`.
    """
    if config.speculative_config is None:
        return config
    from jaxengine.runner.extensions.drafts.open import settle_draft

    return settle_draft(config, source.config)


def item_sizes(source: ModelSource, config: EngineConfig) -> list[tuple[int, int]]:
    """(embeddings, patches) of the largest item of each kind that requests may bring, pictures or videos; none for a
    model of text. Reads the model's processor and tokenizer: ModelFileError or ModelConfigError for wrong ones."""
    if source.config.tower is None:
        return []
    processor = open_processor(source.path, source.config, config.hf_overrides, source.load_tokenizer(config))
    assert processor is not None
    found = []
    for modality in processor.modalities:
        if config.mm_limit(modality):
            largest = processor.largest(modality, config.mm_size(modality))
            found.append((largest.num_rows, len(largest.patches)))
    return found
