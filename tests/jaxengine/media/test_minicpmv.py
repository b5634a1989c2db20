"""Processors that cut images into slices, of MiniCPM-V and LFM2-VL: as transformers does it, limits and refusals."""

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


RESAMPLED = "minicpmv2_6_vision"


@pytest.fixture(scope="module")
def resampled_folder(tmp_path_factory):
    return whole_checkpoint(RESAMPLED, tmp_path_factory.mktemp("resampled"))


def test_crops_of_2_6_are_those_of_the_published_code(resampled_folder, tmp_path):
    """Each of them a unit, with padding; none is larger than a unit."""
    other = whole_checkpoint("minicpmv4_5_vision", tmp_path)
    for name, folder in ((RESAMPLED, resampled_folder), ("minicpmv4_5_vision", other)):
        made = opened(folder)
        queries, unit = made.tower.num_queries, made.tower.unit
        with np.load(golden_path(name)) as golden:
            sizes = golden["sizes"].tolist()
        for height, width, rows, columns, *grids in sizes:
            item = made.process("image", picture(1, height, width), {})
            place, row, column = item.columns.reshape(3, -1, unit)
            assert len(place) == 1 + rows * columns and item.num_rows == queries * len(place)
            shown = [each.max(axis=1)[[0, -1]] + 1 for each in (row, column)]
            assert np.stack(shown, axis=1).ravel().tolist() == grids
            assert ((place >= 0).sum(axis=1) == (row.max(axis=1) + 1) * (column.max(axis=1) + 1)).all()
            assert not item.patches.reshape(len(place), unit, -1)[place < 0].any()
            assert len(item.patches) == len(made.largest("image", (height, width)).patches)
        assert len(made.largest("image").patches) == (1 + made.most_slices) * unit
        one = made.with_options({"max_slice_nums": 1})
        assert len(one.largest("image").patches) == unit
        for size in product((1, 2, 3, 7, 16, 29, 31, 32, 33, 45, 200, 391, 400), repeat=2):
            if max(size) <= 200 * min(size):  # what is too large for a unit cannot be padded
                assert len(made.largest("image", size).patches) % unit == 0


def test_prompts_of_2_6(resampled_folder):
    """A text stands for an image, whatever is beside it; what is given as embeddings is one crop."""
    made = opened(resampled_folder)
    text = "a(<image>./</image>)b"
    plain = made.tokenizer.encode(text)
    assert made.placeholder("image") == "(<image>./</image>)"
    assert made.encode(text, plain) == [plain[0], 261, plain[-1]]
    item = made.process("image", picture(1, 32, 32), {})
    given = item._replace(columns=item.columns[:0], crops=())
    prompts = [made.expand(plain, {"image": [each]}) for each in (item, given)]
    assert prompts[0].token_ids == prompts[1].token_ids and prompts[0].token_ids.count(261) == 6
    assert made.grid_of(6, None) == (1, 8, 8)
    for rows, grid in ((5, None), (6, (1, 8, 8))):
        with pytest.raises(RequestError, match="must be 6, of one that is not cut, without a grid; got"):
            made.grid_of(rows, grid)
    with pytest.raises(RequestError, match="makes 660 patches of pixels; at most 256"):
        made.process("image", picture(1, 90, 90), {"max_slice_nums": 4}, 256)


@each_row(
    "file, changes, problem",
    [
        ("preprocessor_config.json", {"slice_mode": False}, "slice_mode must be true or absent"),
        ("preprocessor_config.json", {"image_feature_size": 64}, "image_feature_size must be 6 or absent"),
        ("preprocessor_config.json", {"scale_resolution": 64}, "scale_resolution must be 32, as in slice_config"),
        ("preprocessor_config.json", {"norm_mean": [0, 1]}, "image_mean must be three numbers"),
        ("tokenizer_config.json", {"unk_token": "ab"}, "unk_token must be one token, got 'ab'"),
    ],
)
def test_settings_of_2_6_that_do_not_fit_are_refused(resampled_folder, file, changes, problem):
    path = resampled_folder / file
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | changes))
    try:
        with pytest.raises(ModelFileError, match=problem):
            opened(resampled_folder)
    finally:
        path.write_text(before)


