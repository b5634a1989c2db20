"""InternVL's processor: images are resized to the tiling of the nearest shape, and added as a whole. Frames of videos
are resized to one tile each, and numbered in the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.frames import LARGEST_FRAMES
from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.settings import token_text
from jaxengine.media.processors.tiles import TilesProcessor
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.params.files import read_object


class InternVLProcessor(TilesProcessor):
    """Processor of InternVLForConditionalGeneration; transformers' ignores crop_to_patches in the file, too."""

    modalities: tuple[str, ...] = ("image", "video")

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        super().__init__(folder, config_json, model_config, tokenizer)
        named, path = read_object(folder, "tokenizer_config.json") or {}, Path(folder) / "tokenizer_config.json"
        names = ("start_image_token", "<img>"), ("end_image_token", "</img>"), ("video_token", "<video>")
        texts = (token_text(path, named, *name) for name in names)
        self.start, self.end, video = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        self.video_id = video[0]
        if len(video) != 1 or not self.makes_videos_alike(Path(folder)):
            self.modalities = ("image",)

    def placeholder_id(self) -> int:
        """Return image_token_id of config.json. Raises ModelConfigError as `token_id`."""
        return self.token_id("image_token_id")

    def placeholder_id_of(self, modality: str) -> int:
        """Return the token that stands for an image or, by the tokenizer, a video."""
        return self.video_id if modality == "video" else self.placeholder_id()

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], in tiles, or a frames.Video, one tile a frame. options:
        mm_processor_kwargs; most: limit of patches. Raises RequestError for unknown options, other values, strips, and
        more patches.
        """
        if modality == "image":
            return super().process(modality, value, options, most)
        frames = self.checked_frames(modality, value, options, most)
        units = [self.pixels.resized(frame, self.side, self.side) for frame in frames]
        return self._processed(self._cut(units), 1, len(units))

    def largest(self, modality: str, size: tuple[int, int] | None = None) -> Processed:
        """Return the image with the most tiles, or one of `size`, (height, width) in pixels; of videos one of
        LARGEST_FRAMES frames, whatever the size.
        """
        if modality == "image":
            return super().largest(modality, size)
        return self.process(modality, np.zeros((LARGEST_FRAMES, self.side, self.side, 3), np.uint8), {})

    def video_pieces(self, item: Processed) -> list[int]:
        """Return the tokens of a video (`item`): each frame's number and its embeddings between marks."""
        each = self.tower.unit // self.tower.merge
        pieces = []
        for frame in range(item.num_rows // each):
            text = f"\nFrame{frame + 1}: " if frame else "Frame1: "
            number = self.tokenizer.encode(text, add_special_tokens=False)
            pieces += [*number, *self.start, *[self.image_id] * each, *self.end]
        return pieces

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`): its embeddings between two marks."""
        return [*self.start, *[self.image_id] * item.num_rows, *self.end]


class InternVLChatProcessor(InternVLProcessor):
    """Processor of InternVLChatModel, whose config.json has the limits of tiles. An image is <IMG_CONTEXT> in a prompt
    here, too, where its own code takes <image>.
    """

    def read_settings(self, fields: ConfigFields) -> None:
        """Read the limits of tiles from config.json, and whether there are any. Raises ModelConfigError for limits out
        of range, and for a force_image_size other than the tower's.
        """
        found = self.config_fields
        if found.integer("force_image_size", self.side) != self.side:
            raise found.fail("force_image_size", f"{self.side}, the tower's image_size")
        least, most = found.integer("min_dynamic_patch", 1), found.integer("max_dynamic_patch", 6)
        sizes = {"size": {"height": self.side, "width": self.side}, "min_patches": least, "max_patches": most}
        super().read_settings(ConfigFields({**fields.raw, **sizes}))
        self.crops = found.boolean("dynamic_image_size", False)
        self.adds_whole = found.boolean("use_thumbnail", False)

    def placeholder_id(self) -> int:
        """Return the token <IMG_CONTEXT>. Raises ModelConfigError if the tokenizer has none."""
        return context_id(self.tokenizer)


def context_id(tokenizer: Any) -> int:
    """Return the tokenizer's token <IMG_CONTEXT>. Raises ModelConfigError if it has none."""
    tokens = tokenizer.encode("<IMG_CONTEXT>", add_special_tokens=False)
    if len(tokens) != 1:
        raise ModelConfigError("the tokenizer must have the token <IMG_CONTEXT>")
    return tokens[0]


def internvl(folder: Path, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any) -> InternVLProcessor:
    """Return the processor of an InternVL checkpoint, as transformers stores it or as it was published first. Arguments
    and errors are those of UnitProcessor.
    """
    kind = InternVLChatProcessor if "llm_config" in config_json else InternVLProcessor
    return kind(folder, config_json, model_config, tokenizer)
