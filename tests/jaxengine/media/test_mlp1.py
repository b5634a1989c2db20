"""Processors of H2OVL, NVLM-D, Eagle 2.5 and Ovis2.5: tiles, texts around embeddings, options, what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxengine.media.registry import processor_for
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_hf
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.nemotron_vl_models import EMBED, make
from tests.fixtures.picture_checkpoints import picture as square
from tests.fixtures.picture_checkpoints import whole_checkpoint
from tests.fixtures.unit_pictures import CASES, picture, write_files
from tests.models.families.pictures import video


def opened(folder, name: str, config: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The processor of a recorded case, with other fields of config.json and other settings."""
    write_files(folder, name)
    if changes:
        (folder / "preprocessor_config.json").write_text(json.dumps(CASES[name]["images"] | changes))
    raw = read_config_json(FOLDER / name) | (config or {})
    return processor_for(folder, raw, read_hf(raw), Tokenizer.from_hf_folder(folder))


def test_h2ovl_cuts_the_only_image_twice(tmp_path):
    made = opened(tmp_path, "h2ovl_vision")
    # 24 x 72 pixels: one by three tiles, and of the tilings that count besides the nearest, of two by two.
    wide = np.zeros((24, 72, 3), np.uint8)
    assert made.process("image", wide, {}).num_rows == 4 * (4 + 3 + 1)
    assert made.among({}, {"image": 1}) == {} and made.among({}, {"image": 2}) == {"use_msac": False}
    assert made.among({"use_msac": True}, {"image": 2}) == {"use_msac": True}
    for options, tiles in (({"use_msac": False}, 3 + 1), ({"crop_to_patches": False}, 1), ({"max_patches": 1}, 1)):
        assert made.process("image", wide, options).num_rows == 4 * tiles
    # The first of a square's tilings has one tile, which does not count.
    assert made.process("image", picture(3), {}).num_rows == 4 * (4 + 1)
    most = max(made.num_units(*size, {}) for side in range(20, 200, 3) for size in ((200, side), (side, 200)))
    assert len(made.largest("image").patches) == most * made.tower.unit
    larger = made.with_options({"max_patches": 9})
    assert larger.max_tiles == 9 and larger.twice and not made.with_options({"use_msac": False}).twice
    with pytest.raises(RequestError, match="use_msac must be true or false"):
        made.process("image", wide, {"use_msac": 1})
    with pytest.raises(RequestError, match="video is not supported by this model; it takes image"):
        made.process("video", video(1, 2, 24, 24), {})


def test_texts_of_nvlm_d(tmp_path):
    made = opened(tmp_path, "nvlm_d_vision")
    tokens = made.tokenizer.convert_ids_to_tokens(
        made.pieces(made.process("image", np.zeros((24, 48, 3), np.uint8), {}))
    )
    pads = ["<|vision_pad|>"] * 4
    assert tokens == ["<Image>", "<tile_1>", *pads, "<tile_2>", *pads, "<tile_global_thumbnail>", *pads, "</Image>"]
    alone = made.pieces(made.process("image", picture(3), {"crop_to_patches": False}))
    assert alone == made.tokenizer.encode(f"<Image><tile_global_thumbnail>{''.join(pads)}</Image>")
    with pytest.raises(RequestError, match="embeddings of an image of this model must be 4, those of one tile"):
        made.grid_of(8, None)
    with pytest.raises(ModelFileError, match="use_thumbnail must be true, got False"):
        opened(tmp_path, "nvlm_d_vision", {"use_thumbnail": False})


def test_images_of_eagle_have_numbers(tmp_path):
    made = opened(tmp_path, "eagle2_5_vision")
    assert (made.max_tiles, made.adds_whole, made.image_id) == (6, True, 127)
    item = made.process("image", picture(3), {})
    text = "w5 <image-1> w6 <image-2>"
    ids = made.encode(text, made.tokenizer.encode(text))
    assert (
        ids == [5, 127, 6, 127] == made.encode("w5 <image> w6 <image>", made.tokenizer.encode("w5 <image> w6 <image>"))
    )
    found = made.expand(ids, {"image": [item, item]}).token_ids
    image = [126, *[127] * item.num_rows, 125]
    assert found == [5, 124, *image, 6, 123, *image]
    for wrong in ("<image-2> <image-1>", "<image-1> <image-3>"):
        with pytest.raises(RequestError, match=r"allowed: 1, 2, \.\.\. in this order"):
            made.encode(wrong, made.tokenizer.encode(wrong))
    for changes, said in (
        ({"pad_during_tiling": True}, "pad_during_tiling must be false or absent"),
        ({"max_dynamic_tiles": 65}, "max_patches must be from min_patches 1 to 64"),
    ):
        with pytest.raises(ModelFileError, match=said):
            opened(tmp_path, "eagle2_5_vision", None, **changes)
    for field, value in (("mlp_connector_layers", 1), ("use_pixel_shuffle", False), ("ps_version", "v1")):
        with pytest.raises(ModelConfigError, match=f"{field} must be"):
            read_hf(read_config_json(FOLDER / "eagle2_5_vision") | {field: value})