@each_row(
    "changes, problem",
    [
        ({"version": 2.5}, "version must be 2.6, 4.0, 4.5, got 2.5"),
        ({"version": None}, "version must be 2.6, 4.0, 4.5, got None"),
        ({"query_num": 1025}, "query_num must be an integer from 1 to 1024"),
        ({"slice_config": {"patch_size": 14}}, "patch_size must be 4"),
        ({"slice_config": {"scale_resolution": 1 << 20}}, "scale_resolution must be from patch_size 4 to 4096"),
        ({"hidden_size": 120}, "hidden_size must be a multiple of 4 and of its number of heads"),
    ],
)
def test_towers_of_2_6_that_there_are_not_are_refused(resampled_folder, changes, problem):
    raw = read_config_json(resampled_folder) | changes
    with pytest.raises(ModelFileError, match=problem):
        read_folder(resampled_folder, raw)


LFM2 = "lfm2_vl_vision"


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    return opened(whole_checkpoint(LFM2, tmp_path_factory.mktemp("lfm2_vl")))


def test_tiles_of_lfm2_are_those_of_transformers(tiles):
    with np.load(golden_path(LFM2)) as golden:
        sizes = golden["sizes"].tolist()
    assert len(sizes) == 9
    for height, width, rows, columns, *patches in sizes:
        item = tiles.process("image", picture(1, height, width), {})
        assert [*item.crops[0], *item.crops[-1]] == patches, (height, width)
        assert len(item.crops) == (1 if rows == columns == 1 else rows * columns + 1)
        assert item.grid[1:] == (rows * patches[0], columns * patches[1])
        assert len(item.patches) == len(tiles.largest("image", (height, width)).patches)


def test_no_image_of_lfm2_has_more_patches_than_the_largest(tiles):
    sides = (1, 2, 5, 9, 16, 31, 32, 33, 47, 64, 90, 130, 200, 410, 900)
    for options in (
        {},
        {"do_image_splitting": False},
        {"use_thumbnail": False},
        {"use_thumbnail": False, "max_tiles": 2, "max_image_tokens": 100},
        {"min_tiles": 1, "max_tiles": 1},
        {"min_image_tokens": 16, "do_image_splitting": False},
        {"max_image_tokens": 50, "max_tiles": 9},
    ):
        chosen = tiles.with_options(options)
        bound = chosen.largest("image")
        sizes = [size for size in product(sides, sides) if max(size) <= 200 * min(size)]
        found = [chosen.largest("image", size) for size in sizes]
        assert len(bound.patches) >= max(len(each.patches) for each in found) > len(bound.patches) / 4, options
        assert bound.num_rows >= max(each.num_rows for each in found)


def test_an_image_of_lfm2_in_one_tile_and_without_a_whole(tiles):
    """As many tokens as embeddings, whatever is cut."""
    for options, crops in (
        ({"min_tiles": 1, "max_tiles": 2}, 1),
        ({"use_thumbnail": False}, 4),
        ({"do_image_splitting": False}, 1),
    ):
        item = tiles.process("image", picture(1, 70, 72), options)
        expanded = tiles.expand([5, 261, 6], {"image": [item]})
        assert len(item.crops) == crops and [len(each) for each in expanded.positions] == [item.num_rows]
        assert expanded.token_ids.count(261) == item.num_rows


@each_row(
    "options, problem",
    [
        ({"tiles": 3}, r"mm_processor_kwargs has 'tiles'; this model has min_tiles, max_tiles, min_image_tokens"),
        ({"max_tiles": 65}, r"mm_processor_kwargs\.max_tiles must be an integer from 1 to 64, got '65'"),
        ({"min_tiles": 5}, r"mm_processor_kwargs\.min_tiles must be at most max_tiles, 4, got 5"),
        ({"use_thumbnail": 1}, r"mm_processor_kwargs\.use_thumbnail must be true or false, got '1'"),
    ],
)
def test_options_of_lfm2_that_are_refused(tiles, options, problem):
    with pytest.raises(RequestError, match=problem):
        tiles.process("image", picture(1, 70, 72), options)


@each_row(
    "changes, problem",
    [
        ({"tile_size": 30}, "tile_size must be a multiple of 8 pixels, a row of the tower"),
        ({"downsample_factor": 1}, "downsample_factor must be 2, the tower's, got 1"),
        ({"encoder_patch_size": 16}, "encoder_patch_size must be 4, the tower's, got 16"),
        ({"do_pad": False}, "do_pad must be true or absent, got False"),
        ({"min_tiles": 5}, "min_tiles must be at most max_tiles, 4, got 5"),
        ({"max_image_tokens": 1 << 20}, "max_image_tokens must be 1 to 16384"),
    ],
)
def test_settings_of_lfm2_that_do_not_fit(tmp_path, changes, problem):
    folder = whole_checkpoint(LFM2, tmp_path)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelFileError, match=problem):
        opened(folder)
