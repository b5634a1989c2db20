"""config.json of models that see and that transformers lacks, as published: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.models.architectures import usual_name
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.families.cohere_asr import CohereAsrForConditionalGeneration
from jaxengine.models.families.cosmos3 import Cosmos3OmniForConditionalGeneration
from jaxengine.models.families.deepseek_vl2 import DeepseekVLV2ForCausalLM
from jaxengine.models.families.hunyuan_vl import HunYuanVLForConditionalGeneration
from jaxengine.models.families.llama_nemotron_vl import Llama_Nemotron_Nano_VL
from jaxengine.models.families.normed_onevision import BeeForConditionalGeneration
from jaxengine.models.families.opencua import OpenCUAForConditionalGeneration
from jaxengine.models.registry import read_hf
from tests.models.config.test_as_transformers import recorded

# Tiny's language_config, with sizes; Small has latent attention, and the largest DeepSeek-V3's experts.
TINY: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 1280,
    "intermediate_size": 6848,
    "kv_lora_rank": None,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 896,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 10,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 12,
    "num_key_value_heads": 10,
    "q_lora_rank": None,
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "topk_group": 1,
    "topk_method": "greedy",
    "use_mla": False,
    "v_head_dim": 0,
    "vocab_size": 129280,
}
LATENT = {"use_mla": True, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CORRECTED = {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.446}


def vl2(language: dict[str, Any] | None = None, **changes: Any) -> Any:
    raw = {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "candidate_resolutions": [[384, 384], [384, 768]],
        "global_view_pos": "head",
        "tile_tag": "2D",
        "language_config": TINY | (language or {}),
        "projector_config": {"model_type": "mlp_projector", "n_embed": 1280},
        "vision_config": {"layers": 27, "mlp_ratio": 3.7362, "patch_size": 14, "width": 1152, "model_type": "vision"},
    }
    return read_hf(raw | changes)


def test_deepseek_vl2_in_its_sizes():
    config = vl2()
    tower: Any = config.tower
    assert (tower.vit.intermediate_size, tower.vit.num_heads, tower.vit.grid, tower.lines) == (4304, 16, 27, 14)
    assert (tower.merge, tower.unit, tower.num_products, tower.projector_size) == (4, 4 * 211, 2, 1280)
    assert config.attention[0].latent is None and config.attention[0].head_dim == 128
    assert config.experts.shared_intermediate_size == 1792 and config.experts.dense_layers == (0,)
    small, largest = vl2(LATENT), vl2(CORRECTED)
    assert small.attention[0].latent.kv_lora_rank == largest.attention[0].latent.kv_lora_rank == 512
    assert (small.experts.scoring_func, largest.experts.scoring_func) == ("softmax", "sigmoid")
    assert largest.experts.correction_bias and largest.experts.routed_scaling_factor == 2.446
    # Fields that the file lacks have the defaults of the published code, not those of DeepSeek-V3.
    assert not largest.experts.norm_weights and largest.attention[0].latent.q_lora_rank is None
    bare = vl2({name: value for name, value in CORRECTED.items() if name != "routed_scaling_factor"})
    assert bare.experts.routed_scaling_factor == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_tag": "1D"}, 'tile_tag must be "2D" or absent'),
        ({"global_view_pos": "tail"}, 'global_view_pos must be "head" or absent'),
        ({"language_config": None}, "language_config must be a mapping"),
        ({"language": {**CORRECTED, "use_mla": False}}, "use_mla must be true or absent"),
        ({"language": {**CORRECTED, "scoring_func": "softmax"}}, 'scoring_func must be "sigmoid"'),
        ({"language": {**LATENT, "topk_method": "noaux_tc"}}, 'scoring_func must be "sigmoid"'),
        ({"projector_config": {"n_embed": 2048}}, "projector_config.n_embed must be 1280 or absent"),
        ({"projector_config": {"projector_type": "linear"}}, "projector_config.projector_type must be"),
        ({"projector_config": {"depth": 1}}, "projector_config.depth must be an integer >= 2"),
        ({"projector_config": {"downsample_ratio": 9}}, "downsample_ratio must be an integer from 1 to 8"),
        ({"vision_config": {"mlp_ratio": 1e9}}, "vision_config.mlp_ratio must be 1 to 1048576, times width 1152"),
    ],
)
def test_what_deepseek_vl2_refuses(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        vl2(**changes)


RADIO = {
    "args": {
        "model": "vit_huge_patch16_224",
        "cls_token_per_teacher": True,
        "register_multiple": 10,
        "teachers": [{"name": "clip"}, {"name": "siglip"}, {"name": "dino_v2"}, {"name": "clip"}],
    },
    "patch_size": 16,
    "preferred_resolution": [768, 768],
}


def nemotron(architecture: str = "Llama_Nemotron_Nano_VL", **changes: Any) -> Any:
    raw = {
        "architectures": [architecture],
        "llm_config": {"model_type": "llama", "hidden_size": 64, "layers_block_type": ["full_attention", "mlp"]},
        "vision_config": RADIO,
        "force_image_size": 512,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "vit_hidden_size": 1280,
        "projector_hidden_size": 4096,
    }
    return read_hf(raw | changes)


def with_args(**args: Any) -> dict[str, Any]:
    return {"vision_config": {**RADIO, "args": {**RADIO["args"], **args}}}


def test_radio_by_the_name_of_its_vit():
    tower: Any = nemotron().tower
    assert (tower.hidden_size, tower.num_layers, tower.num_heads, tower.intermediate_size) == (1280, 32, 16, 5120)
    # Three names of teachers, filled up to ten tokens; patches of one frame.
    assert (tower.num_tokens, tower.side, tower.temporal_patch_size, tower.num_features) == (10, 128, 1, 768)
    assert tower.plain_projector
    other: Any = nemotron(
        "NemotronH_Nano_VL_V2", **with_args(register_multiple=None, cls_token_per_teacher=False)
    ).tower
    assert other.num_tokens == 1 and not other.plain_projector
    base: Any = nemotron(vit_hidden_size=768, **with_args(model="vit_base_patch16_224", cpe_max_size=1024)).tower
    assert (base.hidden_size, base.num_layers, base.num_heads, base.side) == (768, 12, 12, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (with_args(model="vit_giant"), "vision_config.args.model must be one of vit_small_patch16_224"),
        (with_args(min_num_patches=256), "vision_config.args.min_num_patches must be absent"),
        ({"vision_config": {**RADIO, "video_target_num_patches": 256}}, "video_target_num_patches must be absent"),
        (with_args(teachers=["clip"]), "vision_config.args.teachers must be a list of mappings"),
        ({"ps_version": "v1"}, 'ps_version must be "v2" or absent'),
        ({"vit_hidden_size": 64}, "vision_hidden_size must be the hidden_size of vision_config, 1280"),
    ],
)
def test_what_radio_refuses(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        nemotron(**changes)


def test_other_names_of_the_same():
    for name, version in (("minicpmv2_6_vision", "2.6"), ("minicpmv4_5_vision", "4.5")):
        fields = {"architectures": ["MiniCPMO"], "model_type": "minicpmo", "version": version}
        assert read_hf(recorded(name, **fields)) == read_hf(recorded(name))
    assert usual_name("MiniCPMO") == "MiniCPMV"
    # As published the text is not nested, as its class is free to write it.
    flat, vision = recorded("keye_vision"), ("vision_config", "architectures")
    nested = {name: flat[name] for name in vision} | {"text_config": {k: v for k, v in flat.items() if k not in vision}}
    assert read_hf(nested) == read_hf(flat)
    # Whatever OpenCUA calls its text.
    named = recorded("opencua_vision")
    named["text_config"] = named["text_config"] | {"model_type": "opencua_text"}
    assert read_hf(named) == read_hf(recorded("opencua_vision"))


def test_the_projector_of_r_and_bee():
    towers: list[Any] = [read_hf(recorded(name)).tower for name in ("r_vision", "bee_vision")]
    r, bee = towers
    assert (r.projector_size, bee.projector_size, r.norm_eps) == (64, 256, 1e-6)
    with pytest.raises(ModelConfigError, match="multimodal_projector_bias must be true or absent"):
        read_hf(recorded("r_vision", multimodal_projector_bias=False))


@pytest.mark.parametrize(
    ("family", "stored", "own"),
    [
        (
            Cosmos3OmniForConditionalGeneration,
            "layers.3.self_attn.to_q.weight",
            "model.layers.3.self_attn.q_proj.weight",
        ),
        (Cosmos3OmniForConditionalGeneration, "merger.norm.weight", "visual.merger.norm.weight"),
        (Cosmos3OmniForConditionalGeneration, "model.language_model.norm.weight", "model.norm.weight"),
        (OpenCUAForConditionalGeneration, "vision_tower.blocks.3.attn.qkv.bias", "visual.blocks.3.attn.qkv.bias"),
        (OpenCUAForConditionalGeneration, "language_model.lm_head.weight", "lm_head.weight"),
        (
            BeeForConditionalGeneration,
            "model.multi_modal_projector.pre_norm.bias",
            "multi_modal_projector.projector_layernorm.bias",
        ),
        (DeepseekVLV2ForCausalLM, "language.model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.weight"),
        (
            Llama_Nemotron_Nano_VL,
            "vision_model.radio_model.model.patch_generator.cls_token.token",
            "vision_model.embeddings.cls_register_token",
        ),
        (Llama_Nemotron_Nano_VL, "mlp1.0.bias", "multi_modal_projector.layer_norm.bias"),
        # As transformers has them in memory, and trainers send them.
        *(
            (HunYuanVLForConditionalGeneration, f"model.vision_tower.{stored}", f"vit.{own}")
            for stored, own in (
                ("layers.1.layer_norm2.bias", "layers.1.post_attention_layernorm.bias"),
                ("patch_merger.proj_out.weight", "perceive.proj.2.weight"),
                ("patch_merger.image_sep", "perceive.image_sep"),
            )
        ),
        *(
            (CohereAsrForConditionalGeneration, stored, own)
            for stored, own in (
                ("model.encoder.subsampling.linear.bias", "encoder.pre_encode.out.bias"),
                ("model.encoder.layers.1.self_attn.bias_u", "encoder.layers.1.self_attn.pos_bias_u"),
                ("model.encoder.layers.1.self_attn.o_proj.bias", "encoder.layers.1.self_attn.linear_out.bias"),
                ("model.encoder.layers.1.conv.norm.running_var", "encoder.layers.1.conv.batch_norm.running_var"),
                ("model.decoder.pos_emb.weight", "model.positions.weight"),
                ("model.decoder.proj.bias", "encoder_decoder_proj.bias"),
                ("model.decoder.layers.1.encoder_attn.v_proj.bias", "model.layers.1.second_sub_layer.value_net.bias"),
                ("model.decoder.layers.1.final_layernorm.weight", "model.layers.1.layer_norm_3.weight"),
                ("proj_out.bias", "lm_head.bias"),
            )
        ),
    ],
)
def test_names_of_tensors(family, stored, own):
    assert family.checkpoint_names.renamed(stored) == own
