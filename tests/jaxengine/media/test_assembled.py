"""Processors of models that see and that transformers lacks: tiles, sizes, options, what is refused."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxengine.media.processors.deepseek_vl2 import DeepseekVL2Processor
from jaxengine.media.processors.tiles import largest_share, nearest_tiling, tilings
from jaxengine.media.registry import processor_for
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_folder, read_hf
from jaxengine.requests.media.inputs import MediaInputs
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.picture_checkpoints import FILES, picture, whole_checkpoint
from tests.fixtures.unit_pictures import CASES, write_files
from tests.models.families.pictures import video
from tests.tables import each_row

NEMOTRONS = ("nemotron_nano_vl_vision", "llama_nemotron_vl_vision")
# (height, width) of an image in up to twelve tiles of 512 pixels -> (rows, columns) that vLLM has for Llama Nemotron
# Nano VL, which counts how many pixels are kept, and for Nemotron Nano V2 VL, which does not.
TILINGS = (
    (512, 512, (1, 1), (1, 1)),
    (300, 1000, (1, 3), (1, 3)),
    (2000, 2000, (3, 3), (3, 3)),
    (4000, 1000, (6, 2), (4, 1)),
    (700, 500, (4, 3), (4, 3)),
    (90, 3000, (1, 12), (1, 12)),
)


@each_row("height, width, by_share, by_ratio", TILINGS)
def test_tilings_are_those_of_vllm(height, width, by_share, by_ratio):
    listed = tilings(1, 12)
    assert largest_share(height, width, 512, listed) == by_share
    assert nearest_tiling(height, width, 512, listed) == by_ratio


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    names = (*NEMOTRONS, "opencua_vision", "keye_vision", "keye1_5_vision")
    return {name: whole_checkpoint(name, tmp_path_factory.mktemp(name)) for name in names}


def opened(folders, name: str, config: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The processor of a recorded case, with other settings, and other fields of config.json."""
    folder = folders[name]
    settings = FILES[name]["preprocessor_config.json"] | changes
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    raw = read_config_json(folder)
    return processor_for(folder, raw | (config or {}), read_folder(folder, raw), Tokenizer.from_hf_folder(folder))


def test_tiles_of_nemotrons(folders):
    for name in NEMOTRONS:
        made = opened(folders, name)
        assert (made.side, made.max_tiles, made.adds_whole, made.token_ids["image"]) == (16, 6, True, 271)
        item = made.process("image", picture(1, 24, 40), {})
        # Six tiles and the whole, each with one row of learned tokens before its four.
        assert (item.grid, item.num_rows, len(item.patches)) == ((7, 4, 4), 28, 7 * (16 + 4))
        assert made.process("image", picture(1, 24, 40), {"max_num_tiles": 1}).num_rows == 4
        assert made.process("image", picture(1, 16, 16), {}).grid == (1, 4, 4)
        assert len(made.largest("image").patches) == len(made.largest("image", (24, 40)).patches) == len(item.patches)
        assert made.with_options({"max_num_tiles": 9}).largest("image").grid == (10, 4, 4)
        assert made.with_options({"max_num_tiles": 2}).largest("image").grid == (7, 4, 4)
        bare = opened(folders, name, {"use_thumbnail": False})
        assert bare.process("image", picture(1, 24, 40), {}).num_rows == 24
        assert made.grid_of(28, None) == made.grid_of(28, (7, 4, 4)) == (7, 4, 4)


def test_videos_of_nemotrons(folders):
    made = opened(folders, NEMOTRONS[0])
    item = made.process("video", video(20, 3, 16, 24, 0.5), {})
    assert item.grid == made.largest("video", num_frames=3).grid == (3, 4, 4) and item.num_rows == 12
    said = "".join(
        f"{line}Frame {n + 1} sampled at {2 * n:.2f} seconds: <img>{'<image>' * 4}</img>"
        for n, line in enumerate(("", "\n", "\n"))
    )
    assert made.expand([276], {"video": [item]}).token_ids == made.tokenizer.encode(said)
    other = opened(folders, NEMOTRONS[1])
    assert other.modalities == ("image",) and other.encode("<video>", [1, 2]) == [1, 2]
    with pytest.raises(RequestError, match="video is not supported by this model; it takes image"):
        other.process("video", video(20, 3, 16, 24), {})


