"""The processors of Kimi-VL, Kimi K2.5 and K3: pixels as the published one makes them, chunks of videos, refusals."""

from __future__ import annotations

import json
import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from jaxengine.media.base.frames import Video
from jaxengine.media.registry import processor_for
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_folder
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.picture_checkpoints import frames, picture, whole_checkpoint

NAME, PAD = "kimi_vl_vision", 266
K25, K25_PAD, K25_VIDEO = "kimi_k25_vision", 261, 262


def opened(folder):
    raw = read_config_json(folder)
    return processor_for(folder, raw, read_folder(folder, raw), Tokenizer.from_hf_folder(folder))


def with_settings(folder, name=NAME, **changes):
    whole_checkpoint(name, folder)
    path = folder / "preprocessor_config.json"
    found = json.loads(path.read_text())
    owner = found.get("media_proc_cfg", found)
    owner.update(changes)
    path.write_text(json.dumps(found))
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


@pytest.mark.parametrize(
    "name, option, limit, least",
    [(NAME, "in_token_limit", 24, 0.2), (NAME, "in_token_limit", 4096, 0.95), (K25, "in_patch_limit", 300, 0.7)],
)
def test_no_picture_is_larger_than_the_largest(tmp_path, name, option, limit, least):
    processor = opened(with_settings(tmp_path, name, **{option: limit}))
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


@pytest.fixture(scope="module")
def k25(tmp_path_factory):
    return opened(whole_checkpoint(K25, tmp_path_factory.mktemp("kimi_k25")))


def test_chunks_of_a_video(k25):
    """Seven frames are chunks of three, three and one; patches of one place follow each other."""
    shown = frames(3, 7, 8, 16)
    item = k25.process("video", Video(shown, np.arange(7) * 1000, None, 0.25, 7000), {})
    assert item.grid == (7, 2, 4) and item.num_rows == 6 and item.seconds == (0.0, 12000.0, 24000.0)
    segment, _, column, _, _, frame, count = item.columns
    np.testing.assert_array_equal(segment, np.repeat([0, 1, 2], [24, 24, 8]))
    np.testing.assert_array_equal(count, np.repeat([3, 1], [48, 8]))
    np.testing.assert_array_equal(frame[:24:4], [1, 2, 3] * 2)
    np.testing.assert_array_equal(frame[48:], 0)
    np.testing.assert_array_equal(column[:24:4], [0, 0, 0, 2, 2, 2])
    np.testing.assert_array_equal(item.rows, [0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, 5])
    whole = k25.padded("image", shown[4:5], k25.frame_pixels, 32, None).patches
    np.testing.assert_array_equal(item.patches[[*range(28, 32), *range(40, 44)]], whole)
    expanded = k25.expand(
        k25.encode("a<|video_pad|>b<|image_pad|>"), {"video": [item], "image": [k25.largest("image")]}
    )
    text = k25.tokenizer.decode([token for token in expanded.token_ids if token < 256])
    chunk = "{}<|media_begin|>video<|media_content|><|media_end|>"
    assert text == f"a{''.join(map(chunk.format, ('00:00:00.000', '03:20:00.000', '06:40:00.000')))}b"
    video, image = expanded.positions
    assert expanded.order == [("video", 0), ("image", 0)]
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(expanded.token_ids) == K25_VIDEO), video)
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(expanded.token_ids) == K25_PAD), image)


def test_a_placeholder_of_several_tokens(tmp_path):
    """As published: the tokenizer does not know a video's placeholder, and its id is none of the vocabulary."""
    folder = whole_checkpoint(K25, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"video_token_id": 272, "video_placeholder": "<|kimi_k25_video_placeholder|>"}
    (folder / "config.json").write_text(json.dumps(config))
    processor = opened(folder)
    ids = processor.encode(f"a{processor.placeholder('video')}b{processor.placeholder('image')}")
    assert len(ids) == 4 and ids[1] == 272 and ids[3] == K25_PAD
    item = processor.process("video", frames(3, 2, 8, 8), {})
    expanded = processor.expand(ids[:3], {"video": [item]})
    assert expanded.token_ids.count(K25_PAD) == item.num_rows == 1 and 272 not in expanded.token_ids
    with pytest.raises(RequestError, match="the prompt has 1 of the video's placeholder, token 272, and 0 videos"):
        processor.expand(ids[:3], {})


