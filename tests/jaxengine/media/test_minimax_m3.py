"""Images and videos of MiniMax M3: settings, segments of videos, times in prompts, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxengine.media.processors.minimax_m3 import MiniMaxM3Processor
from jaxengine.media.processors.qwen2_vl import Bounds
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_hf
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.picture_checkpoints import picture, whole_checkpoint
from tests.models.families.pictures import video

NAME = "minimax_m3_odd_vision"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = whole_checkpoint(NAME, tmp_path_factory.mktemp(NAME))
    files = [folder / f"{kind}preprocessor_config.json" for kind in ("", "video_")]
    before = [json.loads(path.read_text()) for path in files]

    def opened(config: dict[str, Any] | None = None, tokenizer: bool = True, **changes: Any) -> MiniMaxM3Processor:
        raw = read_config_json(folder) | (config or {})
        for path, settings in zip(files, before, strict=True):
            path.write_text(json.dumps(settings | changes))
        return MiniMaxM3Processor(folder, raw, read_hf(raw), Tokenizer.from_hf_folder(folder) if tokenizer else None)

    return opened


def test_settings_count_as_in_transformers(opened):
    without = {"min_pixels": None, "max_pixels": None}
    usual, edges = (
        {"image": Bounds(3136, 451584), "video": Bounds(3136, 602112)},
        {"shortest_edge": 9, "longest_edge": 99},
    )
    for size, image in (([672, 672], usual["image"]), (None, usual["image"]), (edges, Bounds(9, 99))):
        sizes = opened(size=size, **without).sizes
        assert {kind: each.bounds for kind, each in sizes.items()} == usual | {"image": image}
    assert [opened(vision_segment_max_frames=steps).segment_steps for steps in (None, 3)] == [0, 3]
    tokens = {"image_token_id": 5, "image_token_index": 6, "video_token_id": None}
    assert opened(tokens).token_ids == {"image": 5, "video": 272}


@pytest.mark.parametrize(("steps", "segments"), [(None, [5]), (2, [2, 2, 1])])
def test_patches_see_those_of_a_few_steps(opened, steps, segments):
    made = opened(vision_segment_max_frames=steps)
    item = made.process("video", video(20, 5, 16, 24), {})
    named = dict(zip(made.tower.columns, item.columns, strict=True))
    np.testing.assert_array_equal(np.bincount(named["segment"]), np.asarray(segments) * 8 * 12)
    np.testing.assert_array_equal(named["frame"][:: 8 * 12], np.concatenate([np.arange(count) for count in segments]))


def test_prompts_state_times_that_are_known(opened):
    made = opened(vision_segment_max_frames=2)
    for fps, said in ((0.4, "]<]0.0 seconds[>["), (None, "")):
        item = made.process("video", video(20, 2, 16, 24, fps), {})
        ids = made.expand([272], {"video": [item]}).token_ids
        first = made.tokenizer.encode(f"{said}]<]start of image[>[", False)
        assert ids[: len(first)] == first and ids.count(272) == item.num_rows == 12


def test_what_is_not_possible_is_refused(opened):
    made, image = opened(), picture(1, 8, 8)
    with pytest.raises(RequestError, match="an item of image makes 16 patches"):
        made.process("image", image, {}, most=15)
    blind = opened(tokenizer=False)
    with pytest.raises(RequestError, match="a prompt with an image needs the model's tokenizer"):
        blind.expand([271], {"image": [blind.process("image", image, {})]})
    for changes, said in (
        ({"vision_segment_max_frames": 0}, "vision_segment_max_frames must be an integer >= 1"),
        ({"merge_size": 2}, "merge_size must be 4 or absent"),
        ({"size": [1, 2]}, "size must be a mapping"),
    ):
        with pytest.raises(ModelFileError, match=said):
            opened(**changes)
    with pytest.raises(ModelConfigError, match="video_token_id must be another token than that of images"):
        opened({"video_token_id": 271})
    with pytest.raises(ModelConfigError, match="must be below vocab_size 277, got 277"):
        opened({"video_token_id": 277})
