"""What published checkpoints of ERNIE 4.5-VL and later families say of their towers and texts, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.rope import Rope
from jaxengine.models.registry import model_for_hf, read_hf
from scripts.model_names import read_names
from tests.fixtures.drawn_weights import FOLDER
from tests.tables import each_row

NAMED = {name: row.config for row in read_names() for name in row.names}
ERNIE, HUNYUAN = NAMED["baidu/ERNIE-4.5-VL-28B-A3B-PT"], NAMED["tencent/HunyuanOCR"]
GRANITE = NAMED["ibm-granite/granite-vision-3.2-2b"]
PHI4 = NAMED["microsoft/Phi-4-multimodal-instruct"]
PHI3, MINICPM = NAMED["microsoft/Phi-3.5-vision-instruct"], NAMED["openbmb/MiniCPM-V-2_6"]
_XD = HUNYUAN["rope_scaling"]
ARIA, EXAONE, CLOVA, GRANITE4, NEXT_VIDEO, OVIS2, IDEFICS2, MLLAMA, LFM3, HY4, PHI4_REASONING, EDGE = (
    json.loads((FOLDER / name / "config.json").read_text())
    for name in (
        "aria_vision",
        "exaone4_5_vision",
        "hyperclovax_vision",
        "granite4_plain_vision",
        "llava_next_video_vision",
        "ovis2_vision",
        "idefics2_vision",
        "mllama_vision",
        "lfm3_vl_vision",
        "hy_v4_vl_vision",
        "phi4_reasoning_vision",
        "cosmos3_edge_vision",
    )
)


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
    unbounded = read_hf(ERNIE | {"moe_norm_min": 0.0}).experts
    assert unbounded is not None and 0 < unbounded.min_weight_sum < 1e-37


def test_nested_configurations_that_are_null_are_as_absent_ones():
    texts = {"text_config"}, {"vision_config"}, {"text_config", "vision_config"}
    for raw, each in ((MLLAMA, texts), (ARIA, texts), (PHI4, texts[1:2]), (IDEFICS2, ({"perceiver_config"},))):
        for names in each:
            absent = {name: value for name, value in raw.items() if name not in names}
            assert _read(absent) == _read(absent | dict.fromkeys(names)), (raw["architectures"], names)


def _read(raw: dict[str, Any]) -> Any:
    """The configuration, or the error of one whose parts do not fit."""
    try:
        return read_hf(raw)
    except ModelConfigError as error:
        return str(error)


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


def test_lfm3_vl():
    """transformers' defaults, and names in memory and in published files."""
    text = {key: LFM3[key] for key in ("architectures", "text_config")}
    for given in ({}, None):
        tower: Any = read_hf(text | {"vision_config": given}).tower
        assert (tower.hidden_size, tower.intermediate_size, tower.num_heads, tower.num_kv_heads) == (1024, 2560, 16, 8)
        assert [kind == "conv" for kind in tower.layer_types] == [True, True, *[False, True] * 6]
        assert (tower.conv_kernel, tower.norm_eps, tower.rope_theta, tower.num_features) == (3, 1e-5, 1e6, 1536)
        assert (tower.projector_size, tower.projector_activation, tower.projector_bias) == (4096, "gelu", True)
    assert read_hf({key: value for key, value in LFM3.items() if key != "tie_word_embeddings"}).tie_word_embeddings
    names = model_for_hf("Lfm3VlForConditionalGeneration").checkpoint_names
    for stored, ours in (
        ("model.language_model.embedding_norm.weight", "model.norm.weight"),
        ("model.language_model.layers.1.self_attn.g_proj.weight", "model.layers.1.self_attn.gate_proj.weight"),
        ("model.vision_tower.embedding_norm.weight", "vision_tower.embedding_norm.weight"),
        ("model.vision_tower.patchifier.weight", "vision_tower.patch_embed.weight"),
        ("model.vision_tower.layers.2.self_attn.q_layernorm.weight", "vision_tower.layers.2.self_attn.q_norm.weight"),
        ("model.multi_modal_projector.linear_1.bias", "multi_modal_projector.linear_1.bias"),
    ):
        assert names.renamed(stored) == ours


