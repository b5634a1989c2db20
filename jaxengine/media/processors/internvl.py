"""Processor of InternVL: images are resized to the tiling of the nearest aspect ratio, and the whole image, scaled
down, follows the tiles. Frames of videos are resized to one tile each, and numbered in the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.settings import token_text
from jaxengine.media.processors.text_placeholder import TextPlaceholderProcessor
from jaxengine.media.processors.tiles import TilesProcessor
from jaxengine.media.processors.units import FrameUnits, UnitProcessor
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.params.files import read_object


class InternVLProcessor(FrameUnits, TilesProcessor):
    """Processor of InternVLForConditionalGeneration. It ignores crop_to_patches in the checkpoint's file, as
    transformers' does.
    """

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings and the start, end and video tokens (start_image_token, end_image_token and
        video_token of tokenizer_config.json, with defaults). Videos are only taken if their placeholder is one token
        and their frames are squares of the tower. Raises ModelConfigError or ModelFileError for missing or invalid
        settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        named, path = read_object(folder, "tokenizer_config.json") or {}, Path(folder) / "tokenizer_config.json"
        names = ("start_image_token", "<img>"), ("end_image_token", "</img>"), ("video_token", "<video>")
        texts = (token_text(path, named, *name) for name in names)
        self.start, self.end, video = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        self.video_id = video[0]
        if len(video) != 1 or not self.reads_frames(Path(folder)):
            self.modalities = ("image",)

    def placeholder_id_of(self, modality: str) -> int:
        """Return the token that stands for an image, of config.json, or for a video, of the tokenizer."""
        return self.video_id if modality == "video" else self.placeholder_id()

    def video_pieces(self, item: Processed) -> list[int]:
        """Return the tokens of a video (`item`): for each frame its number, and its placeholders between the start and
        end tokens.
        """
        each = self.tower.unit // self.tower.merge
        pieces = []
        for frame in range(item.num_rows // each):
            text = f"\nFrame{frame + 1}: " if frame else "Frame1: "
            number = self.tokenizer.encode(text, add_special_tokens=False)
            pieces += [*number, *self.start, *[self.image_id] * each, *self.end]
        return pieces


class InternVLChatProcessor(InternVLProcessor, TextPlaceholderProcessor):
    """Processor of InternVLChatModel, whose config.json has the limits of tiles. In a prompt, the text <image>, which
    need not be a token, or the token <IMG_CONTEXT> stands for an image.
    """

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        super().__init__(folder, config_json, model_config, tokenizer)
        self.place_text(Path(folder), "the tokenizer's <image>", "<image>")

    def placeholder(self, modality: str) -> str:
        """Return the text that stands for an image or a video."""
        return super().placeholder(modality) if modality == "image" else UnitProcessor.placeholder(self, modality)

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set from config.json the limits of tiles, min_dynamic_patch (1 by default) and max_dynamic_patch
        (6), whether images are cut, dynamic_image_size, and whether the whole image follows the tiles, use_thumbnail,
        both False by default.

        Raises ModelConfigError for limits out of range, and for a force_image_size other than the tower's.
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
        return context_id(self.tokenizer)


def context_id(tokenizer: Any) -> int:
    """Return the tokenizer's token <IMG_CONTEXT>. Raises ModelConfigError if it has none."""
    tokens = tokenizer.encode("<IMG_CONTEXT>", add_special_tokens=False)
    if len(tokens) != 1:
        raise ModelConfigError("the tokenizer must have the token <IMG_CONTEXT>")
    return tokens[0]


def internvl(folder: Path, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any) -> InternVLProcessor:
    """Return the processor of an InternVL checkpoint, in transformers' form or in that of its first publication.

    Arguments and errors are those of UnitProcessor.
    """
    kind = InternVLChatProcessor if "llm_config" in config_json else InternVLProcessor
    return kind(folder, config_json, model_config, tokenizer)
