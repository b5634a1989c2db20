"""Processor of BLIP-2: images are stretched to one square, and begin a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.llava import LlavaProcessor
from jaxengine.media.processors.settings import CLIP_MEAN, CLIP_STD


class Blip2Processor(LlavaProcessor):
    """Processor of Blip2ForConditionalGeneration."""

    defaults = {
        "resample": 3,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "size": {"height": 384, "width": 384},
    }

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings, and store the model's bos_token_id, which may be None. Raises
        ModelConfigError or ModelFileError for missing or invalid ones.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        self._bos: int | None = model_config.bos_token_id

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the expanded prompt. Images for which it has no placeholder at all come before it; a
        beginning-of-sequence token before placeholders comes after them, as in transformers.

        Raises RequestError for another number of items than placeholders, unless there are none.
        """
        found, image = list(token_ids), self.image_id
        if image not in found:
            found = [image] * len(items.get("image", ())) + found
        elif found[0] == self._bos:
            first = next((index for index, token in enumerate(found[1:]) if token != image), len(found) - 1)
            found = [*found[1 : 1 + first], found[0], *found[1 + first :]]
        return super().expand(found, items)

    def _cut(self, units: Sequence[np.ndarray]) -> np.ndarray:
        """Return the patches of units as the base class does, with zeros after each unit's up to the tower's `unit`:
        f32[units * unit, features].
        """
        patches = super()._cut(units).reshape(len(units), -1, self.tower.num_features)
        return np.pad(patches, ((0, 0), (0, self.tower.unit - patches.shape[1]), (0, 0))).reshape(-1, patches.shape[2])