def test_settings_of_nemotron_embed(tmp_path):
    raw = read_config_json(make(tmp_path, EMBED))
    tokenizer = Tokenizer.from_hf_folder(tmp_path)
    made: Any = processor_for(tmp_path, raw, read_hf(raw), tokenizer)
    assert (made.min_tiles, made.max_tiles, made.crops, made.image_id) == (1, 4, True, 127)
    (tmp_path / "processor_config.json").unlink()  # then those of config.json
    made = processor_for(tmp_path, raw | {"max_dynamic_patch": 3}, read_hf(raw), tokenizer)
    assert (made.max_tiles, made.pixels.mean) == (3, (0.5, 0.5, 0.5))
    with pytest.raises(ModelFileError, match="force_image_size must be 24, the tower's image_size, got 32"):
        processor_for(tmp_path, raw | {"force_image_size": 32}, read_hf(raw), tokenizer)


def test_tiles_of_ovis_have_margins(tmp_path):
    made = opened(tmp_path, "ovis_vision")
    assert (made.max_tiles, made.indicators, made.embedded_ids) == (9, (127,) * 5, (127,))
    item = made.process("image", np.full((24, 60, 3), 255, np.uint8), {})
    # The whole, and three tiles of which the last is no wider than the others; four embeddings each, and five around.
    assert (item.num_rows, item.grid) == (4 * 4 + 5, (1, 4, 12)) and made.pieces(item) == [127] * 21
    whole = item.patches.reshape(-1, made.tower.unit, 108)[0, :16].reshape(4, 4, 3, 6, 6).transpose(0, 3, 1, 4, 2)
    lines = whole.reshape(24, 24, 3).any(axis=(1, 2))
    assert lines.tolist() == [False] * 7 + [True] * 9 + [False] * 8  # zeros after normalising, not before
    assert made.grid_of(21, None) == (1, 1, 21) and made.grid_of(7, None) == (1, 1, 7)
    for rows, grid in ((8, None), (7, (1, 4, 4))):
        with pytest.raises(RequestError, match="must be one of 7, 16, 21, .*; they have no grid"):
            made.grid_of(rows, grid)
    raw = read_config_json(FOLDER / "ovis_vision")
    words = raw["visual_tokenizer_config"]
    wrong = {"backbone_config": words["backbone_config"] | {"model_type": "siglip_vision_model"}}
    for changes, said in (
        (wrong, "backbone_config.model_type"),
        ({"tokenize_function": "gumbel_argmax"}, "tokenize_function"),
    ):
        with pytest.raises(ModelConfigError, match=f"{said} must be"):
            read_hf(raw | {"visual_tokenizer_config": words | changes})


def test_sizes_and_tokens_of_ovis2_5(tmp_path):
    folder = whole_checkpoint("ovis2_5_vision", tmp_path)
    raw = read_config_json(folder)
    made: Any = processor_for(folder, raw, read_hf(raw), Tokenizer.from_hf_folder(folder))
    bounds = made.sizes["image"].bounds
    # As the published code has it: only the shorter side of a small image is enlarged to a square's.
    for size, wanted in (((6, 4), (16, 8)), ((4, 6), (8, 16)), ((30, 41), (32, 40)), ((3, 30), (8, 80))):
        assert made.resized_size("image", 1, *size, bounds) == wanted
    item = made.process("image", square(1, 24, 40), {})
    assert item.num_rows == 3 * 5 + 2 and item.grid == (1, 6, 10) and made.grid_of(17, (1, 6, 10)) == (1, 6, 10)
    marks = item.columns[made.tower.columns.index("mark")]
    assert marks[:-8].max() == 0 and marks[-8:].tolist() == [1] * 4 + [2] * 4
    assert item.rows[-2:].tolist() == [0, 16] and sorted(item.rows) == list(range(17))
    shown = made.process("video", video(1, 3, 16, 16), {})
    assert shown.num_rows == 3 * 4 + 2 and shown.columns[-1, -1] == 4
    text = "a<video>b<image>"
    ids = made.encode(text, made.tokenizer.encode(text))
    assert ids == [*made.tokenizer.encode("a"), 262, *made.tokenizer.encode("b"), 261]
    expanded = made.expand(ids, {"image": [item], "video": [shown]})
    assert expanded.token_ids.count(261) == 17 + 14 and expanded.order == [("video", 0), ("image", 0)]
    with pytest.raises(RequestError, match="makes 68 patches of pixels; at most 67"):
        made.process("image", square(1, 24, 40), {}, most=67)
    for rows, grid in ((1, (1, 2, 2)), (17, None), (15, (1, 6, 10))):
        with pytest.raises(RequestError, match="embeddings of an image"):
            made.grid_of(rows, grid)
    for field, value in (("fullatt_block_indexes", "1|2"), ("temporal_patch_size", 2), ("num_patches", 24)):
        with pytest.raises(ModelConfigError, match=f"vit_config.{field} must be"):
            read_hf(raw | {"vit_config": raw["vit_config"] | {field: value}})
