"""Conversations with pictures, for one model: found, named, counted, loaded.

Puts together parts, which reads messages, and load, which reads files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from jaxengine.config.multimodal import MediaOptions
from jaxengine.media.load import MediaLoader, MultiModalData
from jaxengine.media.parts import MediaModel, MediaPart, collect_media


class MediaReader:
    """model: what takes pictures or videos, None for a model of text alone; options: what is allowed."""

    def __init__(self, model: MediaModel | None, options: MediaOptions):
        self._model = model
        self._options = options

    @cached_property
    def loader(self) -> MediaLoader:
        """Its threads, which there are once there is something to load."""
        return MediaLoader(self._options)

    @property
    def placeholder(self) -> Callable[[str], str] | None:
        """The text that stands for a picture or a video where a chat template takes texts only."""
        return None if self._model is None else self._model.placeholder

    def collect(self, messages: Any) -> tuple[Any, list[MediaPart]]:
        """As parts.collect_media. Raises RequestError."""
        return collect_media(messages, self._model, self._options)

    def read(self, messages: Any) -> tuple[Any, MultiModalData]:
        """Messages for a chat template, and the pictures and videos that were in them, loaded.

        Blocks until they are, which may be seconds. Raises RequestError.
        """
        messages, parts = self.collect(messages)
        return messages, self.loader.load_now(parts) if parts else {}
