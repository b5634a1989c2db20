"""The processor of Kimi-VL: pixels as the one that is published with it makes them, and what is refused."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import pytest

from jaxengine.media.registry import processor_for
from jaxengine.models.config.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_folder
from jaxengine.scheduler.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.picture_checkpoints import picture, whole_checkpoint

NAME, PAD = "kimi_vl_vision", 266


def opened(folder):
    raw = read_config_json(folder)
    return processor_for(folder, raw, read_folder(folder, raw), Tokenizer.from_hf_folder(folder))


def with_settings(folder, **changes):
    whole_checkpoint(NAME, folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return opened(whole_checkpoint(NAME, tmp_path_factory.mktemp("kimi_vl")))


def test_pixels_are_those_of_the_published_processor(processor):
    with np.load(FOLDER / NAME / "pixels.npz") as recorded:
        wanted = dict(recorded)
    assert len(wanted) == 6
    for size, theirs in wanted.items():
        item = processor.process("image", picture(1, *map(int, size.split("x"))), {"in_token_limit": 24})
        rows, columns = theirs.shape[:2]
        assert item.grid == (1, rows, columns) and item.num_rows == rows * columns // 4
        _, row, column, height, width = item.columns
        assert set(height) == {rows} and set(width) == {columns}
        np.testing.assert_allclose(item.patches, theirs[row, column], atol=1e-5)


def test_a_picture_is_as_many_tokens_as_rows(processor):
    first, second = (processor.process("image", picture(1, *size), {}) for size in ((16, 24), (8, 8)))
    expanded = processor.expand([5, PAD, 6, PAD], {"image": [first, second]})
    assert expanded.token_ids == [5, *[PAD] * 6, 6, PAD]
    np.testing.assert_array_equal(np.concatenate(expanded.positions), [1, 2, 3, 4, 5, 6, 8])
    assert expanded.rope_positions is None and expanded.order == [("image", 0), ("image", 1)]
    assert processor.placeholder("image") == "<|media_pad|>"
    with pytest.raises(RequestError, match="the prompt has 1 of the image's placeholder, token 266, and 2 images"):
        processor.expand([PAD], {"image": [first, second]})
    # Rows that come ready need no grid; one that is given must be theirs.
    assert processor.grid_of(6, None) == (1, 2, 12) and processor.grid_of(6, (1, 4, 6)) == (1, 4, 6)
    with pytest.raises(RequestError, match=r"image_grid_thw, .* got \[1, 4, 4\] for 6 rows"):
        processor.grid_of(6, (1, 4, 4))


@pytest.mark.parametrize("limit, least", [(24, 0.2), (4096, 0.95)])
def test_no_picture_is_larger_than_the_largest(tmp_path, limit, least):
    processor = opened(with_settings(tmp_path, in_token_limit=limit))
    bound, found = len(processor.largest("image").patches), []
    # Those whose parts of patches at the sides are as large as can be shrink least.
    sides = [4 * count + 3 for count in (*range(16), *range(16, 512, 16))]
    for height, width in product(sides, sides):
        try:
            found.append(len(processor.largest("image", (height, width)).patches))
        except RequestError:  # too long for its width, or for the tower
            continue
    assert bound >= max(found) > least * bound


def test_what_a_tower_cannot_take_is_refused(processor):
    with pytest.raises(RequestError, match="less than 512 patches of 4 pixels along a side, got 512x4"):
        processor.process("image", picture(1, 11, 2048), {"in_token_limit": 4096})
    with pytest.raises(RequestError, match="at most 200 times the shorter one, got 2048x8 pixels"):
        processor.process("image", picture(1, 8, 2048), {"in_token_limit": 4096})
    with pytest.raises(RequestError, match=r"mm_processor_kwargs\.in_token_limit must be an integer from 1 to"):
        processor.process("image", picture(1, 8, 8), {"in_token_limit": 0})
    with pytest.raises(RequestError, match="mm_processor_kwargs has 'size'; this model has in_token_limit"):
        processor.process("image", picture(1, 8, 8), {"size": 5})
    with pytest.raises(RequestError, match="makes 128 patches of pixels; at most 64"):
        processor.process("image", picture(1, 32, 64), {"in_token_limit": 4096}, 64)
    with pytest.raises(RequestError, match="video is not supported by this model; it takes image"):
        processor.process("video", picture(1, 8, 8)[None], {})


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"pad_input": False}, "pad_input must be true"),
        ({"in_token_limit": math.pi}, "in_token_limit must be an integer"),
        ({"merge_kernel_size": [4, 4]}, r"merge_kernel_size must be \[2, 2\], that of the tower"),
        ({"patch_size": 14}, "patch_size must be 4 or absent"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(tmp_path, changes, problem):
    with pytest.raises(ModelFileError, match=rf"preprocessor_config\.json: {problem}"):
        opened(with_settings(tmp_path, **changes))
