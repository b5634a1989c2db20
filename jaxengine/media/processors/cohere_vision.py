"""Processors of Aya Vision and Command A Vision: images are cut into tiles, which the whole image, scaled down,
follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.settings import WHOLE, switch, token_text, token_texts
from jaxengine.media.processors.text_placeholder import TextPlaceholderProcessor
from jaxengine.media.processors.tiles import TilesProcessor, tilings
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.params.files import read_object

_START, _END, _BREAK = "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"
# Fields of processor_config.json with texts in Aya's prompts, and transformers' texts of them.
_AYA = {
    "image_token": "<image>",
    "start_of_img_token": _START,
    "end_of_img_token": _END,
    "tile_token": "TILE",
    "tile_global_token": "TILE_GLOBAL",
}


class AyaVisionProcessor(TextPlaceholderProcessor):
    """Processor of AyaVisionForConditionalGeneration: each tile follows its numbered name. In a prompt the text <image>
    stands for an image; it need not be a token.
    """

    token_names = ("image_token_index", "image_token_id")

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings, and from processor_config.json the placeholder of images and the texts around
        tiles, fields with the defaults of _AYA. Raises ModelConfigError or ModelFileError for missing or invalid
        settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        path, named = Path(folder) / WHOLE, read_object(folder, WHOLE) or {}
        self._texts = {name: token_text(path, named, name, usual) for name, usual in _AYA.items()}
        self.place_text(path, "image_token", self._texts["image_token"])

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`): the start text, each tile's and then the whole image's name and
        placeholders, and the end text.
        """
        rows = self.tower.unit // self.tower.merge
        tile, whole = self._texts["tile_token"], self._texts["tile_global_token"]
        names = [*(f"{tile}_{number}" for number in range(1, item.num_rows // rows)), whole]
        pieces = [token for name in names for token in (*self.ids(name), *[self.image_id] * rows)]
        start, end = self._texts["start_of_img_token"], self._texts["end_of_img_token"]
        return [*self.ids(start), *pieces, *self.ids(end)]


class Cohere2VisionProcessor(TilesProcessor):
    """Processor of Cohere2VisionForConditionalGeneration: a line break follows each tile and the whole image."""

    defaults = {**TilesProcessor.defaults, "size": {"height": 512, "width": 512}}

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings, and tokenize the start, line break and end texts: boi_token,
        img_line_break_token and eoi_token of tokenizer_config.json. Raises ModelConfigError or ModelFileError for
        missing or invalid settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        texts = token_texts(folder, boi_token=_START, img_line_break_token=_BREAK, eoi_token=_END)
        self._start, self._break, self._end = map(self.ids, texts)

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limits of tiles, and whether there are any (crop_to_patches).

        Raises ModelConfigError for limits that are not allowed, and for a `patch_size` whose square is not the number
        of a tile's embeddings.
        """
        super().read_settings(fields)
        self.crops = switch(fields, "crop_to_patches")
        rows = self.tower.unit // self.tower.merge
        if fields.integer("patch_size", 16) ** 2 != rows:
            raise fields.fail(
                "patch_size", f"the side of the square of {rows} embeddings that the tower makes of a tile"
            )

    def tiling(self, height: int, width: int, least: int, most: int) -> tuple[int, int]:
        """Return the (rows, columns) of at most `most` tiles that enlarges the image least; where all shrink it, the
        one that shrinks it least; of equal ones the first of `tilings`.

        height, width: size of the image in pixels. `least` is ignored, as in transformers.
        """
        best, score = (1, 1), (False, 0.0)
        for rows, columns in tilings(1, most):
            scale = min(self.side * columns / width, self.side * rows / height)
            found = (scale >= 1, -scale if scale >= 1 else scale)
            if found > score:
                best, score = (rows, columns), found
        return best

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`): placeholders and a line break for each tile and the whole image,
        between the start and end tokens.
        """
        rows = self.tower.unit // self.tower.merge
        lines = [*[self.image_id] * rows, *self._break] * (item.num_rows // rows)
        return [*self._start, *lines, *self._end]
