"""Images of DeepSeek-VL and Janus: any shape within a square of one colour, tokens around them, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil

from jaxengine.models.params.errors import ModelFileError
from tests.fixtures.picture_checkpoints import picture
from tests.fixtures.unit_pictures import CASES
from tests.jaxengine.media.test_unit_processors import as_units, processor

NAME = "deepseek_vl_vision"


def test_pixels_are_those_of_transformers(tmp_path):
    """Sides that are scaled up and down, rounded to even halves, or less than min_size; colours of other means."""
    for changes in ({}, {"min_size": 1, "image_mean": [0.2, 0.5, 0.999]}, {"do_normalize": False}):
        settings = CASES[NAME]["images"] | changes
        made: Any = processor(tmp_path, NAME, **changes)
        theirs = DeepseekVLImageProcessorPil(**{name: value for name, value in settings.items() if "type" not in name})
        for size in ((24, 24), (7, 16), (16, 7), (5, 200), (200, 5), (61, 60), (9, 8), (48, 33)):
            shown = picture(3, *size)
            wanted = np.asarray(theirs(shown)["pixel_values"], np.float32)
            found = as_units(made, made.process("image", shown, {}))
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5, err_msg=f"{changes} {size}")


def test_tokens_around_an_image_of_janus(tmp_path):
    """The tokenizer's settings may name others than the usual ones; an image may be in the middle of a prompt."""
    made: Any = processor(tmp_path, "janus_vision")
    item = made.process("image", picture(1, 20, 30), {})
    expanded = made.expand([5, 127, 6, 7, 127], {"image": [item, item]})
    own = [126, *[127] * 16, 125]
    assert expanded.token_ids == [5, *own, 6, 7, *own]
    assert [each.tolist() for each in expanded.positions] == [[*range(2, 18)], [*range(22, 38)]]
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "boi_token": "w3", "eoi_token": {"content": "w4"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    model = SimpleNamespace(tower=made.tower, vocab_size=made.vocab_size)
    other: Any = type(made)(tmp_path, made.config_fields.raw, model, made.tokenizer)
    assert other.pieces(item) == [3, *[127] * 16, 4]


def test_settings_that_are_refused(tmp_path):
    for changes, message in (
        ({"size": {"height": 24, "width": 36}}, "size must be 24 by 24, the tower's image_size"),
        ({"min_size": 25}, "min_size must be at most the tower's image_size, 24, got 25"),
        ({"do_pad": False}, "do_pad must be true or absent, got False"),
        ({"do_pad": None}, "do_pad must be true or absent, got None"),
        ({"image_mean": [0.5, 0.5, 1.1]}, "image_mean must be numbers from 0 to 1, the colour around images"),
        ({"image_mean": None, "do_normalize": False}, "image_mean is missing"),
        ({"do_resize": False}, "do_resize must be true or absent"),
    ):
        with pytest.raises(ModelFileError, match=message):
            processor(tmp_path, NAME, **changes)
