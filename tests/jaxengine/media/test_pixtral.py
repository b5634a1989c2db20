"""The processor of Pixtral and Mistral Small 3: pixels as transformers has them, lines in prompts, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from jaxengine.media.registry import processor_for
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_folder
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.picture_checkpoints import picture, whole_checkpoint

IMAGE, BREAK, END = 263, 264, 265


def opened(folder, tokenizer=True):
    raw = read_config_json(folder)
    return processor_for(folder, raw, read_folder(folder, raw), Tokenizer.from_hf_folder(folder) if tokenizer else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return whole_checkpoint("mistral3_pictures_vision", tmp_path_factory.mktemp("pixtral"))


@pytest.fixture(scope="module")
def processor(folder):
    return opened(folder)


@pytest.mark.parametrize("size", [(24, 40), (37, 61), (5, 50), (300, 151), (8, 8)], ids=str)
def test_pixels_are_those_of_transformers(processor, size):
    value = picture(1, *size)
    theirs = PixtralImageProcessorPil(patch_size={"height": 8, "width": 8}, size={"longest_edge": 64})(
        images=[value], return_tensors="np"
    )
    item = processor.process("image", value, {})
    height, width = theirs["image_sizes"][0]
    assert item.grid == (1, height // 4, width // 4) and item.num_rows == height * width // 64
    pixels = np.zeros((3, height, width), np.float32)
    for patch, (_, row, column) in zip(item.patches.reshape(-1, 3, 4, 4), item.columns.T, strict=True):
        pixels[:, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] = patch
    np.testing.assert_allclose(pixels, theirs["pixel_values"][0], atol=1e-5)


def test_lines_of_a_picture_end_with_tokens_of_their_own(processor):
    first = processor.process("image", picture(1, 16, 24), {})
    second = processor.process("image", picture(1, 8, 8), {})
    expanded = processor.expand([5, IMAGE, 6, IMAGE], {"image": [first, second]})
    line = [IMAGE] * 3
    assert expanded.token_ids == [5, *line, BREAK, *line, END, 6, IMAGE, END]
    np.testing.assert_array_equal(np.concatenate(expanded.positions), [1, 2, 3, 5, 6, 7, 10])
    assert expanded.rope_positions is None and expanded.order == [("image", 0), ("image", 1)]
    assert processor.placeholder("image") == "[IMG]"
    assert processor.expand([5, 6], {}).token_ids == [5, 6]
    with pytest.raises(RequestError, match="the prompt has 1 of the image's placeholder, token 263, and 2 images"):
        processor.expand([IMAGE], {"image": [first, second]})


def test_the_longest_side_bounds_a_picture(processor):
    value = picture(1, 60, 64)
    assert processor.process("image", value, {}).num_rows == 64 == processor.largest("image").num_rows
    assert processor.process("image", value, {"size": {"longest_edge": 32}}).num_rows == 16
    assert processor.largest("image", (16, 8)).num_rows == 2
    with pytest.raises(RequestError, match=r"mm_processor_kwargs\.size must be .* longest_edge, 1 to 16384 pixels"):
        processor.process("image", value, {"size": {"longest_edge": 0}})
    with pytest.raises(RequestError, match="mm_processor_kwargs has 'max_pixels'; this model has size"):
        processor.process("image", value, {"max_pixels": 5})
    with pytest.raises(RequestError, match="video is not supported by this model; it takes image"):
        processor.process("video", value[None], {})


def test_settings_that_cannot_be_used_are_refused(tmp_path):
    folder = whole_checkpoint("mistral3_pictures_vision", tmp_path)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"size": {"height": 5, "width": 5}}))
    with pytest.raises(ModelFileError, match=r"preprocessor_config\.json: size must be a mapping with longest_edge"):
        opened(folder)


def test_a_prompt_needs_the_tokenizer(folder):
    blind = opened(folder, tokenizer=False)
    item = blind.process("image", picture(1, 8, 8), {})
    with pytest.raises(RequestError, match=r"needs the model's tokenizer, for lines of it end with \[IMG_BREAK\]"):
        blind.expand([IMAGE], {"image": [item]})


def test_a_longer_edge_of_an_engine_counts_for_the_largest(processor):
    for edge, patches in ((128, 1024), (32, 256)):
        chosen = processor.with_options({"size": {"longest_edge": edge}})
        assert len(chosen.largest("image").patches) == patches
    with pytest.raises(RequestError, match="size must be"):
        processor.with_options({"size": 0})
