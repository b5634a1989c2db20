"""Which modules of a checkpoint are stored how: by the names that it has for them, in the words of each format."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine.models.build import Build
from jaxengine.models.model_classes import MODELS
from jaxengine.models.quantization.base.quantized import Quantized
from jaxengine.models.quantization.base.rules import Quantization
from jaxengine.models.quantization.base.stored import Activation
from jaxengine.models.registry import build_model, read_folder, read_hf
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.pallas_kernels.matmul.rounding import FLOAT32, UE8M0
from jaxengine.sharding.layout import MeshLayout
from tests.fixtures.drawn_weights import FOLDER, checkpoint
from tests.fixtures.quantized_models import CONFIG, FORMATS, write
from tests.models.quantization.test_damage import COMPRESSED, Q, settings


def kinds(quantization: Quantization, *modules: str) -> list[str]:
    return [type(quantization(f"model.layers.3.{module}")).__name__ for module in modules]


def test_modules_are_chosen_by_the_names_of_the_checkpoint():
    chosen = read_hf(
        settings(**COMPRESSED | {"ignore": ["re:.*self_attn.*", "model.layers.3.mlp.down_proj"]})
    ).quantization
    names = ("self_attn.q_proj", "mlp.down_proj", "mlp.up_proj", "mlp.experts.{expert}.up_proj")
    assert kinds(chosen, *names) == ["Plain", "Plain", "Quantized", "Quantized"]
    assert type(chosen("lm_head")).__name__ == "Quantized", "LINEAR stands for it, and it is not ignored"
    fp8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    chosen = read_hf(settings(**fp8, modules_to_not_convert=["mlp.down_proj", "model.layers.*.self_attn"])).quantization
    assert kinds(chosen, *names) == ["Plain", "Plain", "Quantized", "Quantized"]
    assert type(chosen("lm_head")).__name__ == "Plain"
    group = COMPRESSED["config_groups"]["group_0"]
    groups = {"a": {**group, "targets": ["re:.*up_proj$"]}, "b": {**group, "targets": ["model.layers.3.mlp.down_proj"]}}
    chosen = read_hf(settings(**COMPRESSED | {"config_groups": groups})).quantization
    assert kinds(chosen, *names) == ["Plain", "Quantized", "Quantized", "Quantized"]


def test_the_nearest_target_of_compressed_tensors_counts_whatever_its_group():
    group = COMPRESSED["config_groups"]["group_0"]
    own = {"format": "int-quantized", "weights": {"num_bits": 8, "strategy": "channel"}}
    rows = {**own, "input_activations": {"num_bits": 8, "dynamic": True, "strategy": "token"}}
    by_token = Activation("int8")
    groups = {
        "a": group,
        "b": {**rows, "targets": ["re:.*mlp.*"]},
        "c": {**own, "targets": ["model.layers.3.mlp.down_proj"]},
    }
    for order in ("abc", "cba", "bca"):
        chosen = read_hf(
            settings(**COMPRESSED | {"config_groups": {name: groups[name] for name in order}})
        ).quantization
        found = [stored_of(chosen, f"model.layers.3.{name}_proj") for name in ("self_attn.q", "mlp.up", "mlp.down")]
        assert [(each.dtype, each.activation) for each in found] == [("int4", None), ("int8", by_token), ("int8", None)]


def stored_of(quantization, module: str):
    scheme = quantization(module)
    return scheme.stored if isinstance(scheme, Quantized) else None


def test_what_compressed_tensors_need_not_say():
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
    for size, expected in ((32, 32), (-1, None)):
        own = {**group, "weights": {"num_bits": 4, "group_size": size}}
        whole = COMPRESSED | {"config_groups": {"g": own}}
        assert stored_of(read_hf(settings(**whole)).quantization, "model.layers.0.mlp.up_proj").group == expected
    # The field's first name.
    chosen = read_hf({**CONFIG, "compression_config": COMPRESSED}).quantization
    assert kinds(chosen, "mlp.up_proj") == ["Quantized"]
    # Keys and values alone.
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    chosen = read_hf(settings(**COMPRESSED | {"config_groups": {}, "kv_cache_scheme": cache})).quantization
    assert chosen.kv_dtype == "float8_e4m3fn"
    assert kinds(chosen, "mlp.up_proj") == ["Plain"]


def test_what_transformers_writes_of_fp8():
    """All fields of its class, those that say nothing among them."""
    for scale_fmt, scales in (("float", FLOAT32), ("ue8m0", UE8M0), (None, FLOAT32)):
        chosen = read_hf(settings(quant_method="fp8", weight_block_size=[8, 8], scale_fmt=scale_fmt)).quantization
        assert stored_of(chosen, "model.layers.0.mlp.up_proj").activation.scales == scales
    methods = (read_hf(settings(quant_method=name, weight_block_size=[8, 8])).quantization for name in ("FP8", "fp8"))
    assert len({*methods}) == 1


def test_modules_that_gptq_stores_otherwise():
    def found(*modules: str, **changes):
        chosen = read_hf(settings(quant_method="gptq", bits=4, group_size=32, **changes)).quantization
        return [stored_of(chosen, f"model.layers.18.{module}") for module in modules]

    dynamic = {r"-:.*\.18\..*down.*": {}, r"+:.*\.18\.mlp.*": {"bits": 8, "group_size": -1}, r".*up.*": {"bits": 2}}
    q, up, down = found("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj", dynamic=dynamic)
    assert (q.bits, q.group, up.bits, up.group, down) == (4, 32, 8, None, None)
    for heads in (False, True):  # which one field names, whatever patterns fit them
        chosen = read_hf(
            settings(quant_method="gptq", bits=4, lm_head=heads, dynamic={"+:.*": {"bits": 8}})
        ).quantization
        assert (stored_of(chosen, "lm_head") is not None) == heads
    inner = [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.up_proj"]]
    names = "self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"
    assert [each is not None for each in found(*names, modules_in_block_to_quantize=inner)] == [
        True,
        False,
        True,
        False,
    ]
    assert [each is not None for each in found(*names, modules_to_not_convert=["self_attn."])] == [
        False,
        False,
        True,
        True,
    ]
    for field in ("format", "checkpoint_format"):
        assert not found("mlp.up_proj", **{field: "gptq_v2"})[0].one_less
        assert found("mlp.up_proj", **{field: "gptq"})[0].one_less
    assert found("mlp.up_proj")[0].one_less


def test_names_of_a_model_of_more_than_text():
    """Those of the checkpoint begin in another way than the model's."""
    quantization = Quantization(
        "x", (), ignored=("model.language_model.layers.0.a",), prefixes=(("model.language_model.", "model."),)
    )
    assert quantization.names_of("model.layers.0.a") == ["model.layers.0.a", "model.language_model.layers.0.a"]
    assert quantization.names_of("lm_head") == ["lm_head"]
    tower, layer = "model.vision_tower", "model.layers.0.self_attn.o_proj"
    resampled = [f"model.resampler_model.spatial_linear.fc{part}" for part in (1, 2)]
    resampler = "resampler_model.spatial_linear.0", "resampler_model.spatial_linear.2", "resampler_model.mlp"
    perceiver = "vit.layers.0.mlp.dense_h_to_4h", "vit.perceive.mlp", "vit.layers.0.mlp.dense_4h_to_h"
    sight = "model.vision_model.transformer.layers.0.self_attn"
    encoder = "vision_tower.vision_encoder.encoder.layers.0.self_attn"
    radio, own = "vision_model.radio_model.model.blocks.0", "vision_model.encoder.layer.0.attention"
    joined = "multi_modal_projector.cross_attn.multihead_attn.in_proj"
    for name, plain, modules, kinds in (
        (
            "kimi_k25_vision",
            [tower, "re:model.mm_projector"],
            ("vision_tower.encoder.blocks.0.mlp.fc0", "mm_projector.a"),
            "pp",
        ),
        ("ernie4_5_vl_vision", [tower, *resampled], ("visual.blocks.0.attn.qkv", *resampler), "pppq"),
        ("hunyuan_vl_vision", [f"{tower}.layers.0.mlp.fc1", f"{tower}.patch_merger.mlp"], perceiver, "ppq"),
        (
            "deepseek_ocr_vision",
            [f"{sight}.qkv_proj"],
            (f"{encoder}.q_proj", f"{encoder}.v_proj", f"{encoder}.out_proj"),
            "ppq",
        ),
        ("nemotron_nano_vl_vision", [f"{radio}.attn.qkv"], (f"{own}.q_proj", f"{own}.v_proj", f"{own}.o_proj"), "ppq"),
        ("bailing_moe", ["model.layers.0.self_attn.k_proj"], ("model.layers.0.attention.query_key_value",), "p"),
        # Joined parameters, which no list names, as they are no modules.
        ("aria_vision", [], (joined, "multi_modal_projector.cross_attn.multihead_attn.out_proj"), "pq"),
        ("minicpmv2_6_vision", [], ("resampler.attn.in_proj", "resampler.proj", "resampler.kv_proj"), "ppq"),
    ):
        raw = json.loads((FOLDER / name / "config.json").read_text())
        stored = {"quant_method": "fp8", "modules_to_not_convert": plain}
        chosen = read_hf(raw | {"quantization_config": stored}).quantization
        found = "".join(type(chosen(module)).__name__[0].lower() for module in (*modules, layer))
        assert found == f"{kinds}q", name


