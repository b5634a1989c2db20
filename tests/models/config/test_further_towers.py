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
ERNIE = NAMED["baidu/ERNIE-4.5-VL-28B-A3B-PT"]


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


@each_row(
    ("raw", "where", "change", "message"),
    [
        (ERNIE, None, {"freq_allocation": 10}, "freq_allocation must be 20, the last number of mrope_section, got 10"),
        (ERNIE, None, {"moe_num_experts": [64, 32]}, "moe_num_experts must be two equal numbers"),
        (ERNIE, None, {"moe_layer_end_index": [29, 20]}, "moe_layer_start_index must be the same layers as for text"),
        (ERNIE, None, {"moe_intermediate_size": [1536]}, "moe_intermediate_size must be an integer >= 1, or two"),
        (ERNIE, None, {"mlp_layer_types": ["dense"]}, 'mlp_layer_types must be a list of 28 of "dense" and "sparse"'),
        (ERNIE, None, {"rope_scaling": {"mrope_section": [24, 20, 20]}}, "of height and of width the same, if height"),
        (ERNIE, None, {"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_type must be "default", got None'),
        (ERNIE, None, {"temporal_conv_size": 4}, "temporal_conv_size must be 2 or absent, got 4"),
        (ERNIE, "vision_config", {"temporal_patch_size": 2}, "temporal_patch_size must be 1 or absent, got 2"),
        (ERNIE, "vision_config", {"rms_norm_eps": 1e-5}, "rms_norm_eps must be 1e-06 or absent"),
    ],
)
def test_refused(raw: dict[str, Any], where: str | None, change: dict[str, Any], message: str):
    changed = raw | change if where is None else raw | {where: raw[where] | change}
    with pytest.raises(ModelConfigError) as error:
        read_hf(changed)
    assert message in str(error.value)
