"""Processors of the Qwen families: pixels against transformers' own, sizes, prompts and places, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from jaxengine.media.processors.mrope import EmbeddingRun, mrope_positions
from jaxengine.media.processors.qwen2_vl import Bounds
from jaxengine.media.registry import PROCESSORS, processor_for
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.model_classes import ENCODERS, MODELS
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_folder
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.picture_checkpoints import picture, whole_checkpoint
from tests.models.families.pictures import video
from tests.tables import each_row

NAMES = ("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision")
START, END, IMAGE, VIDEO = 259, 260, 261, 262


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: whole_checkpoint(name, tmp_path_factory.mktemp(name)) for name in NAMES}


def opened(folder, **changes):
    raw = read_config_json(folder) | changes
    return processor_for(folder, raw, read_folder(folder, raw), Tokenizer.from_hf_folder(folder))


@pytest.fixture(scope="module")
def processors(folders):
    return {name: opened(folder) for name, folder in folders.items()}


def in_picture_order(item, tower):
    """The patches as transformers has them, row of the tower by row of the tower."""
    merged = item.patches.reshape(-1, tower.merge, tower.num_features)
    out = np.empty_like(merged)
    out[item.rows] = merged
    return out.reshape(item.patches.shape)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(24, 40), (37, 91), (5, 50), (200, 150), (8, 8)], ids=str)
def test_pixels_are_those_of_transformers(processors, name, size):
    processor, value = processors[name], picture(1, *size)
    sizes = processor.sizes["image"]
    theirs = Qwen2VLImageProcessorPil(
        patch_size=4,
        size={"shortest_edge": sizes.bounds.least, "longest_edge": sizes.bounds.most},
        image_mean=list(sizes.pixels.mean),
        image_std=list(sizes.pixels.std),
    )(images=[value], return_tensors="np")
    item = processor.process("image", value, {})
    assert item.grid == tuple(theirs["image_grid_thw"][0])
    np.testing.assert_allclose(in_picture_order(item, processor.tower), theirs["pixel_values"], atol=1e-5)
    assert sorted(item.rows) == list(range(item.num_rows)) and item.num_rows == len(item.patches) // 4
    # Every patch says where it lies: as often as the picture has patches, and no place twice.
    row, column = (item.columns[processor.tower.columns.index(which)] for which in ("row", "column"))
    assert len(set(zip(row, column, strict=True))) == item.grid[1] * item.grid[2] == len(row)


@pytest.mark.parametrize("size", [(24, 40), (37, 91), (5, 7), (200, 150)], ids=str)
def test_pixels_of_glm_are_those_of_transformers(tmp_path, size):
    processor, value = opened(whole_checkpoint("glm4v_vision", tmp_path)), picture(1, *size)
    theirs = Glm4vImageProcessorPil(patch_size=4, size={"shortest_edge": 128, "longest_edge": 8192})
    expected = theirs(images=[value], return_tensors="np")
    item = processor.process("image", value, {})
    assert item.grid == tuple(expected["image_grid_thw"][0])
    np.testing.assert_allclose(item.patches, expected["pixel_values"], atol=1e-5)
    assert len(item.patches) <= len(processor.largest("image").patches)


def test_times_of_glm46_have_a_decimal(tmp_path):
    """Also in a checkpoint of GLM-4.5V's class, which GLM-4.6V has."""
    path = whole_checkpoint("glm4v_vision", tmp_path) / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processor_class": "Glm46VProcessor"}))
    processor = opened(tmp_path)
    item = processor.process("video", video(3, 4, 24, 56), {})
    said = processor.tokenizer.encode("1.2 seconds", False)
    assert processor.step_tokens(item, 1.25)[-len(said) :] == said