def test_stacks_of_gate_and_of_up_are_chosen_by_their_own_names():
    """Step's, in its first code's names, as parts of a module that is named, or alone."""
    raw = json.loads((FOLDER / "step3p5" / "config.json").read_text())
    plain = ["model.layers.0.moe", "model.layers.2.moe.gate_proj", "model.layers.2.share_expert.down_proj"]
    stored = {"quant_method": "fp8", "weight_block_size": [8, 8], "modules_to_not_convert": plain}
    chosen = read_hf(raw | {"quantization_config": stored}).quantization
    parts = [f"{module}.{part}_proj" for module in ("experts.{expert}", "shared_experts") for part in ("gate", "down")]
    kinds = [type(chosen(f"model.layers.{n}.mlp.{part}")).__name__ for n in (0, 2) for part in parts]
    assert kinds == ["Plain", "Plain", "Quantized", "Quantized", "Plain", "Quantized", "Quantized", "Plain"]


def test_modules_are_chosen_by_their_names_in_transformers():
    """Which transformers writes into the configuration of a folder whose tensors have the published names."""
    raw = json.loads((FOLDER / "minimax_m2" / "config.json").read_text())
    plain = ["model.layers.0.mlp.gate", "model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts"]
    stored = {"quant_method": "fp8", "weight_block_size": [8, 8], "modules_to_not_convert": plain}
    chosen = read_hf(raw | {"quantization_config": stored}).quantization
    parts = ["gate", *(f"experts.{{expert}}.{name}" for name in ("w1", "w2", "w3"))]
    kinds = [type(chosen(f"model.layers.{n}.block_sparse_moe.{part}")).__name__ for n in (0, 1) for part in parts]
    assert kinds == ["Plain", "Plain", "Quantized", "Plain", "Quantized", "Plain", "Plain", "Plain"]


