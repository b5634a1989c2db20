"""Processors of Eagle 2.5 and of Llama Nemotron Embed VL: images are resized to the tiling that suits their ratio and
size best, and the whole image, scaled down, follows the tiles.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.internvl import context_id
from jaxengine.media.processors.settings import WHOLE, Pixels
from jaxengine.media.processors.text_placeholder import TextPlaceholderProcessor, with_one_token
from jaxengine.media.processors.tiles import largest_share, tilings
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.params.files import read_object
from jaxengine.scheduler.base.errors import RequestError

_HALF = [0.5] * 3
# What the published chat template writes for an image, and what a user may write.
_WRITTEN = re.compile(r"<image(?:-\d+)?>")
_NUMBERED = re.compile(r"<image-(\d+)>")


class EagleTiles(TextPlaceholderProcessor):
    """Base of this module's processors: of images alone, for which the text <image> stands in prompts."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **TextPlaceholderProcessor.defaults,
        "image_mean": _HALF,
        "image_std": _HALF,
    }

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and set <image> as the placeholder text of images. Raises ModelConfigError
        for a missing or invalid token of images, ModelFileError for missing or invalid settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        self.place_text(Path(folder), "the tokenizer's <image>", "<image>")
        self.start, self.end = self.ids("<img>"), self.ids("</img>")

    def placeholder_id(self) -> int:
        """Return the token of images that config.json has, or else the token <IMG_CONTEXT>. Raises ModelConfigError as
        `token_id` and `context_id`.
        """
        names = "image_token_index", "image_token_id", "img_context_token_id"
        has_id = any(self.config_fields.has(name) for name in names)
        return self.token_id(*names) if has_id else context_id(self.tokenizer)

    def tiling(self, height: int, width: int, least: int, most: int) -> tuple[int, int]:
        """Return the (rows, columns) of tiles that `largest_share` chooses for an image of height x width pixels.
        least, most: limits of the number of tiles.
        """
        return largest_share(height, width, self.side, tilings(least, most, self.most_lines))


class EagleProcessor(EagleTiles):
    """Processor of Eagle2_5_VLForConditionalGeneration. The published chat template writes <image-1>, <image-2> and so
    on for images, in whose places their numbers stand before their embeddings.
    """

    def read_pixels(self, fields: ConfigFields) -> Pixels:
        """Return the pixel transform, whatever do_resize says: it is about tiles, which have their size already. Raises
        ModelConfigError for invalid settings, and for tiles that are cropped or have margins.
        """
        fields.require(do_center_crop=False, pad_during_tiling=False)
        return Pixels.read(ConfigFields({**fields.raw, "do_resize": True}))

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limits of tiles, min_dynamic_tiles and max_dynamic_tiles (else those of the base class), and
        whether the whole image follows them (use_thumbnail, by default True). Raises ModelConfigError for a size other
        than the tower's, and for limits out of range.
        """
        names = {"min_patches": "min_dynamic_tiles", "max_patches": "max_dynamic_tiles"}
        limits = {ours: fields.value(theirs) for ours, theirs in names.items() if fields.has(theirs)}
        super().read_settings(ConfigFields({**fields.raw, **limits}))
        self.adds_whole = fields.boolean("use_thumbnail", True)

    def encode(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt `text`, with image_id for each placeholder text.

        token_ids: token ids of the whole text (see `with_one_token`). Raises RequestError for numbers of images that
        are not 1, 2, ... in this order.
        """
        numbers = [int(number) for number in _NUMBERED.findall(text)]
        if numbers != list(range(1, len(numbers) + 1)):
            problem = f"the prompt numbers its images {numbers[:20]}; allowed: 1, 2, ... in this order"
            raise RequestError(problem, param="prompt")
        return with_one_token(text, token_ids, _WRITTEN, self.image_id, self.tokenizer)

    def pieces_of(self, modality: str, item: Processed, number: int) -> list[int]:
        """Return the tokens of an image: its number in a text, and those of `pieces`. number: from 0."""
        return [*self.ids(f"<image {number + 1}>"), *super().pieces_of(modality, item, number)]


class NemotronEmbedProcessor(EagleTiles):
    """Processor of LlamaNemotronVLModel and LlamaNemotronVLForSequenceClassification, whose limits of tiles are in the
    file of the whole processor, or in config.json.
    """

    needs_settings = False
    _whole: ConfigFields

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        self._whole = ConfigFields(read_object(Path(folder), WHOLE) or {})
        super().__init__(folder, config_json, model_config, tokenizer)

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limits of tiles, min_input_tiles and max_input_tiles of the whole processor's file, else
        min_dynamic_patch and max_dynamic_patch of config.json, by default 1, and whether images are cut,
        dynamic_image_size of either, by default True. Raises ModelConfigError for limits out of range, and for a
        force_image_size of config.json other than the tower's.
        """
        own, outer = self._whole, self.config_fields
        if outer.integer("force_image_size", self.side) != self.side:
            raise outer.fail("force_image_size", f"{self.side}, the tower's image_size")
        limits = {
            "size": {"height": self.side, "width": self.side},
            "min_patches": own.integer("min_input_tiles", outer.integer("min_dynamic_patch", 1)),
            "max_patches": own.integer("max_input_tiles", outer.integer("max_dynamic_patch", 1)),
        }
        super().read_settings(ConfigFields({**fields.raw, **limits}))
        self.crops = own.boolean("dynamic_image_size", outer.boolean("dynamic_image_size", True))


def eagle2_5(folder: Path, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any) -> EagleTiles:
    """Return the processor of a checkpoint with Eagle 2.5's tower: NemotronEmbedProcessor if its config.json has
    llm_config, else EagleProcessor. Arguments and errors are those of UnitProcessor.
    """
    kind = NemotronEmbedProcessor if "llm_config" in config_json else EagleProcessor
    return kind(folder, config_json, model_config, tokenizer)
