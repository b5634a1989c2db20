"""Media in conversations, for one model: collected from messages (parts) and loaded (load)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.load import MediaLoader, MultiModalData
from jaxengine.media.parts import MediaModel, MediaPart, collect_media


class MediaReader:
    """Collector and loader of the media in messages.

    model: the model's media capabilities; None for a text-only model. options: limits.
    """

    def __init__(self, model: MediaModel | None, options: MediaOptions):
        self._model = model
        self._options = options

    @cached_property
    def loader(self) -> MediaLoader:
        """Return the thread pools, started on first use."""
        return MediaLoader(self._options)

    @property
    def placeholder(self) -> Callable[[str], str] | None:
        """Return the function from a modality to the text that stands for an item in chat templates that take only
        text; None for a text-only model.
        """
        return None if self._model is None else self._model.placeholder

    def collect(self, messages: Any) -> tuple[Any, list[MediaPart]]:
        """Take media out of chat messages; returns (messages for a chat template, media in order), as
        parts.collect_media. Raises RequestError.
        """
        return collect_media(messages, self._model, self._options)

    def read(self, messages: Any) -> tuple[Any, MultiModalData]:
        """Return messages for a chat template, and the loaded images and videos that they contained.

        Blocks until they are loaded, which may take seconds. Raises RequestError as `collect` and load_now do.
        """
        messages, parts = self.collect(messages)
        return messages, self.loader.load_now(parts) if parts else {}
