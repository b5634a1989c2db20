"""Processor of PaliGemma: images are stretched to one square, and begin a prompt that ends with a line break."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.llava import SIGLIP, LlavaProcessor
from jaxengine.models.config.fields import ModelConfigError


class PaliGemmaProcessor(LlavaProcessor):
    """Processor of PaliGemmaForConditionalGeneration."""

    defaults = SIGLIP
    needs_tokenizer = True

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings, and store the model's bos_token_id. Raises ModelConfigError for a model
        without bos_token_id, ModelConfigError or ModelFileError for missing or invalid settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        if model_config.bos_token_id is None:
            raise ModelConfigError("bos_token_id must be a token id, which follows images, got null")
        self._bos: int = model_config.bos_token_id

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the expanded prompt, with a beginning-of-sequence token after the last image instead of one at the
        start, and another line break at the end, merged with those of the prompt. A prompt without images is returned
        unchanged.

        Raises RequestError for another number of items than placeholders.
        """
        found = list(token_ids)
        if self.image_id in found:
            if found[0] == self._bos:
                del found[0]
            behind = len(found) - found[::-1].index(self.image_id)
            found.insert(behind, self._bos)
            texts, end, breaks = self.tokenizer.convert_ids_to_tokens(found), len(found), 1
            while end > behind + 1 and texts[end - 1] and not texts[end - 1].strip("\n"):
                end -= 1
                breaks += len(texts[end])
            found[end:] = self.tokenizer.encode("\n" * breaks, add_special_tokens=False)
        return super().expand(found, items)
