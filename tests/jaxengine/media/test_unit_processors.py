"""Pictures as squares: settings, options and prompts beyond those that are recorded with checkpoints
(tests/models/families/test_unit_pictures.py), and what is refused. Pixels are compared with transformers' over Pillow.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from jaxengine.media.base.frames import Video
from jaxengine.media.processors.llava_next import LlavaNextProcessor
from jaxengine.media.processors.llava_onevision import LlavaOnevisionProcessor
from jaxengine.media.processors.smolvlm import in_words
from jaxengine.media.registry import processor_class
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_hf
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.unit_pictures import CASES, picture, write_files


def processor(folder, name: str, **changes: Any):
    """The processor of a recorded case, with other settings."""
    write_files(folder, name)
    (folder / "preprocessor_config.json").write_text(json.dumps(CASES[name].get("images", {}) | changes))
    raw = read_config_json(FOLDER / name)
    return processor_class(read_hf(raw).architecture)(folder, raw, read_hf(raw), Tokenizer.from_hf_folder(folder))


def as_units(made, processed) -> np.ndarray:
    """f32[units, 3, side, side]"""
    grid = made.side // made.patch
    patches = processed.patches.reshape(-1, made.tower.unit, processed.patches.shape[1])[:, : grid**2]
    cut = patches.reshape(-1, grid, grid, 3, made.patch, made.patch)
    return cut.transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, made.side, made.side)


@pytest.mark.parametrize(
    ("name", "module", "options"),
    [
        ("llava_vision", "llava.image_processing_pil_llava.LlavaImageProcessorPil", {"do_pad": True}),
        ("internvl_vision", "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil", {"max_patches": 9}),
        (
            "gemma3_sees_vision",
            "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
            {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 3}
            | {"pan_and_scan_min_ratio_to_activate": 1.2},
        ),
    ],
    ids=("llava", "internvl", "gemma3"),
)
def test_options_as_transformers_has_them(name, module, options, tmp_path):
    path, _, class_name = module.rpartition(".")
    theirs = getattr(importlib.import_module(f"transformers.models.{path}"), class_name)(**CASES[name]["images"])
    in_file = name == "llava_vision"  # what is no option of a request
    made = processor(tmp_path, name, **(options | {"image_processor_type": class_name} if in_file else {}))
    given = {"crop_to_patches": True} if name.startswith("internvl") else {}
    for index in range(4):
        wanted = np.asarray(theirs(picture(index), **options, **given)["pixel_values"], np.float32)
        found = as_units(made, made.process("image", picture(index), {} if in_file else options))
        np.testing.assert_allclose(found, wanted.reshape(found.shape), rtol=0, atol=1e-5)


def test_smolvlm_splits_where_a_request_says_so(tmp_path):
    made = processor(tmp_path, "smolvlm_vision", size={"longest_edge": 72})
    whole = made.process("image", picture(0), {})
    split = made.process("image", picture(0), {"do_image_splitting": True})
    assert (len(as_units(made, whole)), len(as_units(made, split))) == (1, 3)
    np.testing.assert_array_equal(as_units(made, whole)[0].shape, as_units(made, split)[-1].shape)
    larger = made.process("image", picture(0), {"do_image_splitting": True, "size": {"longest_edge": 144}})
    assert len(as_units(made, larger)) == 9


def test_newlines_beside_a_picture_of_gemma_are_one_token_with_its_own(tmp_path):
    made = processor(tmp_path, "gemma3_sees_vision")
    begin, one, two = 126, 124, 123
    item = made.process("image", picture(0), {})
    picture_tokens = [begin, *[127] * 16, 125]
    expanded = made.expand([5, one, begin, begin, one, one, 6, one, one], {"image": [item, item]})
    around = [5, two, one], [two, two], [two, two], [6, one, one]
    assert expanded.token_ids == [*around[0], *picture_tokens, *around[1], *picture_tokens, *around[2], *around[3]]
    assert [positions.tolist() for positions in expanded.positions] == [[*range(4, 20)], [*range(24, 40)]]


def test_what_paligemma_adds_to_a_prompt(tmp_path, monkeypatch):
    """As transformers: always, and line breaks are one token with those of the prompt."""
    monkeypatch.setitem(CASES["paligemma_vision"], "tokens", {127: "<image>", 1: "<bos>", 124: "\n", 123: "\n\n"})
    made = processor(tmp_path, "paligemma_vision")
    item, tokens = made.process("image", picture(0), {}), [127] * 16
    for prompt, wanted in (
        ([1, 127, 5], [*tokens, 1, 5, 124]),
        ([127, 1, 5, 124], [*tokens, 1, 1, 5, 123]),
        ([127], [*tokens, 1, 124]),
    ):
        assert made.expand(prompt, {"image": [item]}).token_ids == wanted
    raw = read_config_json(FOLDER / "paligemma_vision")
    config = replace(read_hf(raw), bos_token_id=None)
    with pytest.raises(ModelConfigError, match="bos_token_id must be a token"):
        processor_class(raw["architectures"][0])(tmp_path, raw, config, made.tokenizer)


def test_placeholders_of_aya_are_found_in_text(tmp_path):
    made = processor(tmp_path, "aya_vision")
    text = "w3 <image><image> w4 w5<image>"
    plain = made.tokenizer.encode(text)
    assert made.encode(text, plain) == [3, 127, 127, 4, 5, 127]
    assert made.encode(text, [9, *plain]) == [9, 3, 127, 127, 4, 5, 127]
    assert made.encode(text, [9, 8]) == [9, 8]
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_token": " "}))
    with pytest.raises(ModelFileError, match="image_token must be a text with tokens, got ' '"):
        processor(tmp_path, "aya_vision")


def test_qianfan_without_a_placeholder_in_config_json(tmp_path):
    """The tokenizer has it; prompts may have it, too, in place of the text that stands for an image."""
    wanted, raw = processor(tmp_path, "qianfan_ocr_vision"), read_config_json(FOLDER / "qianfan_ocr_vision")
    config = read_hf(raw)
    left = {name: value for name, value in raw.items() if name != "image_token_id"}
    made = processor_class(config.architecture)(tmp_path, left, config, wanted.tokenizer)
    assert made.image_id == wanted.image_id == 127
    written = ["w3 <image> w4<IMG_CONTEXT>", "w3 <IMG_CONTEXT> w4<image>"]
    assert [made.encode(text, made.tokenizer.encode(text)) for text in written] == [[3, 127, 4, 127]] * 2
    made.tokenizer = SimpleNamespace(encode=lambda text, **_: [5, 6])
    with pytest.raises(ModelConfigError, match="the tokenizer must have the token <IMG_CONTEXT>"):
        made.placeholder_id()


def test_texts_of_tokens_may_be_described(tmp_path):
    """As transformers stores a token with its properties."""
    path = tmp_path / "tokenizer_config.json"
    for name, token, file in (
        ("internvl_vision", "start_image_token", path),
        ("cohere2_vision", "boi_token", path),
        ("aya_vision", "start_of_img_token", tmp_path / "processor_config.json"),
    ):
        made = processor(tmp_path, name)
        raw, shown = read_config_json(FOLDER / name), made.process("image", picture(0), {})
        for text, first in (("w7", 7), ({"content": "w7", "special": True}, 7), (None, 126)):
            file.write_text(json.dumps({token: text}))
            again = processor_class(raw["architectures"][0])(tmp_path, raw, read_hf(raw), made.tokenizer)
            assert again.pieces(shown)[0] == first
        file.write_text(json.dumps({token: {"content": 7}}))
        with pytest.raises(ModelFileError, match=f"{token} must be a text, got '7'"):
            processor_class(raw["architectures"][0])(tmp_path, raw, read_hf(raw), made.tokenizer)


def test_tilings_by_default_are_those_of_transformers():
    for ours, theirs in (
        (LlavaNextProcessor, LlavaNextImageProcessorPil),
        (LlavaOnevisionProcessor, LlavaOnevisionImageProcessorPil),
    ):
        assert [list(each) for each in ours.pinpoints] == theirs.image_grid_pinpoints


@pytest.mark.parametrize("name", CASES)
def test_the_largest_item_is_as_large_as_any(name, tmp_path):
    made = processor(tmp_path, name)
    largest = made.largest("image")
    for size in ((1000, 1000), (2000, 300), (90, 1000), (24, 24), (3, 2)):
        item = made.largest("image", size)
        assert len(item.patches) <= len(largest.patches) and item.num_rows <= largest.num_rows
        assert sorted(item.rows[item.rows >= 0]) == list(range(item.num_rows))
    # The patches of ends of lines count, too.
    count = len(made.process("image", picture(0), {}).patches)
    assert len(made.process("image", picture(0), {}, count).patches) == count
    with pytest.raises(RequestError, match=f"makes {count} patches of pixels; at most {count - 1} are possible"):
        made.process("image", picture(0), {}, count - 1)


def test_options_of_an_engine_count_for_the_largest_item(tmp_path):
    """And too many units are refused before they are made."""
    for name, options, count in (
        ("got_ocr2_vision", {"crop_to_patches": True}, 13),
        ("deepseek_ocr2_vision", {"max_patches": 3}, 4),
        ("deepseek_ocr2_vision", {"crop_to_patches": False}, 1),
        ("deepseek_ocr_vision", {"max_patches": 3}, 4),
        ("got_ocr2_vision", {"crop_to_patches": True, "max_patches": 3}, 4),
        ("internvl_vision", {"max_patches": 9}, 10),
        ("aya_vision", {"crop_to_patches": False}, 1),
        ("cohere2_vision", {"max_patches": 64}, 65),
        ("llama4_sees_vision", {"max_patches": 20}, 21),
        ("ovis2_vision", {"max_patches": 20}, 21),  # 19 tiles keep enough of an image of 20
    ):
        made = processor(tmp_path, name)
        chosen, unit = made.with_options(options), made.tower.unit
        largest, shape = len(chosen.largest("image").patches), picture(0)
        assert largest == count * unit, name
        longest = made.process("image", np.resize(shape, (made.side, count * made.side, 3)), options, largest)
        assert len(longest.patches) <= largest
        made.units = None  # not called
        with pytest.raises(RequestError, match="lower the limit in mm_processor_kwargs, or raise max_num_batched_enc"):
            made.process("image", shape, options, unit - 1)
        with pytest.raises(RequestError, match=r"mm_processor_kwargs\.max_patches must be an integer from 1 to 64"):
            made.with_options({"max_patches": 65})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llava_vision", {"crop_size": 30}, "crop_size must be 24 by 24, the tower's image_size, got 30"),
        ("llava_vision", {"size": {"width": 24}}, "size must be a mapping {shortest_edge} or {height, width} to"),
        ("llava_vision", {"image_mean": [0, 1]}, "image_mean must be three numbers from -1e+06 to 1e+06, got [0, 1]"),
        ("llava_vision", {"image_std": [0, 1, 1]}, "image_std must be three numbers from 1e-06 to 1e+06, got [0, "),
        ("llava_vision", {"resample": 9}, "resample must be the number of one of Pillow's filters, 0 to 5, got 9"),
        ("llava_vision", {"do_resize": False}, "do_resize must be true or absent, got False"),
        ("llava_vision", {"do_resize": None}, "do_resize must be true or absent, got None"),
        ("llava_next_vision", {"image_grid_pinpoints": [[24, 25]]}, "image_grid_pinpoints must be a list of [height"),
        ("llava_next_vision", {"image_grid_pinpoints": [[24, 96]]}, "image_grid_pinpoints must be that of config.json"),
        ("internvl_vision", {"max_patches": 65}, "max_patches must be from min_patches 1 to 64, got 65"),
        ("llava_onevision_vision", {"crop_size": {"height": 12, "width": 12}}, "crop_size must be 24, the tower's"),
        ("idefics3_vision", {"max_image_size": {"longest_edge": 25}}, "max_image_size must be {'longest_edge': 24}"),
        ("idefics3_vision", {"size": 72}, "size must be a mapping {longest_edge} to pixels from 1 to 16384, got 72"),
        ("gemma3_sees_vision", {"size": {"height": 48, "width": 24}}, "size must be 48 by 48"),
        ("deepseek_ocr2_vision", {"tile_size": 20}, "tile_size must be 24, three quarters of the tower's"),
        ("deepseek_ocr_vision", {"tile_size": 20}, "tile_size must be a multiple of 8, at most the tower's image_size"),
        ("deepseek_ocr_vision", {"tile_size": 40}, "tile_size must be a multiple of 8, at most the tower's image_size"),
        ("deepseek_ocr2_vision", {"background_color": [1, 2, 256]}, "background_color must be three integers from"),
        ("cohere2_vision", {"patch_size": 3}, "patch_size must be the side of the square of 4 embeddings"),
    ],
)
def test_settings_that_do_not_fit(name, changes, message, tmp_path):
    with pytest.raises(ModelFileError) as error:
        processor(tmp_path, name, **changes)
    assert message in str(error.value) and "preprocessor_config.json" in str(error.value)


def test_ids_of_indicators_are_those_of_the_tokenizer(tmp_path):
    made = type(processor(tmp_path, name := "ovis2_vision"))
    raw, tokenizer = read_config_json(FOLDER / name), Tokenizer.from_hf_folder(tmp_path)
    for listed in ([126, 125, 124, 123, 121], [126, 125, 124, 123], ["126", "125", "124", "123", "122"]):
        with pytest.raises(ModelConfigError, match="visual_indicator_token_ids must be the ids of <IMG_START>, "):
            made(tmp_path, raw | {"visual_indicator_token_ids": listed}, read_hf(raw), tokenizer)


def test_switches_that_are_null_are_off(tmp_path):
    for name, switch, read in (
        ("llava_vision", "do_rescale", lambda made: made.pixels),
        ("llava_vision", "do_normalize", lambda made: made.pixels),
        ("idefics3_vision", "do_image_splitting", lambda made: made.splits),
        ("cohere2_vision", "crop_to_patches", lambda made: made.crops),
        ("deepseek_ocr2_vision", "crop_to_patches", lambda made: made.crops),
        ("granite_docling_vision", "crop_to_patches", lambda made: made.crops),
    ):
        null, off, on = (read(processor(tmp_path, name, **{switch: value})) for value in (None, False, True))
        assert null == off != on, (name, switch)
    assert processor(tmp_path, "llava_vision", resample=None).pixels.resample == 2  # bilinear, as in transformers


def test_what_the_class_of_an_image_processor_decides(tmp_path):
    """LLaVA's images may have SigLIP's class, with its defaults; only LLaVA's own class makes squares."""
    folder, name = tmp_path, "llava_siglip_vision"
    whole = processor(folder, name, size=24)
    assert whole.size == {"height": 24, "width": 24}
    content = {key: CASES[name]["images"][key] for key in ("size", "image_processor_type")}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    raw = read_config_json(FOLDER / name)
    made = processor_class(read_hf(raw).architecture)(folder, raw, read_hf(raw), whole.tokenizer)
    assert (made.pixels.mean, made.pixels.std, made.pixels.resample) == ((0.5,) * 3, (0.5,) * 3, 3)
    kinds = {
        "LlavaImageProcessorFast": True,
        "CLIPImageProcessor": False,
        "SiglipImageProcessorFast": False,
        "BlipImageProcessor": False,
        None: True,
    }
    for kind, pads in kinds.items():
        found = processor(folder, "llava_vision", do_pad=True, do_center_crop=True, image_processor_type=kind)
        assert found.pads == pads, kind


