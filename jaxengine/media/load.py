"""Fetches, decodes and preprocesses the images, videos and sounds of a prompt on threads, off the event loop.

Limits how many are processed at once per process, and how many may wait. Clients take turns (turns.py): none of them
has more than half of the threads or of the waiting parts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from jaxengine.config.inputs.multimodal import AUDIO, IMAGE, MODALITIES, VIDEO, MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.base.samples import RATE
from jaxengine.media.decoding.bounds import PixelBudget, SecondsBudget
from jaxengine.media.decoding.images import quiet_pillow, read_image
from jaxengine.media.decoding.sounds import read_sound
from jaxengine.media.decoding.videos import read_video
from jaxengine.media.embeds import GivenEmbeds, given_embeds, read_embeds
from jaxengine.media.fetching.fetch import fetch, read_frames, scheme_of
from jaxengine.media.parts import MediaPart
from jaxengine.scheduler.base.errors import OverloadedError, RequestError, show_value
from jaxengine.turns import OWNER, FairThreads, share_of

# Limit of parts of all requests that wait for a thread. Each holds a file.
_MAX_WAITING = 256
_ALL = (*MODALITIES, AUDIO)
MultiModalData = dict[str, list[Any]]
_Budget = tuple[PixelBudget, SecondsBudget]
_T = TypeVar("_T")


class MediaLoader:
    """Thread pools that fetch, decode and preprocess media, one instance per process.

    Loaded images are uint8 [H, W, 3], videos frames.Video, and sounds samples.Sound or samples.Spectrogram.
    """

    def __init__(self, options: MediaOptions, rate: int = RATE):
        """Create the thread pools, of options.media_loading_thread_count threads each. rate: samples a second of the
        model's sounds. Silences Pillow's warnings and log, for the whole process.
        """
        quiet_pillow()
        self._options, self._rate = options, rate
        count = options.media_loading_thread_count
        self._decoders = FairThreads(count, "decode media")
        # Separate threads: slow hosts must not delay images that have arrived.
        self._fetchers = FairThreads(count, "fetch media")
        # Separate threads: preprocessing may wait for a file to be decoded.
        self._processors = FairThreads(count, "process media")
        self._num_waiting: Counter[str | None] = Counter()

    async def load(self, parts: Sequence[MediaPart]) -> MultiModalData:
        """Load the parts of one prompt; return lists of loaded items by modality, in the order of the parts, without
        empty ones.

        Embeddings become embeds.Embeds. Raises RequestError for the first part that cannot be used, OverloadedError if
        too many parts are waiting. If it fails or is cancelled, parts that have not begun are dropped.
        """
        owner = OWNER.get()
        self._check_room(owner, len(parts))
        self._num_waiting[owner] += len(parts)
        loop = asyncio.get_running_loop()
        futures = self._submit(parts)
        for future in futures:
            # Counted until it has run: cancellation does not stop a running thread.
            future.add_done_callback(lambda _: _on_loop(loop, lambda: self._count_done(owner)))
        try:
            return _by_modality(parts, [await asyncio.wrap_future(future) for future in futures])
        finally:
            _cancel(futures)

    async def process(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call `function(*args)`, which preprocesses a prompt's media, on a thread, however many calls are queued;
        return its result or raise its exception.
        """
        return await asyncio.wrap_future(self._processors.submit(function, *args))

    def load_now(self, parts: Sequence[MediaPart]) -> MultiModalData:
        """Do as `load` for a caller without an event loop: block, and let any number of parts wait. Raises RequestError
        for the first part that cannot be used.
        """
        futures = self._submit(parts)
        try:
            return _by_modality(parts, [future.result() for future in futures])
        finally:
            _cancel(futures)

    def _check_room(self, owner: str | None, count: int) -> None:
        """Raise OverloadedError if `count` more parts of a client may not wait: it has some and would exceed its share,
        or others have some, and all, each counted with at most its share, would exceed _MAX_WAITING. owner: the client;
        None for all requests without one.
        """
        own, share = self._num_waiting[owner], share_of(owner, _MAX_WAITING)
        if own and own + count > share:
            whose = "" if owner is None else " of this client"
            raise OverloadedError(f"{own} images, videos and sounds{whose} wait to be read; try again later")
        # However many parts one prompt has, a client counts with at most its share.
        others = sum(
            min(waiting, share_of(each, _MAX_WAITING)) for each, waiting in self._num_waiting.items() if each != owner
        )
        if others and others + own + min(count, share) > _MAX_WAITING:
            raise OverloadedError(f"{others + own} images, videos and sounds wait to be read; try again later")

    def _count_done(self, owner: str | None) -> None:
        """Subtract one from a client's waiting parts. owner: see `_check_room`."""
        self._num_waiting[owner] -= 1
        if not self._num_waiting[owner]:
            del self._num_waiting[owner]

    def _submit(self, parts: Sequence[MediaPart]) -> list[Future[Any]]:
        """Queue the parts of one prompt, which share its budgets, on the threads that fetch, for web addresses, or that
        decode. Return a future of each loaded item.
        """
        budget = PixelBudget(self._options.max_media_pixels), SecondsBudget(self._options.max_audio_seconds)
        return [
            self._fetchers.submit(self._fetch, part, budget)
            if isinstance(part.source, str) and scheme_of(part.source) in ("http", "https")
            else self._decoders.submit(self._read, part, part.source, budget)
            for part in parts
        ]

    def _fetch(self, part: MediaPart, budget: _Budget) -> Any:
        """Fetch the address of a part, have a decoder thread decode the content, and return the item. budget: of the
        prompt. Raises RequestError, which names the part, for media that cannot be used.
        """
        try:
            data = fetch(part.source, self._options)
        except MediaError as error:
            raise part.refusal(error) from None
        return self._decoders.submit(self._read, part, data, budget).result()

    def _read(self, part: MediaPart, source: Any, budget: _Budget) -> Any:
        """Decode a part and return the item. source: the part's source, or the bytes fetched from it; an address
        (data:, file:) is read first. budget, errors: see `_fetch`.
        """
        try:
            if isinstance(source, str):
                frames = read_frames(source, self._options.max_media_bytes) if part.modality == VIDEO else None
                source = frames or fetch(source, self._options)
            if isinstance(source, GivenEmbeds):
                return read_embeds(source, self._options)
            pixels, seconds = budget
            if part.modality == AUDIO:
                return read_sound(source, self._options, seconds, self._rate)
            reader = read_image if part.modality == IMAGE else read_video
            return reader(source, self._options, pixels)
        except MediaError as error:
            raise part.refusal(error) from None


