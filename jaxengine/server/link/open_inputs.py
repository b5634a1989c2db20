"""Creation of an API process's request preprocessing, from the engine's Welcome."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxengine.checkpoint.control_vectors import read_control_vectors
from jaxengine.checkpoint.input_source import InputSource
from jaxengine.checkpoint.plugins import load_plugins
from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.requests.inputs import InputProcessor, input_processor
from jaxengine.server.link.media_senders import MediaSender
from jaxengine.server.link.messages import Welcome
from jaxengine.server.link.records import packed, unpacked
from jaxengine.server.link.shared_media import media_sender


def packed_source(source: InputSource) -> Any:
    """Return a model's source for a Welcome, without what only the engine needs (quantization), and without control
    vectors, which are read from their files again.
    """
    return packed(replace(source, config=replace(source.config, quantization=None), control_vectors={}))


def inputs_of(source: Any, config: ResolvedConfig, index: int = 0) -> InputProcessor:
    """Return the input processor of process `index` for an engine in another one.

    source: what `packed_source` made; its files must be on this machine under the same path. config: the engine's.
    Loads the plugins, and reads the tokenizer, the chat template and control vectors from disk, which takes a long
    time. The model's configuration is the engine's. Raises ConfigError, ModelFileError and ModelConfigError for plugins
    and files that cannot be used here.
    """
    load_plugins(config.plugins)
    opened: InputSource = unpacked(source)
    opened = replace(opened, control_vectors=read_control_vectors(config.steering_vectors, opened.config))
    return input_processor(opened, config, origin=index)


def open_inputs(welcome: Welcome, index: int) -> tuple[InputProcessor, MediaSender]:
    """Return the input processor and the media sender of the API process `index`. The sender is the processor's media
    cache if it has one. welcome: the engine's message. Raises the errors of `inputs_of`.
    """
    config = ResolvedConfig(**welcome.config)
    inputs = inputs_of(welcome.source, config, index)
    if inputs.media is None:
        return inputs, MediaSender()
    sender = media_sender(welcome.media_cache, config)
    if sender.cache is not None:
        inputs.media.cache = sender.cache
    return inputs, sender