def test_settings_of_transformers_5_are_in_one_file(tmp_path):
    made = processor(tmp_path, "llava_vision")
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings | {"resample": 0}}))
    raw = read_config_json(FOLDER / "llava_vision")
    again = processor_class(raw["architectures"][0])(tmp_path, raw, read_hf(raw), made.tokenizer)
    assert (made.pixels.resample, again.pixels.resample) == (3, 0) and made.settings != again.settings
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(ModelFileError, match=r"has no preprocessor_config\.json"):
        processor_class(raw["architectures"][0])(tmp_path, raw, read_hf(raw), made.tokenizer)


@pytest.mark.parametrize(
    ("name", "modality", "value", "options", "message"),
    [
        ("llava_vision", "video", picture(0), {}, "video is not supported by this model; it takes image"),
        ("llava_vision", "image", picture(0), {"size": 3}, "mm_processor_kwargs has 'size'; this model has none"),
        (
            "llava_vision",
            "image",
            np.zeros((5, 1001, 3), np.uint8),
            {},
            "200 times the shorter one, got 1001x5",
        ),
        ("llava_vision", "image", np.zeros((0, 5, 3), np.uint8), {}, "got uint8[0, 5, 3]"),
        (
            "llava_vision",
            "image",
            np.zeros((5, 5, 3)),
            {},
            "image must be uint8[height, width, 3], got float64",
        ),
        ("internvl_vision", "image", picture(0), {"max_patches": 0}, "max_patches must be an integer from 1 to 64"),
        (
            "internvl_vision",
            "image",
            picture(0),
            {"crop_to_patches": 1},
            "crop_to_patches must be true or false, got",
        ),
        ("idefics3_vision", "image", picture(0), {"size": {"longest_edge": 5000}}, "with n from 1 to 4096"),
        (
            "gemma3_sees_vision",
            "image",
            picture(0),
            {"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": "a"},
            "pan_and_scan_min_ratio_to_activate must be a finite number > 0",
        ),
    ],
)
def test_items_that_are_refused(name, modality, value, options, message, tmp_path):
    with pytest.raises(RequestError) as error:
        processor(tmp_path, name).process(modality, value, options)
    assert message in str(error.value)