def test_hy_v4_vl():
    """transformers' defaults, and names in memory and in published files."""
    raw = {"architectures": HY4["architectures"], "vision_config": None}
    config = read_hf(raw | {"text_config": {"model_type": "hy_v4_vl_text"}})
    tower: Any = config.tower
    rope, index, latent = config.attention[0].rope, config.attention[0].index, config.attention[0].latent
    assert rope is not None and index is not None and latent is not None
    assert (rope.sections, rope.sections_interleaved, rope.theta) == ((12, 10, 10), True, 1e4)
    assert (index.num_heads, latent.q_lora_rank, config.num_layers, config.hidden_size) == (32, 2048, 78, 6144)
    assert (tower.vit.hidden_size, tower.vit.num_layers, tower.vit.grid, tower.merge) == (1536, 40, 128, 4)
    names = model_for_hf("HYV4VLForConditionalGeneration").checkpoint_names
    for stored, ours in (
        ("model.hc_head.hc_pre.hc_head_fn", "model.hc_head.hc_fn"),
        ("model.language_model.hc_head.hc_fn", "model.hc_head.hc_fn"),
        ("model.language_model.layers.0.self_attn.sinks", "model.layers.0.self_attn.sinks"),
        ("model.vision_tower.patch_merger.proj_out.bias", "vit.perceive.proj.2.bias"),
        ("model.vision_tower.patch_merger.before_rms.weight", "vit.perceive.norm.weight"),
        ("model.vision_tower.layers.0.mlp.fc1.weight", "vit.layers.0.mlp.dense_h_to_4h.weight"),
        ("vit.layers.0.input_layernorm.bias", "vit.layers.0.input_layernorm.bias"),
    ):
        assert names.renamed(stored) == ours, stored


def test_granite_vision():
    """Embeddings of images are multiplied, too; logits are divided, which transformers 5 leaves out with a tower."""
    config = read_hf(GRANITE)
    tower: Any = config.tower
    assert config.architecture == "LlavaNextForConditionalGeneration[GraniteForCausalLM]"
    assert (config.embedding_multiplier, config.logit_scale, tower.multiplier) == (12.0, 1 / 8, 12.0)
    assert (tower.layers, tower.num_newlines, tower.unit) == ((4, 8, 16, 27), 27, 27 * 28)
    llama = GRANITE | {"text_config": GRANITE["text_config"] | {"model_type": "llama"}}
    assert read_hf(llama).architecture == "LlavaNextForConditionalGeneration"


def test_granite4_vision():
    """Parts in the order of the text's layers, the first of zeros if none is added before the first layer."""
    tower: Any = read_hf(GRANITE4).tower
    assert (tower.num_parts, tower.part_layers, tower.layers_with_parts) == (6, (1, 2, 3, 5, 6), 6)
    assert [(part.source[-1], part.depth, part.corner) for part in tower.parts] == [
        ("0", 3, 0),
        ("0", 2, None),
        ("2", 3, 2),
        ("3", 3, 3),
        ("1", 3, 1),
    ]
    assert (tower.merge, tower.unit, tower.lines) == (4, 24, 2)
    alone: Any = read_hf(GRANITE4 | {"qformer_config": None, "spatial_target_layers": [0, 1, 3, 4]}).tower
    assert (alone.num_parts, alone.part_layers) == (5, (1, 2, 3, 4))
    assert (alone.queries.num_layers, alone.queries.cross_every, alone.queries.intermediate_size) == (1, 1, 3072)


