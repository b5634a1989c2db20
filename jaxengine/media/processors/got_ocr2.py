"""GOT-OCR 2.0's processor: InternVL's for images alone, each stretched to one square unless tiles are requested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxengine.media.processor import Processed
from jaxengine.media.processors.internvl import InternVLProcessor
from jaxengine.media.processors.units import UnitProcessor


class GotOcr2Processor(InternVLProcessor):
    """Processor of GotOcr2ForConditionalGeneration."""

    modalities: tuple[str, ...] = ("image",)
    needs_tokenizer = False
    crops = False

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        # Nothing stands around an image's tokens but what the prompt has.
        UnitProcessor.__init__(self, folder, config_json, model_config, tokenizer)

    def placeholder_id(self) -> int:
        """Return image_token_index of config.json, or else image_token_id. Raises ModelConfigError as `token_id`."""
        return self.token_id("image_token_index", "image_token_id")

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`): the placeholder once for each embedding."""
        return [self.image_id] * item.num_rows