def test_as_many_placeholders_as_pictures(tmp_path):
    made = processor(tmp_path, "llava_vision")
    item = made.process("image", picture(0), {})
    assert made.placeholder("image") == "<image>"
    with pytest.raises(RequestError, match="the prompt has 1 of the placeholder '<image>', and 2 images are given"):
        made.expand([5, 127, 6], {"image": [item, item]})


@pytest.mark.parametrize("name", ["smolvlm_vision", "llama4_sees_vision"])
def test_what_a_family_of_tiles_does_not_take(name, tmp_path):
    """Embeddings of several tiles, for nothing says where each is, and videos; whatever asks for them."""
    made = processor(tmp_path, name)
    rows = made.tower.unit // made.tower.merge
    assert made.grid_of(rows, None)[0] == 1
    for count, grid in ((2 * rows, None), (rows + 1, None), (rows, (1, 4, 4))):
        with pytest.raises(RequestError, match=f"must be {rows}, those of one tile: .* no grid; got {count}"):
            made.grid_of(count, grid)
    if "video" not in made.modalities:
        item = made.process("image", picture(0), {})
        for refused in (lambda: made.video_pieces(item), lambda: made.process("video", picture(0)[None], {})):
            with pytest.raises(RequestError, match="^video is not supported by this model; it takes image$"):
                refused()
    assert processor(tmp_path, "internvl_vision").grid_of(8, None)[0] == 1


