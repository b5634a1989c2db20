"""What published checkpoints of ERNIE 4.5-VL and later families say of their towers and texts, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.rope import Rope
from jaxengine.models.registry import read_hf
from scripts.model_names import read_names
from tests.tables import each_row

NAMED = {name: row.config for row in read_names() for name in row.names}
ERNIE, HUNYUAN = NAMED["baidu/ERNIE-4.5-VL-28B-A3B-PT"], NAMED["tencent/HunyuanOCR"]
GRANITE = NAMED["ibm-granite/granite-vision-3.2-2b"]
_XD = HUNYUAN["rope_scaling"]


def test_ernie_4_5_vl():
    config = read_hf(ERNIE)
    experts, rope = config.experts, config.attention[0].rope
    assert experts is not None and rope is not None
    assert (experts.intermediate_size, experts.image_intermediate_size, experts.dense_layers) == (1536, 512, (0,))
    assert experts.image_tokens == (100295, 101304, 101305, 101306, 101307, 103367)
    assert rope == Rope(128, 5e5, interleaved=True, sections=(20, 22, 22), time_last=True)
    assert rope.section_of_pairs().tolist() == [1, 2] * 22 + [0] * 20
    # transformers 5
    outer = {"architectures", "vision_config"}
    text = {name: value for name, value in ERNIE.items() if name not in outer | {"moe_num_experts"}}
    nested = {name: ERNIE[name] for name in outer} | {"text_config": text | {"moe_num_experts": 64}}
    assert read_hf(nested) == config
    flat = {name: value for name, value in ERNIE.items() if name != "rope_scaling"}
    assert read_hf(flat) == read_hf(flat | {"freq_allocation": 20}) == config
    alone = read_hf({name: value for name, value in ERNIE.items() if not name.startswith("moe_layer")})
    assert alone.experts == experts


def test_hunyuan_ocr():
    config, theta = read_hf(HUNYUAN), 1e4 * 1000.0 ** (128 / 126)
    assert {layer.rope for layer in config.attention} == {Rope(128, theta, sections=(16, 16, 16, 16))}
    tower: Any = config.tower
    assert (tower.vit.grid, tower.vit.num_positions, tower.vit.norm_eps) == (128, 128**2 + 1, 1e-5)
    # transformers 5
    outer = {"architectures", "vision_config", "image_token_id"}
    text = {name: value for name, value in HUNYUAN.items() if name not in outer | {"rope_scaling", "rope_theta"}}
    kept = {name: value for name, value in _XD.items() if name not in ("type", "xdrope_section")}
    rope = {**kept, "rope_type": "dynamic", "rope_theta": 1e4, "mrope_section": [16.0] * 4}
    nested = {name: HUNYUAN[name] for name in outer} | {"text_config": text | {"rope_parameters": rope}}
    assert read_hf(nested) == config


def test_granite_vision():
    """Embeddings of images are multiplied, too; logits are divided, which transformers 5 leaves out with a tower."""
    config = read_hf(GRANITE)
    tower: Any = config.tower
    assert config.architecture == "GraniteVisionForConditionalGeneration"
    assert (config.embedding_multiplier, config.logit_scale, tower.multiplier) == (12.0, 1 / 8, 12.0)
    assert (tower.layers, tower.num_newlines, tower.unit) == ((4, 8, 16, 27), 27, 27 * 28)
    llama = GRANITE | {"text_config": GRANITE["text_config"] | {"model_type": "llama"}}
    assert read_hf(llama).architecture == "LlavaNextForConditionalGeneration"


# mistral-community/pixtral-12b without the hidden states that its own file names.
PIXTRAL: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {"hidden_size": 5120, "model_type": "mistral", "num_hidden_layers": 40, "vocab_size": 131072},
    "vision_config": {"image_size": 1024, "model_type": "pixtral", "patch_size": 16},
}


@each_row(
    ("raw", "where", "change", "message"),
    [
        (ERNIE, None, {"freq_allocation": 10}, "freq_allocation must be 20, the last number of mrope_section, got 10"),
        (ERNIE, None, {"moe_num_experts": [64, 32]}, "moe_num_experts must be two equal numbers"),
        (ERNIE, None, {"moe_layer_end_index": [29, 20]}, "moe_layer_start_index must be the same layers as for text"),
        (ERNIE, None, {"moe_intermediate_size": [1536]}, "moe_intermediate_size must be an integer >= 1, or two"),
        (ERNIE, None, {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 28 of dense, sparse"),
        (ERNIE, None, {"rope_scaling": {"mrope_section": [24, 20, 20]}}, "of height and of width the same, if height"),
        (ERNIE, None, {"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_type must be "default", got None'),
        (ERNIE, None, {"temporal_conv_size": 4}, "temporal_conv_size must be 2 or absent, got 4"),
        (ERNIE, "vision_config", {"temporal_patch_size": 2}, "temporal_patch_size must be 1 or absent, got 2"),
        (HUNYUAN, None, {"rope_scaling": _XD | {"mrope_section": [8, 24, 16, 16]}}, "xdrope_section must be that of"),
        (HUNYUAN, None, {"rope_scaling": _XD | {"xdrope_section": [32, 32]}}, "must be three counts that sum up to"),
        (HUNYUAN, None, {"rope_scaling": _XD | {"xdrope_section": None}}, "mrope_section is missing"),
        (GRANITE, None, {"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy must be 'full'"),
        (GRANITE, "text_config", {"logits_scaling": 0}, "logits_scaling must be a finite number > 0"),
        (HUNYUAN, None, {"use_qk_norm": False}, "use_qk_norm must be true or absent, got False"),
        (HUNYUAN, "vision_config", {"interpolate_mode": "bicubic"}, 'interpolate_mode must be "bilinear" or absent'),
        (HUNYUAN, "vision_config", {"num_key_value_heads": 4}, "num_key_value_heads must be 16 or absent, got 4"),
        (HUNYUAN, "vision_config", {"spatial_merge_size": 9}, "spatial_merge_size must be 1 to 8, got 9"),
        (HUNYUAN, "vision_config", {"max_image_size": 8192}, "image_size must be an integer >= 1 and <= 4096"),
        (ERNIE, "vision_config", {"rms_norm_eps": 1e-5}, "rms_norm_eps must be 1e-06 or absent"),
        (PIXTRAL, None, {"vision_feature_layer": -1}, "select_strategy must be \"full\" or absent, got 'default'"),
        (PIXTRAL, None, {"vision_feature_select_strategy": "full"}, "vision_feature_layer must be -1 or absent, got"),
    ],
)
def test_refused(raw: dict[str, Any], where: str | None, change: dict[str, Any], message: str):
    changed = raw | change if where is None else raw | {where: raw[where] | change}
    with pytest.raises(ModelConfigError) as error:
        read_hf(changed)
    assert message in str(error.value)
