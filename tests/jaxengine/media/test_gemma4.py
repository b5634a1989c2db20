"""Gemma 4's processor: pixels and sizes as transformers has them, frames with their times, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from jaxengine.media.registry import processor_for
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_folder, read_hf
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.picture_checkpoints import frames, picture, whole_checkpoint
from tests.tables import each_row

BEGIN, END, IMAGE, VIDEO = 267, 268, 269, 270
NAME, BOTH_WAYS = "gemma4_pictures_vision", "gemma4_both_ways_vision"


def opened(folder: Path, tokenizer: bool = True, **vision: Any) -> Any:
    raw = read_config_json(folder)
    raw = {**raw, "vision_config": raw["vision_config"] | {"position_embedding_size": 400, **vision}}
    tokens = Tokenizer.from_hf_folder(folder) if tokenizer else None
    return processor_for(folder, raw, read_hf(raw), tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return whole_checkpoint(NAME, tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def processor(folder):
    return opened(folder)


@each_row(
    ("size", "budget"),
    [((24, 40), 70), ((37, 61), 140), ((300, 151), 70), ((8, 8), 140), ((4, 400), 70), ((700, 5), 70), ((2, 390), 70)],
)
def test_pixels_are_those_of_transformers(processor, size, budget):
    value = picture(1, *size)
    theirs = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=budget)(
        images=[value], return_tensors="np", input_data_format="channels_last"
    )
    item = processor.process("image", value, {"max_soft_tokens": budget})
    assert item.num_rows == theirs["num_soft_tokens_per_image"][0] <= budget
    places, pixels = theirs["image_position_ids"][0], theirs["pixel_values"][0]
    wanted = {tuple(at): patch for at, patch in zip(places, pixels, strict=True)}
    assert item.columns.shape[1] == 4 * item.num_rows and not item.columns[0].any()
    for patch, (_, row, column) in zip(item.patches, item.columns.T, strict=True):
        np.testing.assert_allclose(patch, wanted[column, row], atol=1e-6)
    # Those of one embedding are neighbours.
    squares = item.columns[1:].reshape(2, -1, 4) // 2
    assert (squares == squares[:, :, :1]).all()


def test_a_prompt_has_marks_around_images_and_times_before_frames(processor):
    item = processor.process("image", picture(1, 24, 40), {})
    video = SimpleNamespace(frames=frames(2, 2, 16, 24), frames_indices=np.asarray([0, 130]), fps=2.0)
    shown = processor.process("video", video, {})
    assert item.num_rows == 15 and shown.grid == (2, 2, 4) and shown.num_rows == 4 and shown.seconds == (0.0, 65.0)
    expanded = processor.expand([5, VIDEO, 6, IMAGE, 7], {"image": [item], "video": [shown]})
    frame = [BEGIN, VIDEO, VIDEO, END]
    times = [processor.tokenizer.encode(text, False) for text in ("00:00 ", " 01:05 ")]
    assert expanded.token_ids == [5, *times[0], *frame, *times[1], *frame, 6, BEGIN, *[IMAGE] * 15, END, 7]
    assert expanded.order == [("video", 0), ("image", 0)] and expanded.rope_positions is None
    for positions, token in zip(expanded.positions, (VIDEO, IMAGE), strict=True):
        np.testing.assert_array_equal(positions, np.flatnonzero(np.asarray(expanded.token_ids) == token))
    assert processor.placeholder("image") == "<|image|>" and processor.placeholder("video") == "<|video|>"


def test_budgets(processor, folder):
    value = picture(1, 60, 64)
    for budget in (70, 140):
        assert budget - 20 < processor.process("image", value, {"max_soft_tokens": budget}).num_rows <= budget
    assert processor.with_options({"max_soft_tokens": 140}).largest("image").num_rows == 140
    assert processor.largest("image").num_rows == 15 and processor.largest("image", (16, 8)).num_rows <= 15
    for budget in (71, 280, True, "70"):  # a side of the longest image would have more patches than positions
        with pytest.raises(RequestError, match=r"max_soft_tokens must be one of 4, 15, 70, 140, got"):
            processor.process("image", value, {"max_soft_tokens": budget})
    with pytest.raises(RequestError, match="mm_processor_kwargs has 'size'; this model has max_soft_tokens"):
        processor.process("image", value, {"size": 3})
    with pytest.raises(RequestError, match="makes 60 patches of pixels; at most 59 are possible"):
        processor.process("image", picture(1, 24, 40), {}, 59)
    with pytest.raises(RequestError, match="a video needs the model's tokenizer"):
        item = processor.process("video", frames(2, 2, 16, 24), {})
        opened(folder, tokenizer=False).expand([VIDEO], {"video": [item]})


def test_what_sees_in_both_directions_takes_no_video(tmp_path):
    processor = opened(whole_checkpoint(BOTH_WAYS, tmp_path))
    assert processor.modalities == ("image",) and processor.tower.in_windows_only
    with pytest.raises(RequestError, match="video is not supported by this model; it takes image"):
        processor.process("video", frames(2, 2, 16, 24), {})


def test_frames_have_a_budget_of_their_own_where_files_do_not_say(tmp_path):
    folder = whole_checkpoint(NAME, tmp_path)
    settings = json.loads((folder / "processor_config.json").read_text())
    settings.pop("video_processor")
    (folder / "processor_config.json").write_text(json.dumps(settings))
    processor = opened(folder)
    assert processor.sizes["image"].budget == 15 and processor.sizes["video"].budget == 70


@each_row(
    ("changes", "message"),
    [
        ({"max_soft_tokens": 300}, "max_soft_tokens must be 1 to 200, with which every patch has"),
        ({"pooling_kernel_size": 3}, "pooling_kernel_size must be 2 or absent, got 3"),
        ({"patch_size": 16}, "patch_size must be 4 or absent, got 16"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(tmp_path, changes, message):
    folder = whole_checkpoint(NAME, tmp_path)
    settings = json.loads((folder / "processor_config.json").read_text())
    settings["image_processor"] |= changes
    (folder / "processor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelFileError, match=message):
        opened(folder)


@each_row(
    ("changes", "message"),
    [
        (
            {"num_key_value_heads": 3},
            "vision_config.num_key_value_heads must be a divisor of num_attention_heads = 2, got 3",
        ),
        ({"head_dim": 10}, "vision_config.head_dim must be a multiple of 4"),
        ({"hidden_activation": "selu"}, "vision_config.hidden_activation must be"),
        ({"pooling_kernel_size": 9}, "vision_config.pooling_kernel_size must be 1 to 8"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "vision_config.rope_parameters must be a mapping with the",
        ),
    ],
)
def test_towers_that_are_not_built_are_refused(folder, changes, message):
    with pytest.raises(ModelConfigError, match=message):
        opened(folder, **changes)


def test_a_tower_that_is_not_described_is_that_of_e2b(folder):
    raw = read_config_json(folder)
    tower: Any = read_hf({**raw, "vision_config": {"model_type": "gemma4_vision"}}).tower
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.head_dim) == (768, 16, 12, 64)
    assert (tower.patch_size, tower.merge, tower.unit, tower.num_positions) == (16, 9, 288, 10240)
    assert not (tower.clipped or tower.standardized or tower.attends_both_ways)
    stored: Any = read_folder(folder).tower
    assert stored.clipped