def test_deepseek_ocr2_of_its_first_files_of_strips_and_of_embeddings(tmp_path):
    """Settings of images are then those of its processor, and no file has the placeholder's token."""
    wanted, raw = processor(tmp_path, "deepseek_ocr2_vision"), read_config_json(FOLDER / "deepseek_ocr2_vision")
    path = tmp_path / "preprocessor_config.json"
    (tmp_path / "processor_config.json").write_text(path.read_text())
    path.unlink()
    config = replace(read_hf(raw), vocab_size=129280)
    first = {name: value for name, value in raw.items() if name != "image_token_id"}
    made = processor_class(config.architecture)(tmp_path, first, config, wanted.tokenizer)
    assert made.settings == wanted.settings and (made.image_id, wanted.image_id) == (128815, 126)
    whole, tile = 16, 9
    for count in (whole + 1, whole + 1 + 2 * tile, tile + 1):
        assert made.grid_of(count, None) == (1, 1, count)
    for count, grid in ((whole, None), (whole + 2, None), (tile, None), (whole + 1, (1, 4, 4))):
        with pytest.raises(RequestError, match=f"be 17 and 9 for each tile, or 10; they have no grid; got {count}"):
            made.grid_of(count, grid)
    for size in ((1, 200), (200, 1), (1, 1)):
        item = made.process("image", np.zeros((*size, 3), np.uint8), {})
        assert made.grid_of(item.num_rows, None)


