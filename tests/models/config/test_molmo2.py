"""Molmo 2: configurations as published and as transformers writes them, their defaults, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model, model_for_hf, read_folder, read_hf
from jaxengine.models.weights.adapters.folder import read_adapter
from jaxengine.models.weights.adapters.pools import targets_of
from tests.fixtures.adapters import wanted as wants
from tests.fixtures.adapters import write_adapter
from tests.fixtures.drawn_weights import FOLDER

NAME = "Molmo2ForConditionalGeneration"
ODD: Any = json.loads((FOLDER / "molmo2_odd_vision" / "config.json").read_text())


def changed(part: str, **changes: Any) -> dict[str, Any]:
    return ODD | {part: ODD[part] | changes}


def test_defaults():
    """Absent and null fields have transformers' defaults; fields of the wrapper and old names are read."""
    small: Any = {"architectures": [NAME], "image_patch_id": 151938, "adapter_config": {"text_hidden_size": 4096}}
    nothing = {"vision_config": None, "text_config": {"num_key_value_heads": None, "additional_vocab_size": None}}
    for raw in (small, small | nothing, small | {"vit_config": {"num_hidden_layers": 27, "image_num_pos": None}}):
        config = read_hf(raw)
        tower: Any = config.tower
        assert (config.vocab_size, config.num_logits, config.num_layers) == (152064, 151936, 36)
        assert {(each.num_kv_heads, each.head_dim, each.mutual) for each in config.attention} == {(8, 128, True)}
        assert (tower.unit, tower.merge, tower.vit.num_kv_heads, tower.vit.head_size) == (729, 3, 16, 72)
        assert tower.layers == (25, 19) and tower.pooling.intermediate_size == 18944 and not tower.mlp_bias
    old: Any = read_hf(small | {"vit_config": {"num_hidden_layers": 27}}).tower
    assert old.unused == ("vision_tower.layers.25.", "vision_tower.layers.26.")
    named = {"layer_norm_eps": 1e-3, "qkv_bias": True, "use_qk_norm": True, "rope_theta": 7.0, "rope_scaling": None}
    text = read_hf(small | {"text_config": named})
    rope: Any = text.attention[0].rope
    assert text.rms_norm_eps == 1e-3 and text.attention[0].bias and rope.theta == 7.0


def test_names():
    """Names of published files and of transformers in memory are mapped, and those of quantised modules."""
    names = model_for_hf(NAME).checkpoint_names
    resblock = "model.vision_backbone.image_vit.transformer.resblocks.0"
    for stored, own in (
        ("model.transformer.wte.new_embedding", "model.embed_tokens.new_embedding"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.transformer.blocks.3.self_attn.attn_out", "model.layers.3.self_attn.o_proj"),
        ("model.transformer.blocks.3.ff_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
        ("model.language_model.layers.3.self_attn.o_proj", "model.layers.3.self_attn.o_proj"),
        ("model.transformer.ln_f.weight", "model.norm.weight"),
        (f"{resblock}.attention.wq.bias", "vision_tower.layers.0.self_attn.q_proj.bias"),
        ("model.vision_backbone.image_projector.w3", "multi_modal_projector.image_projector.up_proj"),
    ):
        assert names.renamed(stored) == own


def test_adapters_of_published_names(tmp_path):
    """target_modules names modules of layers by ends that published files have in no tower; wq and w1 are of towers."""
    model = build_model(read_folder(FOLDER / "molmo2_vision"), Build("float32", lora=LoraSpec(1, 8)))
    targets = targets_of([model])
    ends = {"attn_out": "self_attn.o_proj", "att_proj": "self_attn.att_proj", "ff_proj": "mlp.ff_proj"}
    ends |= {"ff_out": "mlp.down_proj"}
    for wanted in ([*ends], ["attn_out"], ["self_attn.att_proj", "ff_out"], r"model\.transformer\..*(attn|ff)_out"):
        stored = {
            f"model.transformer.blocks.{layer}.{own.split('.')[0]}.{end}": targets.shapes[f"model.layers.{layer}.{own}"]
            for layer in range(2)
            for end, own in ends.items()
        }
        shapes = {name: (out, size) for name, (size, out) in stored.items() if wants({"target_modules": wanted}, name)}
        folder = write_adapter(tmp_path / str(wanted)[:9], shapes, seed=1, target_modules=wanted)
        assert {*read_adapter(folder, targets, 8, "float32").matrices} == {targets.module(name) for name in shapes}
        assert len(shapes) >= 2
    for wanted in (["attn_out", "wq"], ["image_projector.w1"], ["self_attn.q_proj"]):
        folder = write_adapter(tmp_path / wanted[-1], shapes, seed=1, target_modules=[*wanted, "ff_out", "attn_out"])
        with pytest.raises(ModelFileError, match="target_modules names it, but the file has no matrices of it"):
            read_adapter(folder, targets, 8, "float32")


def test_what_is_refused():
    for raw, message in (
        (changed("text_config", qk_norm_type="none"), "qk_norm_type must be qwen3 or olmo"),
        (changed("text_config", use_qk_norm=False), "use_qk_norm must be true or absent"),
        (changed("text_config", rope_scaling_layers=[0.5]), "rope_scaling_layers must be a list of layers, or null"),
        (changed("text_config", additional_vocab_size=-1), "additional_vocab_size must be an integer >= 0"),
        (changed("text_config", hidden_act="prelu"), "hidden_act must be one of"),
        (changed("vision_config", image_size=[35, 42]), "image_size must be the same for height and width"),
        (changed("vision_config", num_position_embeddings=24), "num_position_embeddings must be 25, the patches of"),
        (changed("vision_config", num_key_value_heads=3), "num_key_value_heads must be a divisor of"),
        (changed("vision_config", num_channels=1), "num_channels must be 3"),
        (changed("adapter_config", hidden_size=16), "hidden_size must be 32, the hidden_size of the tower"),
        (changed("adapter_config", text_hidden_size=32), "text_hidden_size must be 64, the hidden_size of the text"),
        (changed("adapter_config", vision_feature_layer=[3]), "vision_feature_layer must be a list of 1 to 64 layers"),
        (changed("adapter_config", vision_feature_layer=[]), "vision_feature_layer must be a list of 1 to 64 layers"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_hf(raw)
