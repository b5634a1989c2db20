"""Images of Aria: squares of both sizes, crops, and what is refused. Pixels are those of transformers over Pillow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxengine.media.processors.grids import learned_places
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.params.errors import ModelFileError
from jaxengine.scheduler.base.errors import RequestError
from tests.fixtures.unit_pictures import CASES, picture
from tests.jaxengine.media.test_unit_processors import processor
from tests.tables import each_row

NAME = "aria_vision"


def patches_of(wanted: Any, patch: int) -> list[np.ndarray]:
    """The patches that have a pixel of the crop, f32[high, wide, features], of each of transformers' squares."""
    found = []
    for values, mask in zip(wanted["pixel_values"], wanted["pixel_mask"], strict=True):
        side = len(mask) // patch
        high, wide = (-(-int(mask.any(axis=axis).sum()) // patch) for axis in (1, 0))
        high, wide = min(high, side), min(wide, side)
        cut = values[:, : high * patch, : wide * patch].reshape(3, high, patch, wide, patch)
        found.append(cut.transpose(1, 3, 0, 2, 4).reshape(high, wide, -1))
    return found


@each_row(
    "index, most, splits, count",
    [(0, 980, False, 1), (1, 490, False, 1), (0, 490, True, 2), (2, 490, True, 2), (1, 980, True, 1)],
)
def test_pixels_and_places_are_those_of_transformers(index, most, splits, count, tmp_path):
    """Whole images and crops, in squares of 980 and of 490 pixels, which have 49 and 9 whole patches."""
    from transformers.models.aria.image_processing_pil_aria import AriaImageProcessorPil  # a second of every process

    made: Any = processor(tmp_path, NAME)
    theirs = AriaImageProcessorPil(**{key: value for key, value in CASES[NAME]["images"].items() if "type" not in key})
    options = {"max_image_size": most, "split_image": splits}
    item = made.process("image", picture(index), options)
    wanted = patches_of(theirs(picture(index), return_tensors="np", **options), made.patch)
    own = item.patches.reshape(-1, made.tower.unit, made.tower.num_features)
    places = item.columns.reshape(len(own), -1)
    assert len(own) == len(wanted) == count
    for patches, place, whole in zip(own, places, wanted, strict=True):
        high, wide = whole.shape[:2]
        at = (np.arange(high)[:, None] * (most // made.patch) + np.arange(wide)).ravel()
        np.testing.assert_allclose(patches[at], whole.reshape(len(at), -1), rtol=0, atol=1e-6)
        lines, columns = (learned_places(each, 7) for each in (high, wide))
        assert place[at].tolist() == (lines[:, None] * 7 + columns).ravel().tolist()
        assert np.flatnonzero(place >= 0).tolist() == at.tolist()
    queries = {490: 3, 980: 5}[most]
    assert item.num_rows == count * queries == len(made.pieces(item))
    assert item.rows[item.rows >= 0].tolist() == list(range(item.num_rows))
    assert (item.rows.reshape(count, 5)[:, queries:] == -1).all()


def test_either_field_names_the_placeholder(tmp_path):
    made: Any = processor(tmp_path, NAME)
    for said, wanted in (({"image_token_id": 7}, 7), ({"image_token_index": 8}, 8), ({}, 9)):
        made.config_fields = ConfigFields(said).with_defaults(**made.config_defaults)
        assert made.placeholder_id() == wanted


def test_what_is_refused(tmp_path):
    made: Any = processor(tmp_path, NAME)
    for options, message in (
        ({"max_image_size": 700}, "max_image_size must be 490 or 980, of whose patches config.json has a number of"),
        ({"min_image_size": 981}, "min_image_size must be an integer from 1 to 980, got '981'"),
        ({"split_image": 1}, "split_image must be true or false, got '1'"),
        ({"split_resolutions": [[490, 490]]}, "has 'split_resolutions'; this model has max_image_size"),
    ):
        with pytest.raises(RequestError, match=message):
            made.process("image", picture(0), options)
    with pytest.raises(RequestError, match="an item of image makes 100 patches of pixels; at most 99 are possible"):
        made.process("image", np.zeros((9, 99, 3), np.uint8), {"max_image_size": 490, "split_image": True}, 99)
    assert len(made.with_options({"max_image_size": 490, "split_image": True}).largest("image").patches) == 8 * 50
    assert made.grid_of(10, None) == (1, 7, 14)
    with pytest.raises(RequestError, match="embeddings of an image of this model must be a multiple of 5; .* got 7"):
        made.grid_of(7, None)
    for changes, message in (
        ({"min_image_size": 981}, "min_image_size must be at most 980 pixels"),
        ({"split_resolutions": [[490]]}, r"split_resolutions must be a list of 1 to 256 pairs \[height, width\]"),
        ({"split_resolutions": [[16384, 4900]]}, "split_resolutions must be of at most 64 squares of 980 pixels each"),
    ):
        with pytest.raises(ModelFileError, match=message):
            processor(tmp_path, NAME, **changes)
