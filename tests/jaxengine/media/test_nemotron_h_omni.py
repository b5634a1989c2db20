"""Images and videos of Nemotron-H Omni: sizes, tokens around embeddings, rows of learned tokens, what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from jaxengine.media.processors.nemotron_h_omni import Budget, NemotronHOmniProcessor
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_hf
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.picture_checkpoints import picture, whole_checkpoint
from tests.models.families.pictures import video
from tests.tables import each_row

NAME = "nemotron_h_omni_odd_vision"
# (height, width) of an image, least and most patches of 2 x 2 pixels -> (rows, columns) that transformers has.
IMAGES = (
    (1, 1, 16, 256, 4, 4),
    (1, 150, 16, 256, 2, 76),
    (33, 47, 16, 256, 12, 20),
    (500, 501, 16, 256, 16, 16),
    (6, 10, 1, 256, 4, 6),  # 3.5 is rounded to 4, 5.5 to 6
    (4, 64, 1, 33, 2, 22),  # more than the most: one row of patches is two
    (1, 512, 16, 256, 2, 256),
)
# (height, width) of a frame, patches aimed at -> (rows, columns) that transformers has.
FRAMES = ((16, 24, 96, 8, 12), (33, 50, 96, 8, 12), (200, 100, 96, 14, 6), (5, 800, 96, 2, 124), (9, 9, 3, 2, 2))


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = whole_checkpoint(NAME, tmp_path_factory.mktemp(NAME))
    path = folder / "preprocessor_config.json"
    before = json.loads(path.read_text())

    def opened(config: dict[str, Any] | None = None, tokenizer: bool = True, **changes: Any) -> NemotronHOmniProcessor:
        raw = read_config_json(folder) | (config or {})
        path.write_text(json.dumps(before | changes))
        text = Tokenizer.from_hf_folder(folder) if tokenizer else None
        return NemotronHOmniProcessor(folder, raw, read_hf(raw), text)

    return opened


@each_row("height, width, least, most, rows, columns", IMAGES)
def test_sizes_of_images_are_those_of_transformers(opened, height, width, least, most, rows, columns):
    assert opened().image_grid(height, width, Budget(least, most, 1, False)) == (rows, columns)


@each_row("height, width, target, rows, columns", FRAMES)
def test_sizes_of_frames_are_those_of_transformers(opened, height, width, target, rows, columns):
    assert opened().frame_grid(height, width, Budget(1, 1, target, False)) == (rows, columns)


def test_settings_and_options(opened):
    usual = {"min_num_patches": None, "max_num_patches": None, "video_target_num_patches": None}
    assert opened(**usual).budget == Budget(1024, 13312, 1024, False)
    assert opened(**usual, max_model_len=1000, video_maintain_aspect_ratio=False).budget == Budget(
        1024, 3984, 1024, True
    )
    assert opened(min_num_patches=512, max_num_patches=0).budget == Budget(512, 65520, 96, False)
    made = opened()
    assert made.frame_grid(5, 800, Budget(1, 1, 30, True)) == (4, 4)
    assert math.prod(made.largest("image").grid) == 256 and made.largest("video", num_frames=4).grid[0] == 2
    more = made.with_options({"max_num_patches": 400, "video_target_num_patches": 4})
    assert more.budget == Budget(16, 400, 96, False) and made.budget.most == 256
    small = made.process("image", picture(1, 90, 70), {"min_num_patches": 1, "max_num_patches": 16})
    assert math.prod(small.grid) <= 16


def test_learned_tokens_have_rows_before_each_step(opened):
    made = opened({"video_pruning_rate": 0.7})  # as published; all embeddings are kept
    item = made.process("video", video(20, 5, 16, 24), {})
    named = dict(zip(made.tower.columns, item.columns, strict=True))
    assert item.grid == (2, 8, 12) and item.num_rows == 48 and len(item.patches) == 2 * (96 + 4)
    # One token, behind three patches that nothing sees.
    np.testing.assert_array_equal(named["segment"][:5], [-1, -1, -1, 0, 0])
    np.testing.assert_array_equal(named["kind"][[3, 4, 103, 104]], [2, 1, 2, 1])
    np.testing.assert_array_equal(item.rows, [-1, *range(24), -1, *range(24, 48)])
    assert made.process("image", picture(1, 8, 8), {}).columns[1, -1] == 0


def test_frames_have_numbers_and_known_times(opened):
    made = opened()
    for fps, said in (
        (60.0, ["Frame 1{0.00} and frame 2{0.02} and frame 3{0.03}: ", "\nFrame 4{0.05}: "]),  # of 16 milliseconds
        (None, ["Frame 1 and frame 2 and frame 3: ", "\nFrame 4: "]),
    ):
        item = made.process("video", video(20, 4, 16, 24, fps), {})
        wanted = "".join(f"{each}<img>{'<image>' * 24}</img>" for each in said)
        wanted = wanted.replace("{", " sampled at ").replace("}", " seconds")
        assert made.expand([276], {"video": [item]}).token_ids == made.tokenizer.encode(wanted)
    assert made.encode("a<video>b", made.tokenizer.encode("a<video>b")) == [*made.tokenizer.encode("a"), 276, 98 - 33]


def test_what_is_not_possible_is_refused(opened):
    made, image = opened(), picture(1, 8, 8)
    for options, said in (({"max_pixels": 4}, "has 'max_pixels'"), ({"max_num_patches": 0}, "an integer from 1 to")):
        with pytest.raises(RequestError, match=said):
            made.process("image", image, options)
    with pytest.raises(RequestError, match="an item of image makes 20 patches"):
        made.process("image", image, {}, most=19)
    blind = opened(tokenizer=False)
    with pytest.raises(RequestError, match="a prompt with an image needs the model's tokenizer"):
        blind.expand([271], {"image": [blind.process("image", image, {})]})
    for changes, said in (
        ({"patch_size": 14}, "patch_size must be 2 or absent"),
        ({"downsample_ratio": 0.25}, "downsample_ratio must be 0.5 or absent"),
        ({"norm_mean": None}, "norm_mean must be three numbers, for frames of videos"),
        ({"max_num_patches": 1 << 17}, "max_num_patches must be 0 to 65536"),
    ):
        with pytest.raises(ModelFileError, match=said):
            opened(**changes)
    with pytest.raises(ModelConfigError, match="must be below vocab_size 276, got 300"):
        opened({"image_token_id": 300})
    narrow = picture(1, 1, 4000)
    with pytest.raises(RequestError, match="an image of 4000x1 pixels is too narrow to be shrunk to 256 patches of 2"):
        made.process("image", narrow, {})
