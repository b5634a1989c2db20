"""Images of Idefics2: tokens around them, quarters, sizes, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxengine.models.params.errors import ModelFileError
from jaxengine.scheduler.base.errors import RequestError
from tests.fixtures.unit_pictures import picture
from tests.jaxengine.media.test_unit_processors import processor

NAME = "idefics2_vision"


def test_tokens_around_images(tmp_path, monkeypatch):
    """One between images that follow each other, and a space before text that is attached to an image."""
    made: Any = processor(tmp_path, NAME)
    item, image = made.process("image", picture(2), {}), [127] * 6
    tokens = made.expand([5, 127, 127, 6, 126, 126, 127], {"image": [item] * 3}).token_ids
    assert tokens == [5, 126, *image, 126, *image, 126, 6, 126, 126, 126, *image, 126]
    split = made.process("image", picture(2), {"do_image_splitting": True})
    assert made.expand([127], {"image": [split]}).token_ids == [126, *(image + [126]) * 5]
    texts: list[str] = []

    class Letters:
        def encode(self, text: str, **_: Any) -> list[int]:
            texts.append(text)
            return [*text.encode()]

        def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
            return ["<image>" for _ in token_ids]

    monkeypatch.setattr(made, "tokenizer", Letters())
    for text, spaced in (("a<image>b <image>\nc", "a<image> b <image>\nc"), ("<image><image>", "<image><image>")):
        assert made.encode(text, [9, *text.encode()]) == [9, *spaced.encode()]
    assert made.encode("<image>b", [8]) == [8]


def test_sizes_and_refusals(tmp_path):
    made: Any = processor(tmp_path, NAME)
    for size, patches in (((24, 24), 16), ((48, 24), 8), ((24, 480), 8), ((3, 5), 4)):
        item = made.process("image", np.zeros((*size, 3), np.uint8), {})
        assert (item.columns >= 0).sum() == patches and item.num_rows == 6, size
    assert len(made.with_options({"do_image_splitting": True}).largest("image").patches) == 5 * made.tower.unit
    with pytest.raises(RequestError, match=r"do_image_splitting must be false for an image of 9x1 pixels, got 'True'"):
        made.process("image", np.zeros((1, 9, 3), np.uint8), {"do_image_splitting": True})
    with pytest.raises(RequestError, match="embeddings of an image of this model must be 6, those of one tile"):
        made.grid_of(12, None)
    for size in ({"shortest_edge": 5, "longest_edge": 24}, {"shortest_edge": 13, "longest_edge": 25}):
        with pytest.raises(ModelFileError, match="size must be from 6 to 24 pixels, the tower's image_size"):
            processor(tmp_path, NAME, size=size)