def test_videos_of_internvl(tmp_path):
    """A frame is a tile."""
    made, frames = processor(tmp_path, "internvl_vision"), np.stack([picture(0)] * 5)
    item, per_frame = made.process("video", frames, {}), made.tower.unit // made.tower.merge
    side = len(made.process("image", picture(0), {"crop_to_patches": False}).patches)
    assert item.num_rows == 5 * per_frame and len(item.patches) == 5 * side
    with pytest.raises(RequestError, match="an item of video makes 80 patches of pixels; at most 79 are possible"):
        made.process("video", frames, {}, 79)
    assert [made.largest("video", None, count).num_rows for count in (None, 3)] == [32 * per_frame, 3 * per_frame]


class Letters:
    """A tokenizer of letters, and of SmolVLM's special tokens, which have none for videos."""

    def __init__(self):
        self.pieces = ["<image>", "<fake_token_around_image>", "<global-img>"]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found = re.findall(r"<image>|<fake_token_around_image>|<global-img>|.", text, re.DOTALL)
        self.pieces += [piece for piece in dict.fromkeys(found) if piece not in self.pieces]
        return [127 - self.pieces.index(piece) for piece in found]

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return "".join(self.pieces[127 - token] for token in token_ids)

    def convert_ids_to_tokens(self, token_ids) -> list[str]:
        return [self.pieces[127 - token] for token in token_ids]


