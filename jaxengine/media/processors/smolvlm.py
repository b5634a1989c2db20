"""Processor of SmolVLM: Idefics3's for images, and for videos each frame as one square.

The prompt states the number of frames, the duration of the video, and the time of each frame as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.idefics3 import Idefics3Processor, with_longest_edge
from jaxengine.media.processors.settings import IMAGES, VIDEOS, Pixels, check_seconds, read_settings, shown_at
from jaxengine.media.processors.units import check_placeholders, read_size
from jaxengine.models.config.fields import ConfigFields, ModelConfigError

_VIDEO = "<video>"
_INTRO = "You are provided the following series of {count} frames from a {duration} [H:MM:SS] video.\n"
_FRAME, _END = "\nFrame from {minutes:02d}:{seconds:02d}:", "\n\n"
_NOTHING = np.zeros(0, np.int32)  # only the number of frames matters
_TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", *_TEENS)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class SmolVLMProcessor(Idefics3Processor):
    """Processor of SmolVLMForConditionalGeneration.

    Attributes:
      video_edge: pixels of the longer side of frames after a first scaling, before they become squares.
    """

    video_edge: int

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings. `modalities` has "video" only if the settings of videos are valid. Raises
        ModelConfigError or ModelFileError for missing or invalid settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        edge = self._read_videos(Path(folder))
        self.video_edge = edge or self.side
        self.modalities: tuple[str, ...] = ("image", "video") if edge else ("image",)
        self.settings = f"{self.settings} {edge}"

    def _read_videos(self, folder: Path) -> int | None:
        """Read the settings of videos in the checkpoint's folder, set `of_frames`, and return video_edge: longest_edge
        of video_sampling's video_size, or else of `size`.

        None if they are invalid, or frames are no squares of the tower: such videos are not supported.
        Raises ModelFileError if the folder has no settings.
        """
        _, found = read_settings(folder, VIDEOS, IMAGES)
        fields = found.with_defaults(**self.defaults)
        # transformers 4 has one file for both modalities, with the video's size here.
        sampling = found.raw.get("video_sampling")
        size = sampling.get("video_size") if isinstance(sampling, Mapping) else None
        try:
            if size is not None:
                fields = ConfigFields({**fields.raw, "size": size})
            self.set_frames(copy(self), Pixels.read(fields))
            square = read_size(fields, "max_image_size", ("longest_edge",))["longest_edge"] == self.side
            return read_size(fields, "size", ("longest_edge",))["longest_edge"] if square else None
        except ModelConfigError:
            return None

    @property
    def in_tokens(self) -> tuple[str, ...]:
        """Modalities whose placeholder is one token: only images."""
        return ("image",)

    def placeholder(self, modality: str) -> str:
        """Return the text that stands for an item: <video> for a video, for an image the placeholder token's."""
        return _VIDEO if modality == "video" else super().placeholder(modality)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], in tiles, or a frames.Video, one square per frame, with their times.

        options: mm_processor_kwargs. most: limit of patches, if any. Raises RequestError for unknown options, other
        values, extreme aspect ratios, more patches, and too long a video.
        """
        if modality == "image":
            return super().process(modality, value, options, most)
        frames = self.checked_frames(modality, value, options, most)
        size = with_longest_edge(frames.shape[1], frames.shape[2], self.edge(options, self.video_edge))
        resize = self.of_frames.pixels.resized
        units = [resize(resize(frame, *size), self.side, self.side) for frame in frames]
        return self._processed(self.of_frames._cut(units), 1, len(units))._replace(seconds=_times(value, len(units)))

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with its placeholders expanded for its items, given by modality in order. With videos, the
        prompt's text is tokenized again.

        Without videos `<video>` is an ordinary word. Raises RequestError for another number of items than placeholders.
        """
        pictures, videos = items.get("image", ()), items.get("video", ())
        if not videos:
            return super().expand(token_ids, {"image": pictures})
        text, image = self.tokenizer.decode(token_ids, skip_special_tokens=False), self.placeholder("image")
        texts = text.split(_VIDEO)
        check_placeholders("image", image, text.count(image), len(pictures))
        check_placeholders("video", _VIDEO, len(texts) - 1, len(videos))
        each, side = self.tower.unit // self.tower.merge, self.side // self.patch
        frame = Processed(_NOTHING, _NOTHING, _NOTHING, each, (1, side, side))
        whole, left = "", iter(enumerate(pictures))
        shown: list[Processed] = []  # the item of each image placeholder
        owners: list[tuple[str, int]] = []  # the modality and number of that item
        for number, before in enumerate(texts):
            for index, item in islice(left, before.count(image)):
                shown.append(item)
                owners.append(("image", index))
            whole += before
            if number < len(videos):
                count = videos[number].num_rows // each
                shown += [frame] * count
                owners += [("video", number)] * count
                whole += _described(videos[number], image)
        found = super().expand(self.tokenizer.encode(whole, add_special_tokens=False), {"image": shown})
        positions: dict[tuple[str, int], list[np.ndarray]] = {}
        for owner, own in zip(owners, found.positions, strict=True):
            positions.setdefault(owner, []).append(own)
        return Expanded(found.token_ids, [np.concatenate(own) for own in positions.values()], list(positions))


def _times(video: Any, count: int) -> tuple[float, ...]:
    """Return the times of the `count` frames of a video, followed by its duration, all in seconds.

    video: frames.Video, or only the frames. Without fps, UNKNOWN_FPS frames per second are assumed, and the duration is
    the last frame's time. Raises RequestError for times that `check_seconds` refuses.
    """
    fps, times = getattr(video, "fps", None), shown_at(video, count).tolist()
    seconds = (*times, times[-1] if fps is None else video.total_num_frames / fps)
    check_seconds(seconds)
    return seconds


def _described(video: Processed, image: str) -> str:
    """Return the text that represents a video in a prompt, with the placeholder `image` for each frame: the number of
    frames in words and the duration, then each frame's minutes and seconds before its placeholder.
    """
    *times, seconds = video.seconds
    parts = [_INTRO.format(count=in_words(len(times)), duration=timedelta(seconds=int(seconds)))]
    parts += [_FRAME.format(minutes=int(time // 60), seconds=int(time % 60)) + image for time in times]
    return "".join(parts) + _END


def in_words(number: int) -> str:
    """Return a number from 0 to 999,999 in English words, as num2words writes it."""
    if number >= 1000:
        thousands, rest = divmod(number, 1000)
        said = f"{in_words(thousands)} thousand"
        return said + (f"{', ' if rest >= 100 else ' and '}{in_words(rest)}" if rest else "")
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        return f"{_ONES[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
    if number < 20:
        return _ONES[number]
    return _TENS[number // 10 - 2] + (f"-{_ONES[number % 10]}" if number % 10 else "")
