"""Processor of NVLM-D: InternVL's for images alone, with a text before the embeddings of each tile, which says its
number or that it is the whole image.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.internvl import InternVLChatProcessor
from jaxengine.media.processors.settings import IMAGENET_MEAN, IMAGENET_STD
from jaxengine.models.config.fields import ConfigFields, ModelConfigError

_CONTEXT = "<|vision_pad|>"
_START, _END, _WHOLE = "<Image>", "</Image>", "<tile_global_thumbnail>"


class NvlmDProcessor(InternVLChatProcessor):
    """Processor of NVLM_D."""

    # The published code has them, and the checkpoint need not have a file of settings.
    defaults: ClassVar[Mapping[str, Any]] = {
        **InternVLChatProcessor.defaults,
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
    }
    needs_settings = False
    most_given = 1  # the texts of further tiles would be unknown

    def reads_frames(self, folder: Path) -> bool:
        """Return False: videos are not supported. folder: not used."""
        del folder
        return False

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limits of tiles from config.json. Raises the errors of InternVLChatProcessor.read_settings,
        and ModelConfigError for a use_thumbnail other than true: tiles have texts up to the whole image's.
        """
        if not self.config_fields.boolean("use_thumbnail", False):
            raise self.config_fields.fail("use_thumbnail", "true")
        super().read_settings(fields)

    def placeholder_id(self) -> int:
        tokens = self.ids(_CONTEXT)
        if len(tokens) != 1:
            raise ModelConfigError(f"the tokenizer must have the token {_CONTEXT}")
        return tokens[0]

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`): the placeholders of each tile after its text, all between a start and
        an end.
        """
        each = self.tower.unit // self.tower.merge
        count = item.num_rows // each
        texts = [*(f"<tile_{number}>" for number in range(1, count)), _WHOLE]
        texts[0] = _START + texts[0]
        return [*(token for text in texts for token in (*self.ids(text), *[self.image_id] * each)), *self.ids(_END)]
