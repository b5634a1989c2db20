"""GLM-4V-9B: its tokens and positions in a prompt, its classes' names, and what is refused. Pixels and embeddings are
recorded (tests/models/families/test_unit_pictures.py).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxengine.media.registry import processor_for
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.readers.hf import hf_architecture
from jaxengine.models.registry import model_for_hf, read_hf
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.unit_pictures import picture, write_files

NAME = "glm4v_9b_vision"
PATCH, BEGIN, END = 127, 126, 125
RAW: Any = json.loads((FOLDER / NAME / "config.json").read_text())


def test_tokens_and_positions(tmp_path):
    """All tokens of an image have embeddings, and those of its patches one position."""
    write_files(tmp_path, NAME)
    made: Any = processor_for(tmp_path, RAW, read_hf(RAW), Tokenizer.from_hf_folder(tmp_path))
    item = made.process("image", picture(0), {})
    image = [BEGIN, *[PATCH] * 4, END]
    text = f"w5 {made.placeholder('image')} w6 {made.placeholder('image')} w7"
    for ids in (made.encode(text, made.tokenizer.encode(text)), [5, BEGIN, PATCH, END, 6, BEGIN, 7]):
        found = made.expand(ids, {"image": [item, item]})
        assert found.token_ids == [5, *image, 6, *image, 7]
        assert [places.tolist() for places in found.positions] == [[*range(1, 7)], [*range(8, 14)]]
        places = [0, 1, 2, 2, 2, 2, 3, 4, 5, 6, 6, 6, 6, 7, 8]
        assert (found.rope_positions == places).all() and found.rope_delta == places[-1] - 14
    # A token of patches alone is text.
    assert made.expand([5, PATCH], {}).token_ids == [5, PATCH]
    with pytest.raises(RequestError, match="the prompt has 1 of the placeholder"):
        made.expand([5, BEGIN], {})
    assert sorted(item.rows) == [*range(6)] and made.grid_of(6, None) == (1, 4, 4)
    for rows, grid in ((4, None), (6, (1, 4, 4))):
        with pytest.raises(RequestError, match="embeddings of an image of this model must be 6; they have no grid"):
            made.grid_of(rows, grid)
    with pytest.raises(RequestError, match="this model has none"):
        made.process("image", np.zeros((4, 4, 3), np.uint8), {"size": 3})


def test_classes_that_see():
    """As published, under the names of ChatGLM; without a vision_config they are text."""
    for name in ("ChatGLMModel", "ChatGLMForConditionalGeneration", "GLM4VForCausalLM"):
        raw = RAW | {"architectures": [name]}
        assert hf_architecture(ConfigFields(raw)) == "GLM4VForCausalLM" == read_hf(raw).architecture
    config: Any = read_hf(RAW)
    assert config.tower.unit == 16 + 8 and config.attention[0].rope.sections == (4, 0, 0)
    text = read_hf(RAW | {"vision_config": None})
    assert text.architecture == "ChatGLMModel" and text.tower is None
    names = model_for_hf("GLM4VForCausalLM").checkpoint_names
    stored = "transformer.vision.transformer.layers.3.mlp.fc1.weight"
    assert names.renamed(stored) == "vision_tower.transformer.layers.3.mlp.fc1.weight"


def test_what_is_refused():
    vision = RAW["vision_config"]
    for changes, message in (
        ({"vision_config": vision | {"num_positions": 16}}, "vision_config.num_positions must be 17"),
        ({"vision_config": vision | {"in_channels": 1}}, "vision_config.in_channels must be 3 or absent"),
        (
            {"vision_config": vision | {"patch_size": 8, "num_positions": 10}},
            "vision_config.image_size must be an even",
        ),
        ({"vision_config": vision | {"scaling_factor": None}}, "vision_config.scaling_factor"),
        ({"post_layer_norm": False}, "post_layer_norm must be true or absent"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_hf(RAW | changes)
