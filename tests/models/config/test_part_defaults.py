"""Nested configurations that are absent, null or incomplete are those of transformers' classes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.part_defaults import with_parts
from jaxengine.models.registry import read_hf
from tests.fixtures.drawn_weights import FOLDER
from tests.tables import each_row

# Folder of a checkpoint -> sizes that transformers 5.24 has for a vision_config, and a text_config, that are absent.
_SEEING = {
    "llava_vision": ((1024, 24, 16, 14), (4096, 32, 32000)),
    "vip_llava_vision": ((1024, 24, 16, 14), (4096, 32, 32000)),
    "llava_next_vision": ((1024, 24, 16, 14), (4096, 32, 32000)),
    "llava_onevision_vision": ((1152, 26, 16, 14), (4096, 32, 151936)),
    "deepseek_vl_vision": ((768, 12, 12, 16), (4096, 32, 32000)),
    "video_llama3_vision": ((768, 12, 12, 16), (4096, 32, 151936)),
    "paligemma_vision": ((1152, 27, 16, 14), (2048, 18, 257152)),
    "idefics2_vision": ((768, 12, 12, 32), (4096, 32, 32000)),
    "got_ocr2_vision": (None, (1024, 24, 151860)),
    "hyperclovax_vision": (None, (4096, 32, 32000)),
    "lfm2_vl_vision": ((768, 12, 12, 16), (2560, 32, 65536)),
}
HY4, QWEN3, QWEN2 = (
    json.loads((FOLDER / name / "config.json").read_text())
    for name in ("hy_v4_vl_vision", "qwen3_vl_vision", "qwen2_vl_vision")
)


def test_absent_and_null():
    for name, (sight, text) in _SEEING.items():
        raw = json.loads((FOLDER / name / "config.json").read_text())
        absent = {key: value for key, value in raw.items() if key not in ("vision_config", "text_config")}
        config = _read(absent)
        assert config == _read(raw | {"vision_config": None, "text_config": None}), name
        if isinstance(config, str):  # the checkpoint's other fields do not fit transformers' sizes
            assert "missing" not in config and "must be a mapping" not in config, (name, config)
            config = read_hf({key: raw[key] for key in ("architectures", "model_type")})
        assert (config.hidden_size, config.num_layers, config.vocab_size) == text, name
        if sight is not None:
            tower: Any = config.tower
            vit = tower.vit
            assert (vit.hidden_size, vit.num_layers, vit.num_heads, vit.patch_size) == sight, name


def _read(raw: dict[str, Any]) -> Any:
    """The configuration, or the error of one whose parts do not fit."""
    try:
        return read_hf(raw)
    except ModelConfigError as error:
        return str(error)


def test_incomplete():
    """An empty text_config is of the class's usual type, with that type's sizes and not the wrapper's."""
    raw = {"architectures": ["Idefics2ForConditionalGeneration"], "model_type": "idefics2"}
    assert (read_hf(raw).max_position_embeddings, read_hf(raw).rms_norm_eps) == (32768, 1e-5)
    config = read_hf(raw | {"text_config": {}})
    assert (config.max_position_embeddings, config.rms_norm_eps) == (131072, 1e-6)
    assert with_parts({"model_type": "llava", "text_config": 3})["text_config"] == 3
    assert with_parts({"model_type": "llama"}) == {"model_type": "llama"}


def test_other_names():
    """A field's other name in transformers' class counts where the field is absent."""
    vision = HY4["vision_config"]
    for name, other, value in (
        ("rms_norm_eps", "layer_norm_eps", 0.25),
        ("num_attention_heads", "attention_heads", vision["num_attention_heads"]),
    ):
        rest = {key: each for key, each in vision.items() if key != name}
        wanted = read_hf(HY4 | {"vision_config": rest | {name: value}})
        assert read_hf(HY4 | {"vision_config": rest | {other: value}}) == wanted, name
        assert read_hf(HY4 | {"vision_config": rest | {name: value, other: 3}}) == wanted, name
    vision = QWEN3["vision_config"]
    rest = {key: each for key, each in vision.items() if key != "depth"}
    found = read_hf(QWEN3 | {"vision_config": rest | {"num_hidden_layers": vision["depth"]}})
    assert found == read_hf(QWEN3)


def test_sections_of_rope():
    """transformers has sections for a file without any, and always interleaves those of Qwen3-VL."""
    text = QWEN3["text_config"] | {"head_dim": 128, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}
    rope: Any = read_hf(QWEN3 | {"text_config": text}).attention[0].rope
    assert (rope.sections, rope.sections_interleaved, rope.theta) == ((24, 20, 20), True, 5e6)
    text = {key: value for key, value in QWEN2["text_config"].items() if "rope" not in key} | {"head_dim": 128}
    rope = read_hf(QWEN2 | {"text_config": text}).attention[0].rope
    assert (rope.sections, rope.sections_interleaved) == ((16, 24, 24), False)


@each_row(
    ("raw", "message"),
    [
        (HY4 | {"model_type": "x", "text_config": None}, "text_config must be a mapping, got None"),
        (HY4 | {"vision_config": 3}, "vision_config must be a mapping, got 3"),
        (
            QWEN3 | {"text_config": QWEN3["text_config"] | {"rope_parameters": {"mrope_interleaved": False}}},
            "mrope_interleaved must be true or absent, got False",
        ),
    ],
)
def test_refused(raw: dict[str, Any], message: str):
    with pytest.raises(ModelConfigError) as error:
        read_hf(raw)
    assert message in str(error.value)