# What transformers' SmolVLMProcessor.replace_video_token writes.
FRAME = "<fake_token_around_image><global-img><image><image><image><image><fake_token_around_image>"
SHOWN = (
    "You are provided the following series of three frames from a 1:06:40 [H:MM:SS] video.\n"
    f"\nFrame from 00:00:{FRAME}\nFrame from 00:40:{FRAME}\nFrame from 66:38:{FRAME}\n\n"
)
UNTIMED = (
    "You are provided the following series of twenty-four frames from a 0:00:00 [H:MM:SS] video.\n"
    + f"\nFrame from 00:00:{FRAME}" * 24
    + "\n\n"
)


def test_videos_of_smolvlm(tmp_path):
    """Frames are squares; prompts describe them where `<video>` stands, whatever tokens that is made of."""
    made = processor(tmp_path, "smolvlm_vision")
    made.tokenizer = tokenizer = Letters()
    frames = np.stack([picture(0)] * 3)
    timed = Video(frames, np.asarray([0, 20, 1999]), None, 0.5, 2000)
    item, shown = made.process("video", timed, {}), made.process("image", picture(1), {})
    (square,) = made.units(picture(0), {"size": {"longest_edge": 72}, "do_image_splitting": False})[0]
    np.testing.assert_array_equal(
        as_units(made, item)[2], as_units(made, made._processed(made._cut([square]), 1, 1))[0]
    )
    with pytest.raises(RequestError, match="an item of video makes 108 patches of pixels; at most 107 are possible"):
        made.process("video", timed, {}, 107)
    for absurd in (replace(timed, fps=1e-15), replace(timed, total_num_frames=10**30)):
        with pytest.raises(RequestError, match=r"a video is of .* seconds; allowed: 1e\+09"):
            made.process("video", absurd, {})
    assert made.largest("video").num_rows == 32 * 4
    items = {"image": [shown, shown], "video": [item, made.process("video", np.stack([picture(0)] * 24), {})]}
    found = made.expand(tokenizer.encode("<image>See <video><video>, (<image>)?"), items)
    assert tokenizer.decode(found.token_ids, False) == f"{FRAME}See {SHOWN}{UNTIMED}, ({FRAME})?"
    assert found.order == [("image", 0), ("video", 0), ("video", 1), ("image", 1)]
    assert [len(each) for each in found.positions] == [4, 12, 96, 4]
    joined = np.concatenate(found.positions)
    assert (np.diff(joined) > 0).all() and {found.token_ids[place] for place in joined} == {127}
    for text, wrong in (
        ("<image><image>", "0 of the placeholder '<video>', and 2 "),
        ("<video><video>", "0 of .*<image>"),
    ):
        with pytest.raises(RequestError, match=wrong):
            made.expand(tokenizer.encode(text), items)
    # Without a video it is a word as any.
    told = made.expand(tokenizer.encode("<image><video>"), {"image": [shown]})
    assert tokenizer.decode(told.token_ids, False) == f"{FRAME}<video>"