def test_prompts_of_kimi_k3_state_the_size_before_scaling(tmp_path):
    processor = opened(whole_checkpoint("kimi_k3_vision", tmp_path))
    item = processor.process("image", picture(1, 50, 90), {})
    assert item.grid == (1, 6, 12) and item.num_rows == 18
    text = f"a{processor.placeholder('image')}b{processor.placeholder('image')}"
    ids = processor.encode(text, processor.ids(text))
    assert ids.count(PAD) == 2 and processor.with_tokens(processor.ids(text)) == ids
    # One that is given as embeddings has the size of its grid.
    expanded = processor.expand(ids, {"image": [item, item._replace(size=None)]})
    begin, end = (f"<|media_{part}|>" for part in ("begin", "end"))
    words = (f"{letter}{begin}image {size}<|media_content|>{end}" for letter, size in (("a", "90x50"), ("b", "48x24")))
    assert processor.tokenizer.decode([token for token in expanded.token_ids if token != PAD]) == "".join(words)
    at = np.flatnonzero(np.asarray(expanded.token_ids) == PAD)
    np.testing.assert_array_equal(at, np.concatenate(expanded.positions))
    processor.tokenizer = None
    with pytest.raises(RequestError, match="an image needs the model's tokenizer, for prompts state its size"):
        processor.expand([PAD], {"image": [item]})
    assert processor.expand([5, 6], {}).token_ids == [5, 6]


def test_long_sides_are_shrunk(k25):
    item = k25.process("image", picture(1, 8, 1600), {"max_patches": 4096})
    assert item.grid == (1, 2, 20)
    shown = frames(1, 2, 40, 40)
    grids = [k25.process("video", shown, options).grid for options in ({}, {"max_patches": 100})]
    assert grids == [(2, 6, 6), (2, 10, 10)]
    raised = k25.with_options({"max_patches": 400})
    for kind in ("image", "video"):
        assert 3 * len(k25.largest(kind).patches) < len(raised.largest(kind).patches)
    with pytest.raises(RequestError, match="mm_processor_kwargs has 'size'; this model has max_patches"):
        k25.process("video", frames(1, 2, 8, 8), {"size": 5})
    with pytest.raises(RequestError, match="a video must be shorter than a day"):
        k25.process("video", Video(frames(1, 1, 8, 8), np.asarray([10**6]), None, 1.0, 10**7), {})


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens must be absent"),
        ({"patch_limit_on_one_side": 7}, "size must be equal max_height and max_width, a multiple of 2"),
        ({"temporal_merge_kernel_size": 4}, "temporal_merge_kernel_size must be 3 or absent"),
        ({"in_patch_limit_each_frame": 0}, "in_patch_limit_each_frame must be an integer >= 1"),
        ({"patch_limit_on_one_side": None, "size": {"max_height": "8"}}, "max_height must be an integer >= 1"),
        ({"image_mean": [10**400, 0, 0]}, "image_mean must be three numbers from -1e\\+06 to 1e\\+06"),
    ],
)
def test_settings_of_kimi_k25_that_cannot_be_used_are_refused(tmp_path, changes, problem):
    with pytest.raises(ModelFileError, match=rf"preprocessor_config\.json: {problem}"):
        opened(with_settings(tmp_path, K25, **changes))


def test_placeholders_of_kimi_k25_must_be_told_apart(k25):
    for raw, problem in (({"video_placeholder": ""}, "video_placeholder must be"), ({"video_token_id": 5}, "another")):
        with pytest.raises(ModelConfigError, match=problem):
            k25.read_tokens(ConfigFields({"image_token_id": 5, **raw}), SimpleNamespace(vocab_size=272))