def test_hyperclovax_vision():
    """Names of the published file; what its text multiplies, the tower multiplies, too."""
    config = read_hf(CLOVA)
    tower: Any = config.tower
    assert (tower.multiplier, tower.out_hidden_size, config.logit_scale) == (3.0, 36, 0.5)
    published = CLOVA | {"architectures": ["HCXVisionV2ForCausalLM"], "model_type": "vlm"}
    assert read_hf(published) == config
    names = model_for_hf("HCXVisionV2ForCausalLM").checkpoint_names
    for stored, ours in (
        ("model.language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.lm_head.weight", "lm_head.weight"),
        ("model.vision_model.blocks.0.norm1.weight", "visual.blocks.0.norm1.weight"),
        ("model.vision_projector.bias", "projector.bias"),
    ):
        assert names.renamed(stored) == ours


def test_phi4_multimodal():
    """The published file, which says nothing of the tower's sizes, names of its tensors, and transformers' form."""
    config = read_hf(PHI4)
    tower: Any = config.tower
    rope: Any = config.attention[0].rope
    assert (tower.vit.grid, tower.lines, tower.unit, tower.num_used_layers) == (32, 16, 1092, 26)
    assert (tower.adapter, rope.rotary_dim) == ("vision-lora", 96)
    whole = PHI4 | {"architectures": ["Phi4MultimodalForCausalLM"], "vision_config": {"image_token_id": 200010}}
    assert read_hf(whole) == config
    names = model_for_hf("Phi4MMForCausalLM").checkpoint_names
    begin = "model.embed_tokens_extend.image_embed"
    for stored, ours in (
        ("model.layers.0.mlp.down_proj.base_layer.weight", "model.layers.0.mlp.down_proj.weight"),
        (f"{begin}.img_projection.2.bias", "image_embed.img_projection_down.bias"),
        (f"{begin}.glb_GN", "image_embed.global_img_feature_extensor"),
        (f"{begin}.sub_GN", "image_embed.sub_img_feature_extensor"),
        (f"{begin}.img_processor.head.probe", "image_embed.img_processor.head.probe"),
    ):
        assert names.renamed(stored) == ours and not names.is_unused(stored)
    for stored in (
        "model.layers.0.mlp.down_proj.lora_B.vision.weight",
        "model.embed_tokens_extend.audio_embed.encoder.encoders.0.layer_norm.weight",
    ):
        assert names.is_unused(stored)


def test_phi3_vision():
    """The published file, which names CLIP and does not state its sizes, and names of its tensors."""
    tower: Any = read_hf(PHI3).tower
    assert (tower.vit.grid, tower.lines, tower.unit, tower.merge, tower.num_used_layers) == (24, 12, 628, 4, 23)
    names = model_for_hf("Phi3VForCausalLM").checkpoint_names
    begin = "model.vision_embed_tokens"
    for stored in (f"{begin}.img_projection.2.bias", f"{begin}.glb_GN", f"{begin}.img_processor.vision_model.x"):
        assert names.renamed(stored) == stored.removeprefix("model.")


