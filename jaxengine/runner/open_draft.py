"""The draft model that a config names, opened and compared with the model that it drafts for."""

from __future__ import annotations

from dataclasses import replace

from jaxengine.checkpoint.model_source import ModelSource, open_model
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.speculation import NAME, check_draft_model
from models.config.model_config import ModelConfig


def settle_draft(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The config with its draft model on this machine, if it names one. Raises as `open_draft`."""
    chosen = config.speculative_config
    if chosen is None or not chosen.has_model:
        return config
    draft = open_draft(config, model)
    draft.close()
    return replace(config, speculative_config=replace(chosen, model=str(draft.path), revision=None))


def open_draft(config: EngineConfig, model: ModelConfig) -> ModelSource:
    """The draft model of a config; what is said of the model's weights and tokenizer is not said of it.

    Raises:
      ConfigError: there is no such model, or it cannot draft for this one.
      ModelFileError: as jaxengine.checkpoint.model_source.open_model.
    """
    chosen = config.speculative_config
    assert chosen is not None
    own = replace(
        config,
        model=chosen.model,
        revision=chosen.revision,
        load_format="dummy" if config.load_format == "dummy" else "auto",
        skip_tokenizer_init=True,
        tokenizer=None,
        tokenizer_revision=None,
        quantization=None,
        generation_config="vllm",
        override_generation_config=None,
        hf_overrides=None,
        pooler_config=None,
        speculative_config=None,
    )
    try:
        draft = open_model(own)
    except ConfigError as error:
        error.args = (f"{NAME}.model: {error.args[0]}",)
        error.param = NAME
        raise
    try:
        check_draft_model(draft.config, model)
    except ConfigError:
        draft.close()
        raise
    return draft