def test_windows_are_neighbours_and_none_is_too_long(processors):
    processor = processors["qwen2_5_vl_vision"]
    item = processor.process("video", video(3, 4, 24, 56), {})
    named = dict(zip(processor.tower.columns, item.columns, strict=True))
    assert (np.diff(named["window"]) >= 0).all() and (np.diff(named["segment"]) >= 0).all()
    assert np.bincount(named["window"]).max() <= processor.tower.window_size**2
    side = processor.tower.window_size
    for window in np.unique(named["window"]):
        inside = named["window"] == window
        for which in ("row", "column"):
            assert len(set(named[which][inside] // side)) == 1
        assert len(set(named["segment"][inside])) == 1


def test_options_bound_a_picture(processors):
    processor = processors["qwen2_vl_vision"]
    value = picture(1, 64, 64)
    assert processor.process("image", value, {}).num_rows == 64
    assert processor.process("image", value, {"max_pixels": 1024}).num_rows == 16
    assert processor.process("image", value, {"size": {"shortest_edge": 64, "longest_edge": 256}}).num_rows == 4
    assert processor.process("image", picture(1, 8, 8), {"min_pixels": 1024}).num_rows == 16
    for options, message in (
        ({"max_pixels": 0}, r"mm_processor_kwargs\.min_pixels, max_pixels or size must be .*max_pixels must be an int"),
        ({"min_pixels": 4097}, "min_pixels and max_pixels must be 1 <= min <= max"),
        ({"crop": 1}, "mm_processor_kwargs has 'crop'; this model has min_pixels, max_pixels, size"),
    ):
        with pytest.raises(RequestError, match=message):
            processor.process("image", value, options)


def test_options_of_an_engine_are_known_by_name(processors):
    for each in processors.values():
        assert each.with_options({"max_pixels": 100}) is each
        with pytest.raises(RequestError, match="mm_processor_kwargs has 'x'; this model has min_pixels"):
            each.with_options({"x": 1})
        with pytest.raises(RequestError, match="min_pixels, max_pixels or size must be"):
            each.with_options({"max_pixels": 0})
        for kind in each.modalities:
            larger = each.with_options({"max_pixels": 4 * each.sizes[kind].bounds.most}).largest(kind)
            assert len(larger.patches) > 1.9 * len(each.largest(kind).patches)


def test_what_is_no_picture_is_refused(processors):
    processor = processors["qwen2_vl_vision"]
    for value in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8), "picture"):
        with pytest.raises(RequestError, match=r"image must be uint8\[height, width, 3\], got"):
            processor.process("image", value, {})
    with pytest.raises(RequestError, match="at most 200 times the shorter one, got 3x900 pixels"):
        processor.process("image", np.zeros((900, 3, 3), np.uint8), {})


def test_the_largest_picture_is_no_smaller_than_any(processors):
    for processor in processors.values():
        largest = processor.largest("image")
        for size in ((500, 500), (1000, 90), (64, 64), (40, 100)):
            item = processor.process("image", picture(0, *size), {})
            assert len(item.patches) <= len(largest.patches)
            alike = processor.largest("image", size)
            assert alike.grid == item.grid and (alike.columns == item.columns).all() and alike.patches.size == 0
        assert [processor.largest("video", None, frames).grid[0] for frames in (None, 32, 8)] == [16, 16, 4]


