"""Molmo of the first version: crops, the text of a prompt, and what is refused. Pixels and masks are recorded
(tests/models/families/test_unit_pictures.py).
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import model_for_hf, read_hf
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from scripts.model_names import read_names
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.picture_checkpoints import picture
from tests.fixtures.picture_checkpoints import tokenizer as of_bytes
from tests.jaxengine.media.test_unit_processors import processor

NAME = "molmo_vision"
BOS, END, START, COLUMN, PATCH, IMAGE = (121, *range(123, 128))


def test_images_stand_before_the_text(tmp_path):
    """Where placeholders were, or where none are; a line's end after one goes with it, and a space begins the text."""
    made: Any = processor(tmp_path, NAME)
    item = made.process("image", picture(1, 20, 30), {})
    lines = [PATCH, PATCH, PATCH, COLUMN] * 3
    own = [START, *lines, END, START, *[*[PATCH] * item.grid[2], COLUMN] * item.grid[1], END]
    for prompt in ([5, IMAGE, 6], [BOS, IMAGE, 5, 6], [5, 6], [BOS, 5, 6]):
        expanded = made.expand(prompt, {"image": [item]})
        assert expanded.token_ids == [BOS, *own, 5, 6]
        assert [expanded.token_ids[place] for place in expanded.positions[0]] == [PATCH] * item.num_rows
    two = made.expand([5, IMAGE, IMAGE], {"image": [item, item]})
    assert two.token_ids == [BOS, *own, *own, 5] and two.order == [("image", 0), ("image", 1)]
    assert made.expand([5], {}).token_ids == [5]
    with pytest.raises(RequestError, match="has 1 of the placeholder .* and 2 images are given"):
        made.expand([5, IMAGE], {"image": [item, item]})
    of_bytes(("<im_start>", "<im_end>", "<im_col>", "<im_patch>", "<|image|>")).save(str(tmp_path / "tokenizer.json"))
    made.tokenizer = words = Tokenizer.from_hf_folder(tmp_path)
    made._tokens = {text: made.ids(text)[0] for text in made._tokens}
    for text in ("User: <|image|>\nWhy? Assistant:", " User: Why? Assistant:", "User: Why?<|image|> Assistant:"):
        found = made.expand(words.encode(text), {"image": [item]}).token_ids
        assert words.decode(found[-22:]) == " User: Why? Assistant:" and found[-23] == made._tokens["<im_end>"]


def test_crops(tmp_path):
    """None has more embeddings than the largest; embeddings that are given have a grid."""
    made: Any = processor(tmp_path, NAME)
    sizes = [(side, other) for side in range(5, 90, 12) for other in range(5, 90, 12)]
    for most, units, rows in ((1, 2, 9 + 9), (3, 4, 9 + 15), (4, 5, 9 + 18)):
        other = made.with_options({"max_crops": most})
        assert (other.largest("image").num_rows, len(other.largest("image").patches)) == (rows, 36 * units)
        assert max(other.process("image", picture(1, *size), {}).num_rows for size in sizes) <= rows
    item = made.process("image", np.full((200, 1, 3), 255, np.uint8), {})
    assert sorted({*item.rows.tolist()} - {-1}) == [*range(item.num_rows)]
    assert made.grid_of(item.num_rows, item.grid) == item.grid
    for rows, grid in ((item.num_rows, None), (item.num_rows + 1, item.grid)):
        with pytest.raises(RequestError, match=r"need a grid \[1, rows, columns\]"):
            made.grid_of(rows, grid)
    with pytest.raises(RequestError, match="max_crops must be an integer from 1 to 64, got '0'"):
        made.process("image", picture(1, 20, 30), {"max_crops": 0})


def test_settings_that_are_refused(tmp_path):
    for changes, message in (
        ({"base_image_input_size": [24, 36]}, "base_image_input_size must be 24 by 24, the tower's"),
        ({"image_patch_size": 6}, "image_patch_size must be 4"),
        ({"image_token_length_w": 4}, "image_token_length_w must be 3"),
        ({"image_padding_mask": False}, "image_padding_mask must be true or absent"),
        ({"max_crops": 65}, "max_crops must be from 1 to 64"),
        ({"overlap_margins": [1, 2]}, "overlap_margins must be two even numbers whose sum is less than a crop's 6"),
        ({"overlap_margins": [4, 2]}, "overlap_margins must be two even numbers"),
    ):
        with pytest.raises(ModelFileError, match=message):
            processor(tmp_path, NAME, **changes)


def test_published_configurations():
    """Both sizes of language model are read; the sizes of the tower are in no file."""
    published = {row.names[0]: row.config for row in read_names() if row.names[0].startswith("allenai/Molmo-")}
    for name, logits, heads, form in (
        ("allenai/Molmo-7B-D-0924", 152064, 4, ("before", ())),
        ("allenai/Molmo-7B-O-0924", 100352, 32, ("output", ("self_attn.q_norm", "self_attn.k_norm"))),
    ):
        config: Any = read_hf(published[name])
        assert (config.num_logits, config.vocab_size) == (logits, logits + 128)
        assert config.attention[0].num_kv_heads == heads and not config.tie_word_embeddings
        assert (config.declared.placement, config.declared.qk_norms) == form
        tower = config.tower
        assert (tower.unit, tower.layers, tower.vit.num_positions) == (576, (22, 15), 577)
        assert tower.unused == ("vision_tower.layers.22.",)
    names = model_for_hf("MolmoForCausalLM").checkpoint_names
    for stored, own in (
        ("model.transformer.ff_out.weight", "lm_head.weight"),
        ("model.transformer.blocks.3.ff_out.weight", "model.layers.3.mlp.down_proj.weight"),
        ("model.transformer.blocks.3.q_norm.weight", "model.layers.3.self_attn.q_norm.weight"),
        ("model.vision_backbone.pad_embed", "multi_modal_projector.pad_embed"),
    ):
        assert names.renamed(stored) == own


def test_configurations_that_are_refused():
    raw: Any = json.loads((FOLDER / NAME / "config.json").read_text())
    vision = raw["vision_backbone"]
    for changes, message in (
        ({"block_type": "moe"}, 'block_type must be "llama" or absent'),
        ({"clip_qkv": 8.0}, "clip_qkv must be absent"),
        ({"weight_tying": True}, "weight_tying must be false or absent"),
        ({"intermediate_size": 161}, "intermediate_size must be even"),
        ({"vit_layers": [4]}, "vit_layers must be a list of 1 to 64 layers from -4 to 3"),
        ({"vision_backbone": vision | {"image_num_pos": 36}}, "image_num_pos must be 37"),
        ({"vision_backbone": vision | {"image_num_key_value_heads": 1}}, "image_num_key_value_heads must be 2"),
        (
            {"vision_backbone": vision | {"image_patch_size": 8, "image_num_pos": 10}},
            "image_default_input_size must be",
        ),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_hf(raw | changes)