def test_phi4_reasoning_vision():
    """The last layer and the last norm of the tower are not used; sizes of SigLIP 2 that a file may leave out."""
    config = read_hf(PHI4_REASONING)
    tower: Any = config.tower
    assert (tower.num_used, tower.vit.num_layers, tower.merge, tower.projector_size) == (2, 3, 1, config.hidden_size)
    left_out = {name: value for name, value in PHI4_REASONING["vision_config"].items() if name != "num_patches"}
    usual: Any = read_hf(PHI4_REASONING | {"vision_config": left_out}).tower
    assert usual.vit.grid == 16 and usual.vit.patch_size == 4
    names, stored = model_for_hf("Phi4ForCausalLMV").checkpoint_names, "model.vision_tower.vision_tower.vision_model"
    for name, ours in (
        (f"{stored}.encoder.layers.0.mlp.fc1.bias", "vision_tower.encoder.layers.0.mlp.fc1.bias"),
        ("model.mm_projector.2.bias", "multi_modal_projector.linear_2.bias"),
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
    ):
        assert names.renamed(name) == ours and not names.is_unused(name)
    assert tower.unused == ("vision_tower.head.", "vision_tower.post_layernorm.", "vision_tower.encoder.layers.2.")
    for wrong, message in (
        ({"mm_projector_type": "linear"}, "mm_projector_type must be"),
        ({"use_s2": True}, "use_s2 must be"),
        ({"mm_hidden_size": 48}, "mm_hidden_size must be 32, hidden_size of vision_config"),
        ({"vision_config": left_out | {"num_hidden_layers": 1}}, "num_hidden_layers must be at least 2"),
        ({"vision_config": left_out | {"num_patches": 8}}, "num_patches must be a square"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_hf(PHI4_REASONING | wrong)


def test_cosmos3_edge():
    """Defaults of fields, and names of tensors as published, as transformers writes them and as it holds them."""
    config = read_hf(EDGE)
    tower: Any = config.tower
    assert (tower.merge, tower.norms_patches, tower.num_used, tower.temporal_patch_size) == (4, True, 2, 1)
    rope: Any = config.attention[0].rope
    assert config.activation == "relu2" and rope.sections_interleaved
    text = {key: value for key, value in EDGE["text_config"].items() if key not in ("rope_parameters", "hidden_act")}
    usual = read_hf(EDGE | {"text_config": text | {"head_dim": 128}})
    rope = usual.attention[0].rope
    assert (rope.theta, rope.sections, usual.activation) == (1e8, (24, 20, 20), "relu2")
    names = model_for_hf("Cosmos3EdgeForConditionalGeneration").checkpoint_names
    layer = "vision_tower.encoder.layers.0"
    for stored, ours in (
        ("layers.0.self_attn.to_out.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.fc2.weight", "model.layers.0.mlp.down_proj.weight"),
        ("model.visual.encoder.layers.0.mlp.fc1.bias", f"{layer}.mlp.fc1.bias"),
        ("model.visual.encoder.layers.0.mlp.up_proj.bias", f"{layer}.mlp.fc1.bias"),
        ("model.visual.encoder.layers.0.self_attn.to_q.bias", f"{layer}.self_attn.q_proj.bias"),
        ("model.projector.norm.bias", "multi_modal_projector.layer_norm.bias"),
    ):
        assert names.renamed(stored) == ours and not names.is_unused(stored), stored
    for stored in ("layers.0.mlp_moe_gen.up_proj.weight", "proj_in.weight", "action_proj_in.fc.weight"):
        assert names.is_unused(stored) and names.is_unused(f"model.language_model.{stored}")
    with pytest.raises(ModelConfigError, match="spatial_merge_size must be 1, 2, 4 or 8"):
        read_hf(EDGE | {"vision_config": EDGE["vision_config"] | {"spatial_merge_size": 3}})


def test_perceivers_of_idefics2_have_the_hidden_size_of_the_text():
    """With the text's epsilon where they name another size, or none, as in transformers."""
    size, text = (IDEFICS2["text_config"][name] for name in ("hidden_size", "rms_norm_eps"))
    for given, eps in ((size, 1e-3), (48, text), (None, text)):
        perceiver = IDEFICS2["perceiver_config"] | {"hidden_size": given, "rms_norm_eps": 1e-3}
        tower: Any = read_hf(IDEFICS2 | {"perceiver_config": perceiver}).tower
        assert tower.norm_eps == eps


def test_minicpmv_2_6():
    """The published file, whose `version` names the language model, and names of its tensors."""
    config = read_hf(MINICPM)
    tower: Any = config.tower
    assert (tower.unit, tower.merge, tower.num_queries, tower.vit.grid) == (1216, 19, 64, 70)
    assert config.attention[0].bias and not config.attention[0].qk_norm
    assert read_hf(MINICPM | {"version": "2.6", "vision_config": MINICPM["vision_config"]}) == config
    llama, qwen3 = (read_hf(MINICPM | {"version": version}).attention[0] for version in (4.0, 4.5))
    assert not llama.bias and not llama.qk_norm and qwen3.qk_norm
    names = model_for_hf("MiniCPMV").checkpoint_names
    for stored, ours in (
        ("llm.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("llm.lm_head.weight", "lm_head.weight"),
        ("vpm.encoder.layers.0.mlp.fc1.bias", "vpm.encoder.layers.0.mlp.fc1.bias"),
        ("resampler.attn.in_proj_bias", "resampler.attn.in_proj.bias"),
        ("resampler.proj", "resampler.proj.weight"),
    ):
        assert names.renamed(stored) == ours and not names.is_unused(stored)
    assert names.is_unused("apm.conv1.weight")


# mistral-community/pixtral-12b without the hidden states that its own file names.
PIXTRAL: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {"hidden_size": 5120, "model_type": "mistral", "num_hidden_layers": 40, "vocab_size": 131072},
    "vision_config": {"image_size": 1024, "model_type": "pixtral", "patch_size": 16},
}
FULL = {"vision_feature_select_strategy": "full"}


def test_pixtral_uses_the_states_that_its_class_does():
    """Pixtral's tower of 24 layers gives the states before its last layer, or those that a file names."""
    for change, used in (({}, 23), ({"vision_feature_layer": -1}, 24), ({"vision_feature_layer": 3}, 3)):
        tower: Any = read_hf(PIXTRAL | FULL | change).tower
        assert tower.num_used_layers == used


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
        (EXAONE, "vision_config", {"num_key_value_heads": 4}, "num_key_value_heads must be a divisor of num_heads = 6"),
        (EXAONE, "vision_config", {"out_hidden_size": 60}, "out_hidden_size must be the hidden_size of the text, 64"),
        (EXAONE, None, {"vision_config": []}, "vision_config must be a mapping"),
        (NEXT_VIDEO, None, {"spatial_pool_stride": 4}, "spatial_pool_stride must be 2 or absent, got 4"),
        (NEXT_VIDEO, None, {"spatial_pool_mode": "conv"}, "spatial_pool_mode must be average or max, got 'conv'"),
        (NEXT_VIDEO, "vision_config", {"patch_size": 8}, "image_size must be an even number of patches of 8, got 24"),
        (CLOVA, None, {"mm_projector_type": "mlp"}, 'mm_projector_type must be "linear" or absent'),
        (CLOVA, "text_config", {"model_type": "llama"}, 'model_type must be "hyperclovax" or absent'),
        (CLOVA, None, {"vision_config": []}, "vision_config must be a mapping"),
        (
            GRANITE4,
            None,
            {"downsample_rate": "3/8"},
            "downsample_rate must be of the form n/2n, where 2n is at most 64",
        ),
        (GRANITE4, None, {"downsample_rate": "0/0"}, "downsample_rate must be of the form n/2n"),
        (GRANITE4, None, {"downsample_rate": "3/6"}, "and divides the 4 patches of a line"),
        (GRANITE4, None, {"downsample_rate": None}, "downsample_rate is missing"),
        (GRANITE4, None, {"deepstack_layer_map": [[-2, 2, 1]]}, "deepstack_layer_map must be a list of pairs"),
        (GRANITE4, None, {"deepstack_layer_map": [[-9, 2]]}, "deepstack_layer_map must be an integer from -4 to 3"),
        (GRANITE4, None, {"spatial_target_layers": [1, 2, 3, 4, 5]}, "target_layers must be a list of up to 4 layers"),
        (
            GRANITE4,
            None,
            {"deepstack_layer_map": [[-2, 7]], "spatial_target_layers": [9, -1]},
            "deepstack_layer_map must be with a layer of the text model, 0 to 6",
        ),
        (GRANITE4, None, {"use_spatial_sampling": False}, "use_spatial_sampling must be true or absent"),
        (
            GRANITE4,
            "qformer_config",
            {"use_qformer_text_input": True},
            "qformer_config.use_qformer_text_input must be false or absent",
        ),
        (GRANITE4, "text_config", {"model_type": "granitemoehybrid"}, "model_type must be granite or granite4_vision"),
        (HUNYUAN, None, {"use_qk_norm": False}, "use_qk_norm must be true or absent, got False"),
        (HUNYUAN, "vision_config", {"interpolate_mode": "bicubic"}, 'interpolate_mode must be "bilinear" or absent'),
        (HUNYUAN, "vision_config", {"num_key_value_heads": 4}, "num_key_value_heads must be 16 or absent, got 4"),
        (HUNYUAN, "vision_config", {"spatial_merge_size": 9}, "spatial_merge_size must be 1 to 8, got 9"),
        (HUNYUAN, "vision_config", {"max_image_size": 8192}, "image_size must be an integer >= 1 and <= 4096"),
        (PHI4, None, {"vision_config": {"crop_size": 336}}, "vision_config.crop_size must be 448 or absent, got 336"),
        (PHI4, None, {"vision_config": {"feature_layer": 28}}, "feature_layer must be an integer from -28 to 27"),
        (PHI4, None, {"vision_config": {"patch_size": 448}}, "image_size must be at least 2 patches of 448"),
        (PHI4, None, {"img_processor": {"layer_idx": -1}}, "img_processor must be absent, got {"),
        (
            PHI4,
            "embd_layer",
            {"image_embd_layer": {"hd_transform_order": "glb_sub"}},
            'image_embd_layer.hd_transform_order must be "sub_glb" or absent',
        ),
        (PHI4, "embd_layer", {"image_embd_layer": {"crop_size": 336}}, "image_embd_layer.crop_size must be 448 or abs"),
        (PHI3, "img_processor", {"type_feature": "cls_patch"}, 'type_feature must be "patch" or absent'),
        (PHI3, "img_processor", {"image_dim_out": 1152}, "image_dim_out must be 1024 or absent, got 1152"),
        (PHI3, "img_processor", {"num_img_tokens": 576}, "num_img_tokens must be 144 or absent, got 576"),
        (PHI3, "img_processor", {"layer_idx": 25}, "layer_idx must be an integer from -25 to 24"),
        (PHI3, "img_processor", {"patch_size": 16}, "image_size must be such that it divides the 21 patches of"),
        (PHI3, "embd_layer", {"hd_transform_order": "glb_sub"}, 'hd_transform_order must be "sub_glb" or absent'),
        (MLLAMA, "vision_config", {"max_num_tiles": 17}, "max_num_tiles must be an integer from 1 to 16, got 17"),
        (MLLAMA, "vision_config", {"max_num_tiles": 3}, "supported_aspect_ratios must be all tilings of at most 3"),
        (MLLAMA, "vision_config", {"supported_aspect_ratios": 7}, "supported_aspect_ratios must be all tilings"),
        (MLLAMA, "vision_config", {"image_size": 1600}, "image_size must be such that 4 tiles have at most"),
        (MLLAMA, "vision_config", {"intermediate_layers_indices": [3]}, "indices must be a list of layers from 0"),
        (MLLAMA, "vision_config", {"intermediate_layers_indices": None}, "must be a list of layers from 0 to 2"),
        (MLLAMA, "vision_config", {"vision_output_dim": 64}, "vision_output_dim must be hidden_size times 3"),
        (MLLAMA, "text_config", {"cross_attention_layers": [5]}, "must be a list of some, but not all, layers"),
        (MLLAMA, "text_config", {"cross_attention_layers": [1, 1]}, "must be a list of some, but not all, layers"),
        (MLLAMA, "text_config", {"cross_attention_layers": []}, "must be a list of some, but not all, layers"),
        (MLLAMA, "text_config", {"tie_word_embeddings": True}, "tie_word_embeddings must be false or absent, got True"),
        (ARIA, None, {"projector_patch_to_query_dict": {"49": 1025}}, "dict must be a mapping of 1 to 65536 patches"),
        (ARIA, None, {"projector_patch_to_query_dict": {"7²": 5}}, "dict must be a mapping of 1 to 65536 patches"),
        (ARIA, None, {"projector_patch_to_query_dict": {}}, "with at most 64 entries, got {}"),
        (ARIA, None, {"vision_feature_layer": [-1, -2]}, "vision_feature_layer must be an integer from -3 to 2"),
        (ARIA, "text_config", {"model_type": "llama"}, "model_type must be aria_text, got 'llama'"),
        (ARIA, "text_config", {"moe_topk": 9}, "num_per_token must be at most num_experts = 6, got 9"),
        (ARIA, "vision_config", {"model_type": "siglip_vision_model"}, 'model_type must be "idefics3_vision"'),
        (
            IDEFICS2,
            "perceiver_config",
            {"resampler_n_latents": 1025},
            "resampler_n_latents must be an integer from 1 to",
        ),
        (
            IDEFICS2,
            "perceiver_config",
            {"num_key_value_heads": 3},
            "num_key_value_heads must be a divisor of resampler_",
        ),
        (OVIS2, "vision_config", {"tokenize_function": "gumbel_argmax"}, "must be softmax or st_argmax, got 'gumbel"),
        (OVIS2, "vision_config", {"num_visual_indicator_tokens": 4}, "num_visual_indicator_tokens must be 5 or absent"),
        (OVIS2, "vision_config", {"hidden_stride": 3}, "hidden_stride must be such that it divides the 4 patches of"),
        (OVIS2, "vision_config", {"vocab_size": 5}, "vocab_size must be more than 5, got 5"),
        (OVIS2, "text_config", {"model_type": "t5gemma"}, "model_type must be that of a decoder"),
        (LFM3, "vision_config", {"conv_kernel_size": 4}, "conv_kernel_size must be an odd integer from 1 to 7, got 4"),
        (LFM3, "vision_config", {"conv_kernel_size": 9}, "conv_kernel_size must be an odd integer from 1 to 7, got 9"),
        (LFM3, "vision_config", {"num_attention_heads": 5}, "hidden_size must be a multiple of 4 * num_attention"),
        (LFM3, "vision_config", {"num_key_value_heads": 3}, "must be a divisor of num_attention_heads = 4, got 3"),
        (LFM3, "vision_config", {"layer_types": ["conv"]}, "layer_types must be a list of 3 of conv, full_attention"),
        (LFM3, "vision_config", {"in_channels": 1}, "in_channels must be 3 or absent, got 1"),
        (LFM3, "vision_config", {"model_type": "siglip"}, 'model_type must be "lfm3_vl_vision" or absent, got'),
        (LFM3, "vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters must be a mapping with"),
        (LFM3, "text_config", {"model_type": "lfm2"}, "model_type must be lfm3 in text_config, got 'lfm2'"),
        (HY4, "vision_config", {"out_hidden_size": 32}, "out_hidden_size must be the hidden_size of the text, 64, got"),
        (HY4, "vision_config", {"interpolate_mode": "bicubic"}, 'interpolate_mode must be "bilinear" or absent'),
        (HY4, "text_config", {"model_type": "hy_v4"}, "model_type must be hy_v4_vl_text in text_config, got 'hy_v4'"),
        (HY4, "text_config", {"rope_parameters": {"mrope_section": [2, 2, 3]}}, "that sum up to rotary_dim / 2 = 6"),
        (HY4, "text_config", {"rope_parameters": {"mrope_section": [2, 2, 1, 1]}}, "must be a list of three numbers"),
        (PIXTRAL, None, {"vision_feature_layer": -1}, "select_strategy must be \"full\" or absent, got 'default'"),
        (PIXTRAL | FULL, None, {"vision_feature_layer": [-1, 1]}, "vision_feature_layer must be an integer from -25"),
    ],
)
def test_refused(raw: dict[str, Any], where: str | None, change: dict[str, Any], message: str):
    changed = raw | change if where is None else raw | {where: raw[where] | change}
    with pytest.raises(ModelConfigError) as error:
        read_hf(changed)
    assert message in str(error.value)