def test_experts_are_chosen_by_the_name_of_their_stack(tmp_path):
    """Granite 4 calls it otherwise than other families: its ignored matrices load as they are, the others by codes."""
    folder, experts = checkpoint("granite_hybrid"), "model.layers.{}.block_sparse_moe.{}_linear"
    stacks = [experts.format(layer, part) for layer in range(4) for part in ("input", "output")]
    ignored = ["lm_head", "re:.*mamba.*", "re:.*router.*", *stacks]
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = FORMATS["ct int channel token"][0] | {"ignore": ignored}
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".self_attn." in name or ".shared_mlp." in name]:
        values = tensors[name]
        scales = np.abs(values).max(axis=1, keepdims=True) / 127
        tensors[name] = np.rint(values / scales).astype(np.int8)
        tensors[f"{name.removesuffix('.weight')}.weight_scale"] = scales
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    model = build_model(read_folder(tmp_path), Build("float32"))
    nnx.update(model, load_params(model, SafetensorsCheckpoint(tmp_path)))
    kinds_of = {".".join(map(str, path)): type(each).__name__ for path, each in nnx.iter_graph(model)}
    mlps = {name: kind for name, kind in kinds_of.items() if ".mlp." in name and kind.endswith("Weight")}
    assert {kind for name, kind in mlps.items() if ".shared" in name} == {"QuantizedWeight"}, mlps
    assert {kind for name, kind in mlps.items() if ".shared" not in name} == {"PlainWeight"}, mlps
    chosen = read_hf(raw | {"quantization_config": raw["quantization_config"] | {"ignore": stacks[:1]}}).quantization
    moe = "model.layers.0.block_sparse_moe.experts.{expert}"
    assert [type(chosen(f"{moe}.{part}_proj")).__name__ for part in ("gate", "up", "down")] == [
        "Plain",
        "Plain",
        "Quantized",
    ]
    assert type(chosen(moe.replace("layers.0", "layers.1") + ".up_proj")).__name__ == "Quantized"


