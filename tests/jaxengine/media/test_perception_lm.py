"""PerceptionLM: tilings, settings and options, and what is refused. Pixels and logits are
recorded (tests/models/families/test_unit_pictures.py).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_hf
from jaxengine.scheduler.base.errors import RequestError
from scripts.model_names import read_names
from tests.fixtures.drawn_weights import FOLDER
from tests.jaxengine.media.test_unit_processors import processor

NAME = "perception_lm_vision"
RAW: Any = json.loads((FOLDER / NAME / "config.json").read_text())


def test_tilings(tmp_path):
    """They are those of transformers for images smaller than a tile, fitting a canvas, square, or larger than all."""
    made: Any = processor(tmp_path, NAME)
    for size, tiling in (
        ((5, 5), (2, 2)),
        ((24, 48), (2, 3)),
        ((30, 75), (1, 2)),
        ((90, 40), (2, 1)),
        ((11, 13), (2, 3)),
        ((144, 24), (6, 1)),
        ((7, 140), (1, 6)),
        ((500, 500), (2, 2)),
        ((1000, 700), (2, 2)),
    ):
        assert made._tiling(*size, 6) == tiling, size
        assert (
            made.num_units(*size, {})
            == 1 + tiling[0] * tiling[1]
            == len(made.units(np.zeros((*size, 3), np.uint8), {})[0])
        )


def test_settings_and_options(tmp_path):
    made: Any = processor(tmp_path, NAME)
    assert made.modalities == ("image", "video") and made.embedded_ids == (127, 126)
    image = np.zeros((24, 72, 3), np.uint8)
    for options, tiles in (({}, 3), ({"max_num_tiles": 2}, 2), ({"max_num_tiles": 1}, 1)):
        assert made.process("image", image, options).num_rows == 4 * (1 + tiles)
    assert made.largest("image").num_rows == 4 * 7
    assert made.with_options({"max_num_tiles": 3}).largest("image").num_rows == 4 * 4
    alone: Any = processor(tmp_path, NAME, vision_input_type="vanilla")
    assert alone.process("image", image, {}).num_rows == 4 == alone.largest("image").num_rows
    with pytest.raises(RequestError, match="max_num_tiles must be an integer from 1 to 64"):
        made.process("image", image, {"max_num_tiles": 65})
    for changes, message in (
        ({"tile_size": 36}, "tile_size must be 24, the tower's img_size"),
        ({"max_num_tiles": 65}, "max_num_tiles must be from 1 to 64"),
    ):
        with pytest.raises(ModelFileError, match=message):
            processor(tmp_path, NAME, **changes)


def test_published_configurations():
    rows = {row.names[0]: row.config for row in read_names() if row.names[0].startswith("facebook/Perception-LM")}
    for name, positions, layers, mlp in (
        ("facebook/Perception-LM-1B", 1025, 23, 4096),
        ("facebook/Perception-LM-8B", 1024, 47, 8960),
    ):
        tower: Any = read_hf(rows[name]).tower
        assert (tower.vit.num_positions, tower.vit.num_layers, tower.vit.intermediate_size) == (positions, layers, mlp)
        assert (tower.merge, tower.stretch, tower.scaled, tower.norm) == (4, 1.0, True, False)
        assert tower.first_place == tower.vit.has_class_token
    for outside, inside, tied in ((True, False, True), (False, True, False), (None, True, True), (None, None, False)):
        text = {**RAW["text_config"], "tie_word_embeddings": inside}
        assert read_hf(RAW | {"tie_word_embeddings": outside, "text_config": text}).tie_word_embeddings == tied


def test_configurations_that_are_refused():
    vision = RAW["vision_config"]
    for changes, message in (
        ({"architecture": "vit_base_patch16_224"}, "vision_config.architecture must be one of vit_pe_core_large"),
        ({"model_args": {"rope_temperature": 100.0}}, "rope_temperature is not supported"),
        ({"model_args": vision["model_args"] | {"global_pool": "avg"}}, "model_args.global_pool must be"),
        ({"model_args": vision["model_args"] | {"ref_feat_shape": [6, 7]}}, "ref_feat_shape must be two equal numbers"),
        ({"model_args": vision["model_args"] | {"num_heads": 16}}, "embed_dim must be a multiple of four times"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_hf(RAW | {"vision_config": vision | changes})
    for field, value, message in (
        ("vision_use_cls_token", False, "vision_use_cls_token must be true, as the architecture has it"),
        ("projector_pooling_ratio", 3, "projector_pooling_ratio must be a divisor of the 4 patches"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_hf(RAW | {field: value})
