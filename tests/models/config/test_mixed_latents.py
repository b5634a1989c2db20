"""config.json of models whose layers differ in their latents: what is read, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxengine.models.config.attention import KeyIndex, Latent
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.registry import read_hf

S, X, F = "sliding_attention", "indexed_attention", "full_attention"
DOTS: dict[str, Any] = {"architectures": ["Dots3NoteForCausalLM"], "model_type": "dots3_note"}
LARGE: dict[str, Any] = {
    "architectures": ["MistralLarge4ForConditionalGeneration"],
    "model_type": "mistral_large4",
    "image_token_index": 10,
}
DEFAULT = {"rope_type": "default"}


def dots(**changes: Any) -> Any:
    return read_hf(DOTS | changes)


def large(**changes: Any) -> Any:
    return read_hf(LARGE | {"text_config": changes})


def test_dots_has_the_defaults_of_the_class_in_transformers():
    config = dots()
    kinds = [layer.index is not None for layer in config.attention]
    assert kinds == [layer < 2 or layer % 4 == 1 for layer in range(46)]
    indexed, sliding = config.attention[0], config.attention[2]
    assert indexed.index == KeyIndex(64, 128, 2048, interleaved=True) and indexed.num_heads == 128
    assert indexed.latent == Latent(512, 128, 64, 128, 1024) and indexed.rope == Rope(64, 8e7, interleaved=True)
    assert sliding.latent == Latent(1024, 192, 64, 128, 1024) and sliding.rope == Rope(64, 5e4, interleaved=True)
    assert (sliding.num_heads, sliding.window, sliding.head_dim, indexed.head_dim) == (64, 512, 1088, 576)
    assert config.experts.dense_layers == (0,) and config.experts.shared_intermediate_size == 1536
    # The layer that drafts is counted nowhere.
    assert config.num_unread_layers == 1 and "model.layers.46." in config.unread
    outer = {"architectures": ["Dots3NoteForConditionalGeneration"], "text_config": {"model_type": "dots3_note_text"}}
    assert read_hf(DOTS | outer) == config


def test_kinds_of_layers_of_dots():
    def kinds(**changes: Any) -> str:
        layers = dots(num_hidden_layers=4, **changes).attention
        return "".join("X" if each.index is not None else "S" if each.window else "F" for each in layers)

    assert [kinds(), kinds(use_dsa=False), kinds(use_sliding_window=False)] == ["XXSS", "FFSS", "XXXX"]
    listed = {"layer_types": [S, X, F, S]}
    # Files of before `per_layer_config` call indexed layers full.
    assert kinds(**listed) == "SXXS" and kinds(**listed, use_dsa=None) == "SXFS" == kinds(**listed, per_layer_config={})
    assert kinds(per_layer_config={}, use_dsa=False) == "FFSS"


def test_ropes_and_sizes_of_single_layers_of_dots():
    few = {"num_hidden_layers": 3}
    flat = dots(**few, rope_parameters=DEFAULT, rope_theta=700.0, swa_rope_theta=3.0).attention
    assert {each.rope.theta for each in flat} == {700.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 1.0}
    scaled = dots(**few, rope_parameters={X: yarn, S: DEFAULT | {"rope_theta": 9.0}}).attention
    assert scaled[0].rope.theta == 8e7 and scaled[0].rope.scaling is not None and scaled[2].rope.theta == 9.0
    assert scaled[0].scale == flat[0].scale  # which does not follow YaRN's mscale
    own = {"kv_lora_rank": 40, "q_lora_rank": 50, "qk_rope_head_dim": 8}
    layer = dots(**few, per_layer_config={"02": own}, rope_parameters=DEFAULT).attention[2]
    assert layer.latent == Latent(40, 128, 8, 128, 50) and layer.rope.rotary_dim == 8 and layer.num_heads == 128
    sparse = [
        dots(**few, **each).experts.dense_layers for each in ({"moe_layer_freq": 2}, {"moe_layer_freq": [1, 0, 1]})
    ]
    assert sparse == [(0, 1), (0, 1)]
    for changes, message in (
        ({"swa_q_lora_rank": None}, "q_lora_rank is missing"),
        ({"swa_num_key_value_heads": 4}, "num_key_value_heads must be num_attention_heads = 64"),
        ({"per_layer_config": {"3": {}}}, "per_layer_config must be for each number of a layer below 3 a mapping with"),
        (
            {"per_layer_config": {"0": {"hidden_size": 4}}},
            "per_layer_config must be for each number of a layer below 3",
        ),
        ({"rope_parameters": {X: DEFAULT}}, f"rope_parameters must be a mapping that has one for {S}"),
        ({"layer_types": [X, X, "linear_attention"]}, f"layer_types must be a list of 3 of {F}, {S}, {X}"),
        ({"moe_layer_freq": [1, 1]}, "moe_layer_freq must be a list of 3 of 0, 1"),
        ({"use_dsa": "yes"}, "use_dsa must be true, false or null, got 'yes'"),
        ({"rope_interleave": False}, "rope_interleave must be true or absent"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            dots(**few, **changes)


def test_mistral_large_4_has_the_defaults_of_the_class_in_transformers():
    config = large()
    rotated, plain = config.attention[0], config.attention[3]
    assert [each.rope is None for each in config.attention] == [layer % 4 == 3 for layer in range(72)]
    yarn = RopeScaling("yarn", 2048.0, 512, attention_factor=1.0)
    assert rotated.rope == Rope(64, 1e4, yarn, interleaved=True) and rotated.latent == Latent(512, 64, 64, 128)
    # A layer without rope has as large queries, all of which meet the latent.
    assert plain.latent == Latent(512, 128, 0, 128) and plain.scale == rotated.scale == 128**-0.5
    assert rotated.index == plain.index == KeyIndex(32, 128, 2048, interleaved=True, reads_hidden=True)
    assert (config.logit_soft_cap, config.experts.scoring_func, config.experts.dense_layers) == (30.0, "softmax", (0,))
    assert (config.tower.num_layers, config.tower.patch_size, config.tower.hidden_size) == (30, 14, 2048)
    # Fields that the class in transformers has no use for; an older name.
    assert large(q_lora_rank=64, norm_topk_prob=False) == config
    assert large(num_experts=9) == large(n_routed_experts=9)


def test_layers_of_mistral_large_4_that_share_latents_and_selections():
    kinds = {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "indexer_types": ["full", "full", "shared", "full"],
    }
    layers = large(**kinds, kv_source_layers=[0, 1, 0, 3]).attention
    assert [each.kv_source for each in layers] == [None, None, 0, None]
    assert [each.index.source for each in layers] == [None, None, 1, None] and not layers[2].has_pages
    for changes, message in (
        ({"kv_source_layers": [0, 1, 2]}, "kv_source_layers must be a list of 4 numbers of layers"),
        ({"kv_source_layers": [0, 1, 3, 3]}, "kv_source_layers must be a list of 4 layers with latents of their own"),
        ({"kv_source_layers": [0, 0, 1, 3]}, "kv_source_layers must be for layer 1 the last layer before it without"),
        ({"kv_source_layers": [0, 1, 1, 3]}, "kv_source_layers must be for layer 2 the last layer before it with rope"),
        ({"kv_source_layers": [0, 1, 2, 1]}, "kv_source_layers must be 3 for layer 3, which has an indexer of its own"),
        ({"no_rope_layers": [0] * 4}, "no_rope_layers must be a list that has a 1"),
        ({"n_group": 2}, "n_group must be 1 or absent"),
        ({"layer_types": [F] * 4}, "layer_types must be .*indexed_attention.* or absent"),
        ({"index_head_dim": 8}, "index_head_dim must be at least qk_rope_head_dim = 64"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            large(**kinds | changes)


def test_layers_that_differ_in_their_latents_share_no_scales_of_tokens():
    config = dots(num_hidden_layers=3)
    assert not config.has_equal_pages and config.has_equal_heads
    # As many elements in both, of which one has the value in the key.
    first = replace(config.attention[2], latent=Latent(512, 128, 64, 128, 1024), head_dim=576, window=None)
    second = replace(config.attention[0], index=replace(config.attention[0].index, head_dim=512), head_dim=576)
    assert first.v_head_dim == second.v_head_dim and not replace(config, attention=(first, second)).has_equal_pages