def test_only_a_prompt_with_videos_has_a_place_for_them(folders):
    """What a user writes of <video> beside an image stays text."""
    made = opened(folders, NEMOTRONS[0])
    options = {"mm_processor_kwargs": None, "max_model_len": 256, "mm_processor_cache_bytes": 0}
    limits = {"max_encoder_patches": 1024, "num_encoder_rows": 256, "mm_limit": lambda modality: 1}
    config: Any = SimpleNamespace(**options, **limits)
    inputs, text = MediaInputs(made, [made.tower], config), "<image>a<video>"
    shown: Any = {"image": [picture(1, 16, 16)], "video": [video(20, 1, 16, 16)]}
    load: Any = SimpleNamespace(load_now=lambda parts: {part.modality: shown[part.modality] for part in parts})
    inputs.reader = SimpleNamespace(loader=load)  # pyright: ignore[reportAttributeAccessIssue]
    ids = made.tokenizer.encode(text)
    found = inputs.made_ready({"multi_modal_data": {"image": shown["image"]}}, text, ids)["prompt_token_ids"]
    assert made.tokenizer.decode(found) == "a<video>" and found.count(271) == 4
    both = inputs.made_ready({"multi_modal_data": shown}, text, ids)["prompt_token_ids"]
    assert made.tokenizer.decode(both).startswith("aFrame 1") and both.count(271) == 8


def test_what_nemotrons_refuse(folders):
    for name in NEMOTRONS:
        made, image = opened(folders, name), picture(1, 24, 40)
        for options, said in (({"max_pixels": 4}, "has 'max_pixels'"), ({"max_num_tiles": 0}, "an integer from 1 to")):
            with pytest.raises(RequestError, match=said):
                made.process("image", image, options)
        with pytest.raises(RequestError, match="an item of image makes 140 patches"):
            made.process("image", image, {}, most=139)
        with pytest.raises(RequestError, match="the longer side of an image must be at most 200 times"):
            made.process("image", picture(1, 1, 201), {})
        for rows, grid in ((3, None), (28, (1, 4, 28)), (0, None)):
            with pytest.raises(RequestError, match="embeddings of an image of this model must be a multiple of 4"):
                made.grid_of(rows, grid)
        wrong: dict[str, Any] = {"image_size": 32, "max_num_tiles": 65, "downsample_ratio": 0.25}
        allowed = "16 or absent", "from 1 to 64", "0.5 or absent"
        for (field, value), said in zip(wrong.items(), allowed, strict=True):
            with pytest.raises(ModelFileError, match=f"{field} must be {said}"):
                opened(folders, name, **{field: value})
        for side in (12, 48):
            with pytest.raises(ModelConfigError, match="force_image_size must be a multiple of 8, at most 40"):
                opened(folders, name, {"force_image_size": side})


def test_tokens_and_sizes_of_opencua_and_keye(folders):
    made = opened(folders, "opencua_vision")
    assert made.placeholder("image") == "<|media_begin|>image<|media_content|><|image_pad|><|media_end|>"
    with pytest.raises(ValueError, match="token ids of images must be below vocab_size 272, got 151664"):
        opened(folders, "opencua_vision", {"media_placeholder_token_id": 151664})
    keye, images = opened(folders, "keye_vision"), opened(folders, "keye1_5_vision")
    assert (keye.modalities, images.modalities) == (("image", "video"), ("image",))
    item = keye.process("video", video(20, 3, 16, 24), {})
    # All frames are one segment, and one after the other in the prompt.
    assert item.grid == (3, 4, 6) and set(item.columns[keye.tower.columns.index("segment")]) == {0}
    places = keye.expand([5, 262, 6], {"video": [item]}).rope_positions
    assert places[:, [0, 1, 7, 13, 18, 19]].tolist() == [[0, 1, 4, 7, 7, 10], [0, 1, 4, 7, 8, 10], [0, 1, 4, 7, 9, 10]]


def test_of_a_strip_r_and_bee_see_the_whole_image_alone(tmp_path):
    """No line of patches is left of its tiles, as in transformers."""
    for name in ("r_vision", "bee_vision"):
        write_files(tmp_path, name)
        raw = read_config_json(FOLDER / name)
        made: Any = processor_for(tmp_path, raw, read_hf(raw), Tokenizer.from_hf_folder(tmp_path))
        with warnings.catch_warnings(action="error"):
            item = made.process("image", picture(1, 1, 200), {})
        assert sorted(item.rows[item.rows >= 0]) == list(range(item.num_rows)) and item.num_rows == 16


