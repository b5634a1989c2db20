"""Pages of Granite Docling: their tiles and the tokens around these, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.models.granite_docling.image_processing_pil_granite_docling import GraniteDoclingImageProcessorPil

from jaxengine.models.params.errors import ModelFileError
from jaxengine.scheduler.base.errors import RequestError
from tests.fixtures.picture_checkpoints import picture
from tests.fixtures.unit_pictures import CASES
from tests.jaxengine.media.test_unit_processors import as_units, processor

NAME = "granite_docling_vision"


def test_tiles_are_those_of_transformers(tmp_path):
    """Pages that are cut or not, small and large, and those that dense limits give more tiles."""
    for changes in (
        {},
        {"max_patches": 32},
        {"crop_to_patches": False},
        {"max_patches": 2, "dense_max_patches": 4, "dense_min_aspect": 1.2, "dense_max_aspect": 3.0},
        {"max_patches": 2, "dense_max_patches": 6, "dense_max_scale": 0.5},
    ):
        settings = CASES[NAME]["images"] | changes
        made: Any = processor(tmp_path, NAME, **changes)
        theirs = GraniteDoclingImageProcessorPil(**{key: value for key, value in settings.items() if "type" not in key})
        for size in ((24, 24), (7, 16), (60, 100), (100, 33), (5, 200), (30, 90)):
            shown = picture(3, *size)
            wanted = np.asarray(theirs(shown)["pixel_values"][0], np.float32)
            item = made.process("image", shown, {})
            found = as_units(made, item)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5, err_msg=f"{changes} {size}")
            assert len(item.patches) <= len(made.largest("image").patches)


def test_tokens_of_a_page(tmp_path):
    """One tile has a row and a column too; a page's last line break joins one of the prompt."""
    made: Any = processor(tmp_path, NAME)
    one, two = (made.process("image", picture(1, *size), {}) for size in ((24, 24), (24, 48)))
    tile, embeddings = [126, 101], [127] * 4
    assert made.expand([5, 127, 6], {"image": [one]}).token_ids == [5, *tile, *embeddings, 124, 6]
    assert made.expand([127, 124, 6], {"image": [one]}).token_ids == [*tile, *embeddings, 123, 6]
    lines = [*tile, *embeddings, 126, 102, *embeddings, 123, 126, 125, *embeddings, 126]
    assert made.expand([127, 6], {"image": [two]}).token_ids == [*lines, 6]


def test_refused(tmp_path):
    for changes, message in (
        ({"fine_route": True}, "fine_route must be false or absent, got True"),
        ({"dense_max_patches": 65}, "dense_max_patches must be an integer from 0 to 64, got 65"),
        ({"dense_min_aspect": -1}, "dense_min_aspect must be a finite number > 0"),
    ):
        with pytest.raises(ModelFileError, match=message):
            processor(tmp_path, NAME, **changes)
    with pytest.raises(RequestError, match="mm_processor_kwargs has 'fine_route'; this model has"):
        processor(tmp_path, NAME).process("image", picture(0, 24, 24), {"fine_route": True})


def test_images_of_blip2_begin_a_prompt(tmp_path):
    """Placeholders are optional; the token that begins sequences comes after them."""
    made: Any = processor(tmp_path, "blip2_vision")
    item = made.process("image", picture(1, 20, 30), {})
    own = [127] * 4
    for prompt, count, wanted in (
        ([2, 5, 6], 1, [*own, 2, 5, 6]),
        ([2, 5, 6], 0, [2, 5, 6]),
        ([2, 127, 5], 1, [*own, 2, 5]),
        ([2, 127, 127], 2, [*own, *own, 2]),
        ([2, 5, 127, 6], 1, [2, 5, *own, 6]),
        ([127, 5], 1, [*own, 5]),
    ):
        assert made.expand(prompt, {"image": [item] * count}).token_ids == wanted, prompt
    with pytest.raises(RequestError, match="the prompt has 1 of the placeholder '<image>', and 2 images are given"):
        made.expand([2, 127], {"image": [item] * 2})
