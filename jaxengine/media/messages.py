"""Media in conversations, for one model: collected from messages (parts) and loaded (load)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.base.samples import RATE
from jaxengine.media.load import MediaLoader, MultiModalData
from jaxengine.media.parts import MediaModel, MediaPart, collect_media


class MediaReader:
    """Collector and loader of the media in chat messages.

    model: the model's media capabilities; None for a text-only model. options: limits. rate: samples a second of its
    sounds.
    """

    def __init__(self, model: MediaModel | None, options: MediaOptions, rate: int = RATE):
        self._model = model
        self._options, self._rate = options, rate

    @cached_property
    def loader(self) -> MediaLoader:
        """Thread pools that load media, started on first use."""
        return MediaLoader(self._options, self._rate)

    @property
    def placeholder(self) -> Callable[[str], str] | None:
        """Function from a modality to the text that stands for an item in chat templates that take only text; None for
        a text-only model.
        """
        return None if self._model is None else self._model.placeholder

    def collect(self, messages: Any) -> tuple[Any, list[MediaPart]]:
        """Take media out of chat messages; return (messages for a chat template, media in order). Nothing is loaded.

        Raises RequestError for media that cannot be used, see parts.collect_media.
        """
        return collect_media(messages, self._model, self._options)

    def read(self, messages: Any) -> tuple[Any, MultiModalData]:
        """Return (messages for a chat template, loaded media by modality); {} if the messages have no media.

        Blocks until they are loaded, which may take seconds. Raises RequestError for media that cannot be used.
        """
        messages, parts = self.collect(messages)
        return messages, self.loader.load_now(parts) if parts else {}
