"""Fetches and decodes the pictures and videos of a prompt on threads, off the event loop.

Limits how many are processed at once per process, and how many may wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image

from jaxengine.config.multimodal import IMAGE, MODALITIES, VIDEO, MediaOptions
from jaxengine.media.bounds import PixelBudget
from jaxengine.media.embeds import GivenEmbeds, given_embeds, read_embeds
from jaxengine.media.errors import MediaError
from jaxengine.media.fetch import fetch, scheme_of
from jaxengine.media.images import read_image
from jaxengine.media.parts import MediaPart
from jaxengine.media.videos import read_video
from jaxengine.scheduler.errors import OverloadedError, RequestError, show_value

# Limit of parts of all requests that wait for a thread. Each holds a file.
_MAX_WAITING = 256
MultiModalData = dict[str, list[Any]]


class MediaLoader:
    """Thread pools that fetch and decode media, one per process. Pictures are uint8 [H, W, 3], videos frames.Video."""

    def __init__(self, options: MediaOptions):
        self._options = options
        count = options.media_loading_thread_count
        self._decoders = ThreadPoolExecutor(count, "decode media")
        # Separate threads: slow hosts must not delay pictures that have arrived.
        self._fetchers = ThreadPoolExecutor(count, "fetch media")
        self._num_waiting = 0

    async def load(self, parts: Sequence[MediaPart]) -> MultiModalData:
        """Loads the parts of one prompt; returns them by modality.

        Raises RequestError for the first part that cannot be used, OverloadedError if too many parts are waiting.
        """
        if self._num_waiting and self._num_waiting + len(parts) > _MAX_WAITING:
            raise OverloadedError(f"{self._num_waiting} pictures and videos wait to be read; try again later")
        self._num_waiting += len(parts)
        loop = asyncio.get_running_loop()
        futures = self._submit(parts)
        for future in futures:
            # Counted until it has run: a caller that leaves does not stop a running thread.
            future.add_done_callback(lambda _: _on_loop(loop, self._count_done))
        try:
            return _by_modality(parts, [await asyncio.wrap_future(future) for future in futures])
        finally:
            _cancel(futures)

    def load_now(self, parts: Sequence[MediaPart]) -> MultiModalData:
        """Same as `load` for a caller without an event loop; the number of waiting parts is not limited."""
        futures = self._submit(parts)
        try:
            return _by_modality(parts, [future.result() for future in futures])
        finally:
            _cancel(futures)

    def _count_done(self) -> None:
        self._num_waiting -= 1

    def _submit(self, parts: Sequence[MediaPart]) -> list[Future[Any]]:
        budget = PixelBudget(self._options.max_media_pixels)
        return [
            self._fetchers.submit(self._fetch, part, budget)
            if isinstance(part.source, str) and scheme_of(part.source) in ("http", "https")
            else self._decoders.submit(self._read, part, part.source, budget)
            for part in parts
        ]

    def _fetch(self, part: MediaPart, budget: PixelBudget) -> Any:
        try:
            data = fetch(part.source, self._options)
        except MediaError as error:
            raise part.refusal(error) from None
        return self._decoders.submit(self._read, part, data, budget).result()

    def _read(self, part: MediaPart, source: Any, budget: PixelBudget) -> Any:
        try:
            if isinstance(source, str):
                source = fetch(source, self._options)
            if isinstance(source, GivenEmbeds):
                return read_embeds(source, self._options)
            reader = read_image if part.modality == IMAGE else read_video
            return reader(source, self._options, budget)
        except MediaError as error:
            raise part.refusal(error) from None


def read_multi_modal_data(data: Any, *, param: str = "multi_modal_data") -> list[MediaPart]:
    """Reads the pictures and videos in a prompt's multi_modal_data, {"image": one or a list, "video": one or a list}.

    Each is an address, or a value for read_image or read_video; a list of pictures under "video" is one video. An image
    may also be given as embeddings, see given_embeds.

    Raises RequestError.
    """
    if not isinstance(data, Mapping):
        raise RequestError(f"{param} must be a dict of {' and '.join(MODALITIES)}, got {show_value(data)}", param=param)
    parts: list[MediaPart] = []
    for modality, given in data.items():
        if modality not in MODALITIES:
            text = f"{param} has the key {show_value(modality)}; allowed are {' and '.join(MODALITIES)}"
            raise RequestError(text, param=param)
        is_list = isinstance(given, (list, tuple)) if modality == IMAGE else _is_videos(given)
        for number, each in enumerate(given if is_list else [] if given is None else [given]):
            where = f"{param}[{modality!r}]" + (f"[{number}]" if is_list else "")
            embeds = given_embeds(each) if modality == IMAGE else None
            parts.append(MediaPart(modality, each if embeds is None else embeds, where, param))
    return parts


def _is_videos(value: Any) -> bool:
    """Whether the value is a list of videos, rather than a list of frames of one video."""
    if not isinstance(value, list) or not value:
        return isinstance(value, list)
    first = value[0]
    return not isinstance(first, Image.Image) and not (isinstance(first, np.ndarray) and first.ndim <= 3)


def _by_modality(parts: Sequence[MediaPart], read: Sequence[Any]) -> MultiModalData:
    data: MultiModalData = {}
    for modality in (IMAGE, VIDEO):
        if found := [value for part, value in zip(parts, read, strict=True) if part.modality == modality]:
            data[modality] = found
    return data


def _cancel(futures: Sequence[Future[Any]]) -> None:
    """Cancels the parts that nobody waits for any more."""
    for future in futures:
        future.cancel()


def _on_loop(loop: asyncio.AbstractEventLoop, step: Any) -> None:
    try:
        loop.call_soon_threadsafe(step)
    except RuntimeError:  # the loop, and with it the counter, has ended
        return