def vl2(folder, name: str = "deepseek_vl2_vision", **changes: Any) -> DeepseekVL2Processor:
    write_files(folder, name)
    (folder / "processor_config.json").write_text(json.dumps(CASES[name]["images"] | changes))
    raw = read_config_json(FOLDER / name)
    return DeepseekVL2Processor(folder, raw, read_hf(raw), Tokenizer.from_hf_folder(folder))


def test_images_of_deepseek_vl2(tmp_path):
    made = vl2(tmp_path)
    assert made.largest_size() == (64, 64) and made.colour == [127] * 3
    item, alone = (made.process("image", picture(1, 60, 64), options) for options in ({}, {"crop_to_patches": False}))
    # The whole in three lines of three and an end, what is between, and tiles of two by two, or one.
    assert item.num_rows == 12 + 1 + 6 * 7 and alone.num_rows == 12 + 1 + 3 * 4
    for kept in (item, alone):
        assert sorted(kept.rows[kept.rows >= 0]) == list(range(kept.num_rows))
        assert made.grid_of(kept.num_rows, None) == (1, 1, kept.num_rows)
    assert len(made.largest("image").patches) == 5 * made.tower.unit
    # Of three images none is cut, unless the request says so; options are part of what is cached.
    assert made.among({}, {"image": 2}) == {} and made.among({}, {"image": 3}) == {"crop_to_patches": False}
    assert made.among({"crop_to_patches": True}, {"image": 3}) == {"crop_to_patches": True}
    white = np.full((8, 32, 3), 255, np.uint8)
    patches = made.process("image", white, {}).patches.reshape(-1, made.tower.unit, 108)[0, :25].reshape(5, 5, -1)
    # Twelve lines of margin above, of the mean's colour.
    assert np.abs(patches[:2]).max() < 0.01 and patches[2].min() == 1 and np.abs(patches[4]).max() < 0.01


def test_images_among_many_are_not_cut(tmp_path):
    """The third image of a prompt takes tiles from all of them, and what is cached of two is not that of three."""
    made: Any = vl2(tmp_path)
    options = {"mm_processor_kwargs": None, "max_model_len": 256, "mm_processor_cache_bytes": 1 << 20}
    config: Any = SimpleNamespace(**options, max_encoder_patches=1024, num_encoder_rows=256)
    inputs, shown = MediaInputs(made, [made.tower], config), [picture(seed, 60, 64) for seed in range(3)]

    def read(count: int, options: Any = None) -> list[tuple[int, bool | None]]:
        _, media = inputs.read([5, *[127] * count], {"image": shown[:count]}, options)
        assert media is not None
        return [(len(item.positions), item.cached) for item in media.items]

    assert read(2) == [(55, False)] * 2 and read(3) == [(25, False)] * 3
    assert read(2) == [(55, True)] * 2 and read(3, {"crop_to_patches": True})[0] == (55, False)


@each_row(
    "changes, message",
    (
        (
            {"candidate_resolutions": [[32, 40]]},
            "all multiples of the tower's image_size 32",
        ),
        ({"candidate_resolutions": []}, "a list of [width, height]"),
        ({"candidate_resolutions": [[32 * 9, 32 * 8]]}, "candidate_resolutions must be of at most 64 tiles each"),
        ({"patch_size": 14}, "patch_size must be 6 or absent"),
        ({"downsample_ratio": 4}, "downsample_ratio must be 2 or absent"),
    ),
)
def test_what_deepseek_vl2_refuses_of_settings(tmp_path, changes, message):
    with pytest.raises(ModelFileError) as error:
        vl2(tmp_path, **changes)
    assert message in str(error.value)


def test_what_deepseek_vl2_refuses_of_requests(tmp_path):
    made = vl2(tmp_path)
    with pytest.raises(RequestError, match="an item of image makes 260 patches"):
        made.process("image", picture(1, 60, 64), {}, most=259)
    with pytest.raises(RequestError, match="must be one of 25, 34, 37, 43, 49, 55; they have no grid; got 24"):
        made.grid_of(24, None)
    with pytest.raises(ModelConfigError, match="the tokenizer must have the token '<pic> w3' of images"):
        vl2(tmp_path, image_token="<pic> w3")
