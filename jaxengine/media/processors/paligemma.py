"""PaliGemma's processor: images are stretched to one square, and begin a prompt that ends with a line break."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.llava import LlavaProcessor

_STANDARD, _BICUBIC = (0.5, 0.5, 0.5), 3


class PaliGemmaProcessor(LlavaProcessor):
    """Processor of PaliGemmaForConditionalGeneration and PaliGemma2ForConditionalGeneration."""

    defaults = {
        "resample": _BICUBIC,
        "image_mean": _STANDARD,
        "image_std": _STANDARD,
        "size": {"height": 224, "width": 224},
    }
    needs_tokenizer = True

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        super().__init__(folder, config_json, model_config, tokenizer)
        self._bos: int = model_config.bos_token_id
        self._newline = tokenizer.encode("\n", add_special_tokens=False)

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Expand the prompt as UnitProcessor does, with the beginning-of-sequence token behind the last image, and not
        before the first, and a line break at the end.
        """
        found = list(token_ids)
        if self.image_id in found:
            if found[0] == self._bos:
                del found[0]
            behind = len(found) - found[::-1].index(self.image_id)
            if found[behind : behind + 1] != [self._bos]:
                found.insert(behind, self._bos)
            if found[-len(self._newline) :] != self._newline:
                found += self._newline
        return super().expand(found, items)