@pytest.mark.parametrize("name", ["glm4v_vision", "hunyuan_vl_vision", "paddleocr_vl_vision", "qwen3_vl_vision"])
def test_no_strip_is_larger_than_the_largest(tmp_path, name):
    """Where few pixels are allowed, a strip has more of them; so has one that is enlarged to just as many."""
    processor = opened(whole_checkpoint(name, tmp_path))
    square = processor.factor**2 * (2 if name == "glm4v_vision" else 1)
    shapes = [(short, max(1, int(short * ratio / 7))) for short in (1, 3, 11, 64) for ratio in range(7, 1401, 13)]
    for least, most in ((1, 1), (1, 4), (1, 150), (4, 4), (100, 150), (300, 1000), (512, 512)):
        bounds, made = Bounds(least * square, most * square), []
        for high, wide in [*shapes, *((wide, high) for high, wide in shapes)]:
            made.append(processor.resized_size("image", 1, high, wide, bounds))
        line = name == "hunyuan_vl_vision"  # each line has one embedding more
        high, wide = (np.asarray([processor.largest_size("image", 1, bounds), *made]) // processor.factor).T
        count = high * (wide + line)
        assert count[0] >= count[1:].max() > 0.85 * count[0], (least, most)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_must_have_a_placeholder_for_each_picture(processors, name):
    processor = processors[name]
    assert processor.placeholder("image") == "<|vision_start|><|image_pad|><|vision_end|>"
    item = processor.process("image", picture(1, 16, 16), {})
    expanded = processor.expand([5, START, IMAGE, END, 6], {"image": [item]})
    assert expanded.token_ids == [5, START, *[IMAGE] * 4, END, 6] and expanded.order == [("image", 0)]
    np.testing.assert_array_equal(expanded.positions[0], [2, 3, 4, 5])
    assert expanded.rope_delta == -2
    for prompt, items in (([5, IMAGE, IMAGE], [item]), ([5], [item]), ([IMAGE], [])):
        with pytest.raises(
            RequestError, match=r"the prompt has \d of the image's placeholder, token 261, and \d images"
        ):
            processor.expand(prompt, {"image": items})


def test_videos_count_seconds_in_their_places(processors):
    clip = video(1, 6, 16, 16, fps=2.0)  # a step of two frames is a second, which is three places
    item = processors["qwen2_5_vl_vision"].process("video", clip, {})
    expanded = processors["qwen2_5_vl_vision"].expand([VIDEO, 7], {"video": [item]})
    np.testing.assert_array_equal(np.unique(expanded.rope_positions[0, :-1]), [0, 3, 6])
    # Text goes on behind the latest place, not behind the width: as Qwen2-VL's paper has it.
    np.testing.assert_array_equal(expanded.rope_positions[:, -1], [7, 7, 7])
    assert expanded.rope_delta == 8 - len(expanded.token_ids)
    with pytest.raises(RequestError, match="M-RoPE positions in time must be below 16777216, got 1.2e"):
        processors["qwen2_5_vl_vision"].times(item._replace(seconds=(0.0, 2e9, 4e9)))
    plain = processors["qwen2_vl_vision"]
    expanded = plain.expand([VIDEO, 7], {"video": [plain.process("video", clip, {})]})
    np.testing.assert_array_equal(np.unique(expanded.rope_positions[0, :-1]), [0, 1, 2])


def test_frames_of_a_video_stand_behind_their_times(processors, folders):
    processor = processors["qwen3_vl_vision"]
    item = processor.process("video", video(1, 3, 16, 16, fps=2.0), {})
    steps = []
    for shown in ("<0.2 seconds>", "<1.0 seconds>"):  # the middle of 0 and 0.5, and the last frame twice
        steps += [*Tokenizer.from_hf_folder(folders["qwen3_vl_vision"]).encode(shown), START, *[VIDEO] * 4, END]
    for prompt in ([5, START, VIDEO, END, 6], [5, VIDEO, 6]):
        expanded = processor.expand(prompt, {"video": [item]})
        assert expanded.token_ids == [5, *steps, 6]
        np.testing.assert_array_equal(np.asarray(expanded.token_ids)[expanded.positions[0]], [VIDEO] * 8)
    assert item.seconds == (0.25, 1.0)
    unknown = processor.process("video", video(1, 2, 16, 16, fps=None), {})
    assert unknown.seconds == (1 / 48,)


def test_places_of_pictures_and_text():
    runs = [EmbeddingRun(2, (1, 2, 3), np.arange(1)), EmbeddingRun(9, (2, 1, 1), np.asarray([0, 5]))]
    places, delta = mrope_positions(13, runs)
    np.testing.assert_array_equal(places[0], [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 11, 12, 13])
    np.testing.assert_array_equal(places[1], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 12, 13])
    np.testing.assert_array_equal(places[2], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 12, 13])
    assert delta == 14 - 13
    assert mrope_positions(3, [])[1] == 0


def test_settings_of_both_transformers_are_read(folders, tmp_path):
    folder = whole_checkpoint("qwen2_5_vl_vision", tmp_path / "five")
    five = json.loads((folder / "processor_config.json").read_text())
    ours = opened(folder)
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(five["image_processor"]))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(five["video_processor"]))
    assert opened(folder).settings == ours.settings
    (folder / "video_preprocessor_config.json").unlink()
    assert opened(folder).sizes["video"] == ours.sizes["image"]
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelFileError, match=r"has no preprocessor_config\.json"):
        opened(folder)


