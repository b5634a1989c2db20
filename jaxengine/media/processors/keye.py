"""Processors of Keye-VL: Qwen2-VL's with patches of one frame. A video is encoded as a whole, and its frames have
places in the prompt as images that follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.mrope import EmbeddingRun, mrope_positions
from jaxengine.media.processors.paddleocr_vl import PaddleOcrVLProcessor
from jaxengine.media.processors.qwen2_vl import Bounds

_BOUNDS = Bounds(28 * 28 * 4, 28 * 28 * 1280)


class KeyeProcessor(PaddleOcrVLProcessor):
    """Processor of KeyeForConditionalGeneration."""

    modalities: tuple[str, ...] = ("image", "video")
    video_tokens: ClassVar[int | None] = None
    default_bounds: ClassVar[Mapping[str, Bounds]] = {"image": _BOUNDS, "video": _BOUNDS}

    def _coordinates(self, grid: tuple[int, int, int], order: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns of GridProcessor._coordinates, but one segment for all frames, which attend to each
        other.
        """
        found = super()._coordinates(grid, order)
        return {**found, "segment": np.zeros_like(found["segment"])}

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with each placeholder repeated as often as its item has embeddings, and with M-RoPE
        positions, of which those of each frame of a video follow those of the one before.

        items: by modality, in order. Raises RequestError for another number of items than placeholders.
        """
        found, runs = super().expand(token_ids, items), list[EmbeddingRun]()
        for places, (modality, number) in zip(found.positions, found.order, strict=True):
            time, rows, columns = self.merged(items[modality][number])
            starts = int(places[0]) + rows * columns * np.arange(time)
            runs += [EmbeddingRun(int(start), (1, rows, columns), np.zeros(1, np.int64)) for start in starts]
        positions, delta = mrope_positions(len(found.token_ids), runs)
        return found._replace(rope_positions=positions, rope_delta=delta)


class KeyeImagesProcessor(KeyeProcessor):
    """Processor of KeyeVL1_5ForConditionalGeneration, for images alone: of a video some frames are smaller than others
    and timestamps are between them, which is not supported.
    """

    modalities: tuple[str, ...] = ("image",)
