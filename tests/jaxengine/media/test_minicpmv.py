"""The processor of MiniCPM-V: how images are cut, as transformers does it, limits and refusals."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest

from jaxengine.media.processors.minicpmv import MiniCPMVProcessor
from jaxengine.media.registry import processor_for
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_folder
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.picture_checkpoints import golden_path, picture, whole_checkpoint
from tests.tables import each_row

NAME = "minicpmv4_6_vision"


def opened(folder, config_changes=None):
    raw = read_config_json(folder) | (config_changes or {})
    return processor_for(folder, raw, read_folder(folder, raw), Tokenizer.from_hf_folder(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return whole_checkpoint(NAME, tmp_path_factory.mktemp("minicpmv"))


@pytest.fixture(scope="module")
def processor(folder) -> MiniCPMVProcessor:
    return opened(folder)


def test_images_are_cut_as_transformers_cuts_them(processor):
    with np.load(golden_path(NAME)) as golden:
        sizes = golden["sizes"].tolist()
    assert len(sizes) == 10
    for height, width, rows, columns, *patches in sizes:
        item = processor.process("image", picture(1, height, width), {})
        crops = processor.crop_grids(item)
        merge = processor.tower.spatial_merge_size
        assert len(crops) == 1 + rows * columns
        assert [side * merge for side in (*crops[0], *crops[-1])] == patches
        assert item.grid[2] == patches[3] * (columns or 1)
        assert len(item.patches) == len(processor.largest("image", (height, width)).patches)


def test_no_image_has_more_patches_than_the_largest(processor):
    sides = (1, 2, 5, 9, 16, 31, 32, 33, 47, 64, 90, 130, 200, 410, 900)
    for options in ({}, {"max_slice_nums": 1}, {"max_slice_nums": 9}):
        chosen = processor.with_options(options)
        bound = len(chosen.largest("image").patches)
        found = [
            len(chosen.largest("image", size).patches) for size in product(sides, sides) if max(size) <= 200 * min(size)
        ]
        assert bound >= max(found) > bound / 4


MANY = r"mm_processor_kwargs\.max_slice_nums must be an integer from 1 to 64"


@each_row(
    "size, options, problem",
    [
        ((3, 700), {}, "at most 200 times the shorter one"),
        ((8, 8), {"max_slice_nums": 0}, MANY),
        ((8, 8), {"max_slice_nums": 65}, MANY),
        ((8, 8), {"max_slice_nums": True}, MANY),
        ((8, 8), {"downsample_mode": "4x"}, "has 'downsample_mode'; this model has max_slice_nums"),
        ((90, 90), {}, "makes 3.. patches of pixels; at most 256"),
    ],
)
def test_images_that_cannot_be_seen_are_refused(processor, size, options, problem):
    with pytest.raises(RequestError, match=problem):
        processor.process("image", picture(1, *size), options, 256)


def test_videos_and_prompts_without_a_tokenizer_are_refused(processor):
    with pytest.raises(RequestError, match="video is not supported by this model; it takes image"):
        processor.process("video", picture(1, 8, 8)[None], {})
    with pytest.raises(ModelConfigError, match="images need its tokenizer"):
        MiniCPMVProcessor("", {}, None, None)


@each_row(
    "changes, problem",
    [
        ({"small_image_upsize": "adaptive"}, "small_image_upsize must be always or never"),
        ({"downsample_mode": "4x"}, "downsample_mode must be that of config.json"),
        ({"patch_size": 14}, "patch_size must be 4"),
        ({"max_slice_nums": 100}, "max_slice_nums must be 1 to 64"),
        ({"scale_resolution": 1 << 20}, "scale_resolution must be 1 to"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, changes, problem):
    path = folder / "preprocessor_config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | changes))
    try:
        with pytest.raises(ModelFileError, match=problem):
            opened(folder)
    finally:
        path.write_text(before)


def test_no_request_asks_for_slices_where_there_are_none(folder):
    path = folder / "preprocessor_config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"slice_mode": False}))
    try:
        made = opened(folder)
    finally:
        path.write_text(before)
    item = made.process("image", picture(1, 90, 90), {"max_slice_nums": 9})
    assert len(item.crops) == 1 == made.with_options({"max_slice_nums": 9}).most_slices
    with pytest.raises(RequestError, match=MANY):
        made.process("image", picture(1, 9, 9), {"max_slice_nums": 0})


@each_row(
    "changes, problem",
    [
        ({"insert_layer_id": 3}, "insert_layer_id must be one of the 3 layers"),
        ({"downsample_mode": "2x"}, "downsample_mode must be 16x or 4x"),
        ({"merger_times": 2}, "merger_times must be 1"),
    ],
)
def test_towers_without_a_processor_are_refused(folder, changes, problem):
    with pytest.raises(ModelFileError, match=problem):
        opened(folder, changes)


def test_embeddings_are_one_crop(processor):
    item = processor.process("image", picture(1, 32, 32), {})
    given = item._replace(columns=item.columns[:0], crops=())
    image = processor.token_ids["image"]
    ours, theirs = (processor.expand([5, image, 6], {"image": [each]}) for each in (item, given))
    assert ours.token_ids == theirs.token_ids
    assert processor.grid_of(4, (1, 8, 8)) == (1, 8, 8)
    with pytest.raises(RequestError, match="need image_grid_thw"):
        processor.grid_of(4, None)