def read_multi_modal_data(data: Any, *, param: str = "multi_modal_data") -> list[MediaPart]:
    """Return the media in a prompt's multi_modal_data, {"image": one or a list, "video": one or a list, "audio": one or
    a list}, as parts.

    Each is an address, or a value for read_image, read_video or read_sound; a list of images under "video" is one
    video. An image may also be given as embeddings, see given_embeds. A value of None gives no part. param: field of
    the request that contains `data`, for errors. Raises RequestError for other keys, and for anything but a dict.
    """
    if not isinstance(data, Mapping):
        raise RequestError(f"{param} must be a dict of {', '.join(_ALL)}, got {show_value(data)}", param=param)
    parts: list[MediaPart] = []
    for modality, given in data.items():
        if modality not in _ALL:
            text = f"{param} has the key {show_value(modality)}; allowed: {', '.join(_ALL)}"
            raise RequestError(text, param=param)
        is_list = _IS_LIST[modality](given)
        for number, each in enumerate(given if is_list else [] if given is None else [given]):
            where = f"{param}[{modality!r}]" + (f"[{number}]" if is_list else "")
            embeds = given_embeds(each) if modality == IMAGE else None
            parts.append(MediaPart(modality, each if embeds is None else embeds, where, param))
    return parts


def _is_images(value: Any) -> bool:
    """Whether the value is a list or tuple, and so of images, rather than one image."""
    return isinstance(value, (list, tuple))


def _is_sounds(value: Any) -> bool:
    """Whether the value is a list of sounds (also an empty list), rather than a list of samples."""
    return isinstance(value, list) and not (value and isinstance(value[0], (int, float)))


def _is_videos(value: Any) -> bool:
    """Whether the value is a list of videos (also an empty list), rather than a list of frames of one video."""
    if not isinstance(value, list) or not value:
        return isinstance(value, list)
    first = value[0]
    return not isinstance(first, Image.Image) and not (isinstance(first, np.ndarray) and first.ndim <= 3)


_IS_LIST: dict[str, Callable[[Any], bool]] = {IMAGE: _is_images, VIDEO: _is_videos, AUDIO: _is_sounds}


def _by_modality(parts: Sequence[MediaPart], read: Sequence[Any]) -> MultiModalData:
    """Return loaded items grouped by modality, in the order of the parts; modalities without items are left out. read:
    an item for each part.
    """
    data: MultiModalData = {}
    for modality in _ALL:
        if found := [value for part, value in zip(parts, read, strict=True) if part.modality == modality]:
            data[modality] = found
    return data


def _cancel(futures: Sequence[Future[Any]]) -> None:
    """Cancel the futures of a prompt's parts; those that run or are done are not affected."""
    for future in futures:
        future.cancel()


def _on_loop(loop: asyncio.AbstractEventLoop, step: Any) -> None:
    """Have an event loop call `step` from its own thread; do nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(step)
    except RuntimeError:  # the loop, and with it the counter, has ended
        return
