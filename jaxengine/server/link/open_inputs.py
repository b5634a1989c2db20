"""Creation of an API process's request preprocessing, from the engine's Welcome."""

from __future__ import annotations

from dataclasses import replace

from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.requests.inputs import InputProcessor, input_processor
from jaxengine.server.link.media_senders import MediaSender
from jaxengine.server.link.messages import Welcome
from jaxengine.server.link.shared_media import media_sender


def open_inputs(welcome: Welcome, index: int) -> tuple[InputProcessor, MediaSender]:
    """Return the input processor and the media sender of the API process `index`.

    welcome: the engine's message, whose model must be readable on this machine under the same path. Reads the tokenizer
    and the chat template from disk, which takes a long time, but no weights. Raises ConfigError and ModelFileError for
    a model that cannot be opened here.
    """
    config = ResolvedConfig(**welcome.config)
    # The weights are not read; the model is where the engine found it.
    source = open_model(replace(config, model=welcome.model, load_format="dummy"))
    source.close()
    inputs = input_processor(source, config, origin=index)
    if inputs.media is None:
        return inputs, MediaSender()
    sender = media_sender(welcome.media_cache, config)
    if sender.cache is not None:
        inputs.media.cache = sender.cache
    return inputs, sender