def test_inputs_that_cannot_be_split_over_devices():
    config = read_hf({**CONFIG, "quantization_config": FORMATS["fp8 block"][0]})
    with pytest.raises(ValueError, match="rounded 48 at a time, cannot be"):
        build_model(config, Build("float32", MeshLayout(model=2)))


def test_what_modelopt_writes_beside_the_configuration(tmp_path):
    """Its older file, which has other words, counts where config.json says nothing; each module has its own kind."""
    folder = write(tmp_path, "modelopt nvfp4")
    config = json.loads((folder / "config.json").read_text())
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.3.self*"]}
    older = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": inner}
    (folder / "hf_quant_config.json").write_text(json.dumps(older))
    assert stored_of(read_folder(folder).quantization, Q).format == "modelopt NVFP4"
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    chosen = read_folder(folder).quantization
    assert chosen.method == "modelopt" and chosen.kv_dtype == "float8_e4m3fn"
    assert kinds(chosen, "self_attn.q_proj", "mlp.up_proj") == ["Plain", "Quantized"]
    assert [type(chosen(name)).__name__ for name in ("lm_head", "vision_tower.layers.0.fc1")] == ["Plain", "Plain"]
    assert type(replace(chosen, listed=())("lm_head")).__name__ == "Quantized"
    layers = {"model.layers.3.mlp.experts": {"quant_algo": "NVFP4"}, "lm_head": {"quant_algo": "W4A16_NVFP4"}}
    layers["model.layers.3.mlp.shared_expert.up_proj"] = {"quant_algo": "UNQUANTIZED"}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    chosen = read_hf(settings(**mixed)).quantization
    assert kinds(chosen, "mlp.experts.{expert}.up_proj", "mlp.shared_expert.up_proj") == ["Quantized", "Plain"]
    assert kinds(chosen, "mlp.experts_up", "self_attn.q_proj") == ["Plain", "Plain"]
    assert stored_of(chosen, "lm_head").activation is None


def test_modules_that_auto_round_stores_otherwise():
    own = FORMATS["auto-round gptq"][0] | {
        "extra_config": {
            ".*shared_expert.*": {"bits": 16, "data_type": "float"},
            "model.layers.3.mlp.shared_expert.up_proj": {"bits": 8, "sym": True},
            "model.layers.3.mlp.down_proj": {"bits": 2, "group_size": 64},
        }
    }
    chosen = read_hf(settings(**own)).quantization
    names = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.down_proj", "self_attn.q_proj")
    assert kinds(chosen, *names) == ["Plain", "Quantized", "Quantized", "Quantized"]
    found = [stored_of(chosen, f"model.layers.3.{name}") for name in names[1:]]
    assert [(each.bits, each.group, each.has_zeros) for each in found] == [(8, 32, False), (2, 64, True), (4, 32, True)]
    # What lies outside of the blocks, and heads unless they are named.
    assert [type(chosen(name)).__name__ for name in ("vision_tower.layers.0.fc1", "lm_head")] == ["Plain", "Plain"]
    chosen = read_hf(
        settings(**own | {"extra_config": {"lm_head": {"bits": 8}}, "block_name_to_quantize": None})
    ).quantization
    assert [type(chosen(name)).__name__ for name in ("lm_head", "score")] == ["Quantized", "Plain"]


def test_all_tensors_of_a_quantised_module_are_renamed_as_its_weight():
    """Which families name otherwise than their checkpoints do, whatever a format calls what it stores of a module."""
    found = set()
    for path in FOLDER.glob("*/tensors.json"):
        architecture = json.loads((path.parent / "config.json").read_text())["architectures"][0]
        if architecture not in MODELS:  # another name of one that is recorded under its own
            continue
        names = MODELS[architecture].checkpoint_names
        for tensor, shape in json.loads(path.read_text())["shapes"].items():
            module = tensor.removesuffix(".weight")
            # Routers are plain.
            if len(shape) != 2 or module == tensor or module.endswith((".gate", ".router", ".router.layer")):
                continue
            wanted = names.renamed(tensor).removesuffix(".weight")
            if names.renamed(f"{module}.qweight") != f"{wanted}.qweight":
                found.add((architecture, module, wanted))
    assert not found