def test_settings_of_smolvlm_for_videos(tmp_path):
    """Settings as transformers 4 and 5 write them are read; a frame may have pixel settings of its own."""
    sampling = {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 48}}
    made = processor(tmp_path, "smolvlm_vision", video_sampling=sampling)
    assert made.modalities == ("image", "video") and made.video_edge == 48
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    for changes, takes in (({"size": {"longest_edge": 60}}, True), ({"size": {"height": 4, "width": 4}}, False)):
        (tmp_path / "video_preprocessor_config.json").write_text(
            json.dumps(settings | {"video_sampling": None} | changes)
        )
        made = processor(tmp_path, "smolvlm_vision")
        assert ("video" in made.modalities) == takes and made.video_edge == (60 if takes else made.side)


def test_numbers_in_words():
    """As num2words writes them."""
    plain = {1: "one", 12: "twelve", 20: "twenty", 64: "sixty-four", 100: "one hundred", 1001: "one thousand and one"}
    plain |= {342: "three hundred and forty-two", 4096: "four thousand and ninety-six"}
    plain[1234] = "one thousand, two hundred and thirty-four"
    assert {number: in_words(number) for number in plain} == plain


def test_llama4_rounds_pixels_only_where_they_are_scaled_and_normalised(tmp_path):
    """transformers' Llama4ImageProcessor computes both in bfloat16, and either alone in float32."""
    plain = processor(tmp_path, "llama4_sees_vision", do_normalize=False)
    (unit,) = as_units(plain, plain.process("image", picture(3), {}))
    scaled = picture(3).transpose(2, 0, 1).astype(np.float32) * np.float32(1 / 255)
    np.testing.assert_array_equal(unit, scaled)
    both = processor(tmp_path, "llama4_sees_vision")
    (unit,) = as_units(both, both.process("image", picture(3), {}))
    assert 0 < np.abs(unit - (scaled - 0.5) / 0.5).max() < 0.02
