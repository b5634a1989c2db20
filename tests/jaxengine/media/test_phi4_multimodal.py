"""Texts that stand for images in prompts of Phi-4-multimodal and of Phi-3-vision, tilings of the latter, and images of
Phi-4-reasoning-vision."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxengine.media.registry import processor_for
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.registry import read_folder
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.picture_checkpoints import picture as picture_of
from tests.fixtures.picture_checkpoints import whole_checkpoint
from tests.fixtures.unit_pictures import picture
from tests.jaxengine.media.test_unit_processors import processor


def test_numbered_placeholders_of_phi4(tmp_path, monkeypatch):
    """As in the prompts of vLLM: texts that are no tokens. Images' numbers count."""
    made: Any = processor(tmp_path, "phi4_multimodal_vision")
    written = {"<|image_1|>": [90, 91], "<|image_2|>": [90, 92]}

    class Words:
        def encode(self, text: str, **_: Any) -> list[int]:
            parts = re.findall(r"<\|image_\d\|>|w\d+", text)
            return [token for part in parts for token in written.get(part) or [int(part[1:])]]

        def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
            return [f"w{token}" for token in token_ids]

    item, token = made.process("image", picture(3), {}), [127] * 13
    assert item.num_rows == 13
    monkeypatch.setattr(made, "tokenizer", Words())
    text = "w3<|image_1|>w4<|image_2|>"
    plain = made.tokenizer.encode(text)
    assert made.encode(text, [9, *plain]) == [9, 3, 127, 4, 127]
    assert made.encode("w3", [3]) == [3] and made.encode(text, [8]) == [8]
    assert made.expand(plain, {"image": [item, item]}).token_ids == [3, *token, 4, *token]
    with pytest.raises(RequestError, match=r"must count from 1 in a prompt, got 2, 1"):
        made.encode("<|image_2|><|image_1|>", plain)
    # More digits than int() reads: a text like any other.
    assert made.encode(f"w3<|image_{'1' * 5000}|>", [3]) == [3]


def test_texts_around_images_of_phi3(tmp_path, monkeypatch):
    """Each is tokenized by itself, as a text of its own, with what begins one; numbered or not, images count from 1."""
    made: Any = processor(tmp_path, "phi3_v_vision")
    begin, kept = 1, re.compile(r"<\|image\|>|<\|image_\d\|>|w\d+")
    written = {"<|image_1|>": [90, 91], "<|image_2|>": [90, 92], "<|image|>": [127]}

    class Words:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            own = [token for part in kept.findall(text) for token in written.get(part) or [int(part[1:])]]
            return [*([begin] if add_special_tokens else []), *own]

        def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
            return ["<|image|>" for _ in token_ids]

    monkeypatch.setattr(made, "tokenizer", Words())
    for text in ("w3<|image_1|>w4<|image_2|>", "w3<|image|>w4<|image|>"):
        for token_ids in (made.tokenizer.encode(text), made.tokenizer.encode(text, add_special_tokens=False)):
            assert made.encode(text, token_ids) == [begin, 3, 127, begin, 4, 127, begin]
    assert made.encode("w3", [3]) == [3] and made.encode("w3<|image|>", [8]) == [8]
    with pytest.raises(RequestError, match=r"must count from 1 in a prompt, got 2"):
        made.encode("<|image_2|>", [90, 92])
    assert made.encode(f"w3<|image_{'1' * 5000}|>", [3]) == [3]


def test_tilings_of_phi3(tmp_path):
    """As many tiles along the longer side as fit, with margins along the other; never more than the limit."""
    made: Any = processor(tmp_path, "phi3_v_vision")
    assert made.largest("image").num_rows == 5 * 2 * (2 + 1) + 1 + 6
    for height, width, most, tiles in (
        (30, 75, 5, (1, 2)),
        (75, 30, 5, (2, 1)),
        (24, 24, 4, (2, 2)),
        (24, 24, 3, (1, 1)),
        (10, 100, 16, (1, 10)),
        (200, 1000, 16, (2, 8)),
    ):
        assert made.tiling(height, width, most) == tiles, (height, width)
    with pytest.raises(RequestError, match="too narrow: 190x1 pixels leave no side"):
        made.process("image", picture(0)[:1].repeat(3, axis=1)[:, :190], {"num_crops": 1})
    with pytest.raises(RequestError, match=r"mm_processor_kwargs\.num_crops must be an integer from 1 to 64"):
        made.with_options({"num_crops": 65})
    with pytest.raises(RequestError, match="has 'dynamic_hd'; this model has num_crops"):
        made.process("image", picture(0), {"dynamic_hd": 2})


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory) -> Any:
    folder = whole_checkpoint("phi4_reasoning_vision", tmp_path_factory.mktemp("phi4"))
    raw = read_config_json(folder)
    return processor_for(folder, raw, read_folder(folder, raw), Tokenizer.from_hf_folder(folder))


def test_sizes_of_images_of_phi4_reasoning_vision(reasoning):
    """Whole patches: those of transformers' get_image_size_for_max_num_patches, of patches of four pixels."""
    for size, resized in (
        ((24, 40), (24, 40)),
        ((70, 64), (40, 36)),
        ((80, 30), (64, 24)),
        ((3, 5), (8, 16)),
        ((9, 7), (12, 8)),
        ((41, 160), (20, 76)),
    ):
        assert reasoning.resized_size(*size, (8, 96)) == resized, size
        assert reasoning.largest("image", size).grid == (1, resized[0] // 4, resized[1] // 4)
    assert reasoning.resized_size(1, 1, (3600, 3600)) == (100, 100)  # no larger scale
    assert reasoning.largest("image").num_rows == 96
    with pytest.raises(RequestError, match="at most 200 times the shorter one"):
        reasoning.process("image", picture_of(0, 1, 400), {})


def test_options_and_prompts_of_phi4_reasoning_vision(reasoning):
    shown = reasoning.process("image", picture_of(3, 24, 40), {})
    assert shown.num_rows == 60 and reasoning.placeholder("image") == "<image>"
    assert reasoning.process("image", picture_of(3, 24, 40), {"max_num_patches": 15}).num_rows == 15
    assert reasoning.process("image", picture_of(3, 24, 40), {"max_num_patches": 4}).num_rows <= 4
    assert reasoning.with_options({"max_num_patches": 20}).largest("image").num_rows == 20
    for options, message in (
        ({"min_num_patches": 97}, "min_num_patches must be at most max_num_patches, 96"),
        ({"max_num_patches": 0}, "max_num_patches must be"),
        ({"max_pixels": 1}, "max_pixels"),
    ):
        with pytest.raises(RequestError, match=message):
            reasoning.process("image", picture_of(3, 24, 40), options)
    with pytest.raises(RequestError, match="patches"):
        reasoning.process("image", picture_of(3, 24, 40), {}, 59)
    text = "See <image>!"
    ids = reasoning.tokenizer.encode(text)
    one = reasoning.encode(text, ids)
    assert one.count(261) == 1 and reasoning.with_tokens(ids) == one
    for given in (ids, one):
        expanded = reasoning.expand(given, {"image": [shown]})
        assert expanded.token_ids.count(261) == 60 and len(expanded.token_ids) == len(one) + 59
    assert reasoning.grid_of(7, None) == (1, 1, 7)