@each_row(
    ("name", "limit", "bounds", "shape", "grid"),
    [
        ("qwen2_5_vl_vision", 3, (64, 4096), (2, 50, 90), (1, 2, 4)),
        ("qwen2_5_vl_vision", 20, (64, 2000), (7, 30, 44), (4, 2, 4)),
        ("qwen2_5_vl_vision", 5, (640, 2000), (4, 16, 24), (2, 6, 8)),
        ("qwen2_5_vl_vision", 40, (64, 16384), (2, 50, 90), (1, 8, 16)),
        ("qwen3_vl_vision", 3, (64, 4096), (4, 16, 24), (2, 2, 4)),
        ("qwen3_vl_vision", 20, (64, 2000), (2, 50, 90), (1, 4, 10)),
        ("qwen3_vl_vision", 5, (640, 2000), (7, 30, 44), (4, 4, 6)),
        ("qwen3_vl_vision", 40, (64, 16384), (7, 30, 44), (4, 8, 12)),
    ],
)
def test_frames_share_the_pixels_of_a_video(tmp_path_factory, name, limit, bounds, shape, grid):
    """With cap_pixels_per_frame; grids are those of transformers' processors of videos."""
    folder = whole_checkpoint(name, tmp_path_factory.mktemp(name))
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["video_processor"] |= {"size": dict(zip(("shortest_edge", "longest_edge"), bounds, strict=True))}
    settings["video_processor"] |= {"cap_pixels_per_frame": True, "max_video_tokens": limit}
    path.write_text(json.dumps(settings))
    processor, (count, height, width) = opened(folder), shape
    made = processor.process("video", video(1, count, height, width), {})
    assert made.grid == grid and processor.largest("video", None, count).num_rows >= made.num_rows


@pytest.mark.parametrize("name", ["qwen2_5_vl_vision", "qwen3_vl_vision", "glm4v_vision", "lfm3_vl_vision"])
def test_bounds_of_videos_are_those_that_the_class_in_transformers_reads(tmp_path, name):
    """Only that of Qwen2-VL reads min_pixels and max_pixels beside `size`."""
    folder = whole_checkpoint(name, tmp_path)
    before, whole = opened(folder).sizes["video"].bounds, folder / "processor_config.json"
    path = whole if whole.exists() else folder / "video_preprocessor_config.json"
    found = json.loads(path.read_text())
    found.get("video_processor", found).update({"min_pixels": 2000, "max_pixels": 2500})
    path.write_text(json.dumps(found))
    assert opened(folder).sizes["video"].bounds == ((2000, 2500) if name == "qwen2_5_vl_vision" else before)


@pytest.mark.parametrize("name", ["qwen2_5_vl_vision", "qwen3_vl_vision", "glm4v_vision"])
def test_videos_whose_settings_are_of_another_tower_are_not_taken(tmp_path, name):
    """transformers writes its defaults for them where only images have settings."""
    folder = whole_checkpoint(name, tmp_path)
    assert opened(folder).modalities == ("image", "video")
    whole = folder / "processor_config.json"
    path = whole if whole.exists() else folder / "video_preprocessor_config.json"
    found = json.loads(path.read_text())
    found.get("video_processor", found)["patch_size"] = 14
    path.write_text(json.dumps(found))
    made = opened(folder)
    assert made.modalities == ("image",) and {*made.sizes} == {"image"}
    with pytest.raises(RequestError, match="video is not supported by this model; it takes image"):
        made.process("video", np.zeros((2, 16, 16, 3), np.uint8), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 14}, "patch_size must be 4 or absent, got 14"),
        ({"cap_pixels_per_frame": True}, "cap_pixels_per_frame must be false or absent, got True"),
        ({"do_resize": False}, "do_resize must be true or absent, got False"),
        ({"resample": 9}, "resample must be the number of one of Pillow's filters"),
        ({"image_std": [1, 1, 0]}, "image_std must be three numbers from 1e-06 to"),
        ({"max_pixels": 10}, "min_pixels and max_pixels must be 1 <= min <= max"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_used_are_refused(tmp_path, change, message):
    folder = whole_checkpoint("qwen2_vl_vision", tmp_path)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelFileError, match=message):
        opened(folder)


def test_tokens_of_pictures_must_be_in_the_vocabulary(folders):
    with pytest.raises(ModelConfigError, match="must be below vocab_size 272, got 300"):
        opened(folders["qwen2_vl_vision"], image_token_id=300)


def test_every_family_with_a_tower_has_a_processor():
    assert set(PROCESSORS) <= {*MODELS, *ENCODERS}
    blind = SimpleNamespace(tower=None)
    assert processor_for(None, {}, blind, None) is None  # type: ignore[arg-type]
