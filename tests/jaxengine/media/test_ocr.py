"""Processors for images alone, of most models that read documents: pixels as transformers has them, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import HunYuanVLImageProcessorPil
from transformers.models.hy_v4_vl.image_processing_pil_hy_v4_vl import HYV4VLImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import VideoLlama3ImageProcessorPil

from jaxengine.media.registry import processor_class, processor_for
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_folder, read_hf
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures import unit_pictures
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.picture_checkpoints import FILES, picture, whole_checkpoint
from tests.jaxengine.media.test_unit_processors import processor

KINDS = {
    "paddleocr_vl_vision": PaddleOCRVLImageProcessorPil,
    "glm_ocr_vision": Glm46VImageProcessorPil,
    "dots_ocr_vision": Qwen2VLImageProcessorPil,
    "opencua_vision": Qwen2VLImageProcessorPil,
    "keye1_5_vision": PaddleOCRVLImageProcessorPil,
    "video_llama3_vision": VideoLlama3ImageProcessorPil,
    "ernie4_5_vl_vision": Ernie4_5_VLMoeImageProcessorPil,
    "hunyuan_vl_vision": HunYuanVLImageProcessorPil,
    "hy_v4_vl_vision": HYV4VLImageProcessorPil,
    "lighton_ocr_wide_vision": PixtralImageProcessorPil,
}
# Kept, shrunk, less than a row of the tower, and less than a column.
SIZES = ((24, 40), (200, 151), (5, 50), (37, 4))


def opened(folder):
    raw = read_config_json(folder)
    return processor_for(folder, raw, read_folder(folder, raw), Tokenizer.from_hf_folder(folder))


def whole(patches: np.ndarray, columns: np.ndarray, side: int) -> np.ndarray:
    """The image f32[H, W, 3] of patches at their rows and columns; of several frames the first."""
    rows, places = columns
    image = np.zeros((rows.max() * side + side, places.max() * side + side, 3), np.float32)
    for patch, row, place in zip(patches, rows * side, places * side, strict=True):
        image[row : row + side, place : place + side] = patch.reshape(3, -1, side, side)[:, 0].transpose(1, 2, 0)
    return image


def test_pixels_are_those_of_transformers(tmp_path):
    for name, kind in KINDS.items():
        processor = opened(whole_checkpoint(name, tmp_path / name))
        tower, files = processor.tower, FILES[name]
        settings = files.get("preprocessor_config.json") or files["processor_config.json"]["image_processor"]
        theirs = kind(**{key: value for key, value in settings.items() if not key.endswith("_type")})
        for size in SIZES:
            item, made = processor.process("image", picture(1, *size), {}), theirs(picture(1, *size))
            if "mark" in tower.columns:  # behind its patches are squares for lines and both ends
                kept = item.columns[tower.columns.index("mark")] == 0
                item = item._replace(patches=item.patches[kept], columns=item.columns[:, kept])
            chosen = item.columns[[tower.columns.index("row"), tower.columns.index("column")]]
            ours, pixels = whole(item.patches, chosen, tower.patch_size), np.asarray(made["pixel_values"])
            if "image_grid_thw" not in made:  # a whole image
                expected = pixels[0].transpose(1, 2, 0)
            else:
                _, high, wide = np.asarray(made["image_grid_thw"])[0]
                # Qwen's and GLM's patches come square by square.
                merge = 1 if name.startswith(("paddle", "keye", "hunyuan", "hy_v4")) else tower.spatial_merge_size
                grid = np.indices((high // merge, wide // merge, merge, merge)).reshape(4, -1)
                places = np.stack([grid[0] * merge + grid[2], grid[1] * merge + grid[3]])
                expected = whole(pixels.reshape(high * wide, -1), places, tower.patch_size)
            np.testing.assert_allclose(ours, expected, atol=1e-5, err_msg=f"{name} {size}")
            made_of = len(processor.largest("image", size).patches)
            assert item.num_rows * tower.merge == made_of <= len(processor.largest("image").patches)


def test_missing_settings_are_those_of_transformers(tmp_path):
    """All but the sizes that a tower has."""
    for name, kind in KINDS.items():
        folder = whole_checkpoint(name, tmp_path / name)
        path = next(
            folder / file for file in ("preprocessor_config.json", "processor_config.json") if file in FILES[name]
        )
        told = FILES[name][path.name]
        kept = {key: value for key, value in told.get("image_processor", told).items() if key.endswith("_size")}
        path.write_text(json.dumps({"image_processor": kept} if "image_processor" in told else kept))
        processor = opened(folder)
        pixels = processor.pixels if hasattr(processor, "pixels") else processor.sizes["image"].pixels
        assert [pixels.mean, pixels.std] == [tuple(kind.image_mean), tuple(kind.image_std)], name


def test_a_published_configuration_may_leave_out_the_token_after_an_image(tmp_path):
    folder = whole_checkpoint("paddleocr_vl_vision", tmp_path)
    raw = {**read_config_json(folder), "vision_end_token_id": 260}
    config = read_folder(folder, raw)
    del raw["vision_end_token_id"]
    with pytest.raises(ValueError, match="token ids of images must be below vocab_size 272, got 101306"):
        processor_for(folder, raw, config, Tokenizer.from_hf_folder(folder))


def test_lines_of_hunyuan_count_for_the_largest_image(tmp_path):
    """Tall images have more of them; no image has more patches than the largest, which one comes near."""
    processor = opened(whole_checkpoint("hunyuan_vl_vision", tmp_path))
    bound = processor.largest("image")
    sides = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)
    sizes = [(high, wide) for high in sides for wide in sides if max(high, wide) <= 200 * min(high, wide)]
    found = [processor.largest("image", size) for size in sizes]
    most = max(len(each.patches) for each in found)
    assert len(bound.patches) >= most > 0.8 * len(bound.patches)
    assert bound.num_rows >= max(each.num_rows for each in found)
    assert most > max(len(each.patches) for each, size in zip(found, sizes, strict=True) if size[0] == size[1])
    shown = processor.process("image", picture(1, 34, 55), {})
    with pytest.raises(RequestError, match=f"makes {len(shown.patches)} patches of pixels; at most"):
        processor.process("image", picture(1, 34, 55), {}, len(shown.patches) - 1)
    assert processor.grid_of(4 * 8 + 2, (1, 8, 14)) == (1, 8, 14)
    with pytest.raises(RequestError, match=r"with 28 = height / 2 \* \(width / 2 \+ 1\) \+ 2 rows; got \[1, 8, 14\]"):
        processor.grid_of(28, (1, 8, 14))


def test_ernie_as_published(tmp_path):
    """Its names of tokens, and its chat template's text in the place of an image's token."""
    folder = whole_checkpoint("ernie4_5_vl_vision", tmp_path)
    raw = read_config_json(folder)
    config, tokenizer = read_folder(folder, raw), Tokenizer.from_hf_folder(folder)
    raw["im_patch_id"] = raw.pop("image_token_id")
    assert read_folder(folder, raw) == config
    processor = processor_for(folder, raw, config, tokenizer)
    assert processor.placeholder("image") == "<|vision_start|><|image_pad|><|vision_end|>"
    for text in ("See <|vision_start|><|image@placeholder|><|vision_end|> and <|image@placeholder|>", "See it."):
        plain = tokenizer.encode(text.replace("<|image@placeholder|>", "<|image_pad|>"), add_special_tokens=False)
        for first in ([], [256]):
            assert processor.encode(text, first + tokenizer.encode(text, add_special_tokens=False)) == first + plain
    assert processor.encode("a <|image@placeholder|>", [3, 4]) == [3, 4]


def test_what_is_refused(tmp_path):
    for name in KINDS:
        processor = opened(whole_checkpoint(name, tmp_path / name))
        shown = picture(1, 8, 8)
        for call, message in (
            (lambda shown=shown, it=processor: it.process("video", shown[None], {}), "video is not supported by this"),
            (lambda it=processor: it.process("image", np.zeros((1, 300, 3), np.uint8), {}), "at most 200 times"),
            (lambda shown=shown, it=processor: it.process("image", shown, {"tiles": 3}), "mm_processor_kwargs has"),
        ):
            with pytest.raises(RequestError, match=message):
                call()
    folder = tmp_path / "dots_ocr_vision"
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temporal_patch_size": 2}))
    with pytest.raises(ModelFileError, match="temporal_patch_size must be 1 or absent"):
        opened(folder)


def test_deepseek_ocr_of_its_first_files_and_of_embeddings(tmp_path):
    """A line of tiles, or of the whole image, has one row more than these; without settings tiles have 640 pixels."""
    made = processor(tmp_path, "deepseek_ocr_vision")
    whole, tile = 4, 3
    first = whole * (whole + 1) + 1
    for count in (first, first + 2 * tile * (tile + 1), first + tile * (2 * tile + 1)):
        assert made.grid_of(count, None) == (1, 1, count)
    for count, grid in ((first - 1, None), (first + tile * (tile + 1), None), (first, (1, 4, 4))):
        with pytest.raises(RequestError, match=f"must be 21, and for R lines of C tiles .* no grid; got {count}"):
            made.grid_of(count, grid)
    whole_only = made.process("image", unit_pictures.picture(0), {"crop_to_patches": False})
    assert whole_only.num_rows == first and made.process("image", unit_pictures.picture(2), {}).num_rows == first
    path, raw = tmp_path / "preprocessor_config.json", read_config_json(FOLDER / "deepseek_ocr_vision")
    settings = {name: value for name, value in json.loads(path.read_text()).items() if name != "tile_size"}
    path.unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))  # whose settings are those of images alone
    with pytest.raises(ModelFileError, match=r"tile_size must be a multiple of 8, .* 32, got 640"):
        processor_class("DeepseekOCRForCausalLM")(tmp_path, raw, read_hf(raw), made.tokenizer)
