"""Adapters of experts: one by one or all of a layer together, as PEFT writes both, and what is wrong with files."""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxengine.models.build import Build
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.families.axk2 import GatedNorm
from jaxengine.models.layers.base.lora import write_slot
from jaxengine.models.lora import PoolArray, declared_pools
from jaxengine.models.model_classes import MODELS
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights.adapters.folder import read_adapter
from jaxengine.models.weights.adapters.pools import AdapterTargets, slot_shape, slot_values, targets_of
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import check_source
from jaxengine.models.weights.views.merged import MergedSource
from tests.fixtures.adapters import damaged, joined_changes, merged, write_adapter
from tests.fixtures.drawn_weights import checkpoint
from tests.tables import each_row

SPEC = LoraSpec(2, 8)
LAYERS = ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]  # of qwen3_moe, whose layer 1 is dense
BOTH = {"gate_up_proj": (8, 64, 32), "down_proj": (8, 16, 64)}
NAMES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
PREFIX = f"base_model.model.{LAYERS[0]}"
A, BELOW_A = f"{PREFIX}.lora_A.weight", f"{PREFIX}.base_layer.lora_A.weight"
B, BELOW_B = f"{PREFIX}.lora_B.weight", f"{PREFIX}.base_layer.lora_B.weight"


@pytest.fixture(scope="module")
def model_of(checkpoints):
    def model_of(name):
        return build_model(read_hf(read_config_json(checkpoints / name)), Build(jnp.float32, lora=SPEC))

    return model_of


@pytest.fixture(scope="module")
def model(model_of):
    return model_of("qwen3_moe")


@pytest.fixture(scope="module")
def targets(model):
    return targets_of([model])


def single(targets, *ends):
    """Shapes of the modules of experts with these ends."""
    return {name: shape[::-1] for name, shape in targets.shapes.items() if ".experts." in name and name.endswith(ends)}


def together(folder, parts=None, layers=LAYERS, **changes):
    names = [f"experts.{part}" for part in parts or BOTH]
    options = {"target_modules": None, "target_parameters": names, "r": 4, "lora_alpha": 8, "seed": 1} | changes
    return write_adapter(folder, {}, joined=dict.fromkeys(layers, parts or BOTH), **options)


def test_what_takes_adapters(targets):
    assert set(targets.experts) == set(LAYERS)
    assert targets.shapes["model.layers.2.mlp.experts.7.down_proj"] == (16, 64)
    assert targets.shapes["model.layers.0.mlp.experts.0.up_proj"] == (64, 16)
    assert targets.shapes["model.layers.0.mlp.gate"] == (64, 8)
    assert not any("{expert}" in name for name in (*targets.shapes, *targets.others))
    assert {"model.embed_tokens", "model.norm"} <= targets.others


def test_the_mlp_that_experts_share_takes_them_too(model_of):
    shapes = targets_of([model_of("qwen2_moe")]).shapes
    assert shapes["model.layers.0.mlp.shared_expert.down_proj"] == (24, 64)
    assert shapes["model.layers.0.mlp.shared_expert_gate"] == (64, 1)
    assert targets_of([model_of("glm4_moe")]).shapes["model.layers.1.mlp.shared_experts.up_proj"] == (64, 32)


def test_layers_that_a_checkpoint_numbers_in_pairs(model_of, tmp_path):
    targets = targets_of([model_of("longcat_flash")])
    names = [f"model.layers.{pair}.self_attn.{half}.q_b_proj" for pair in range(2) for half in range(2)]
    shapes = {name: targets.shapes[name][::-1] for name in names}
    write_adapter(tmp_path, shapes, seed=1, r=4, target_modules=["q_b_proj"])
    assert set(read(tmp_path, targets).matrices) == set(names)
    assert set(targets.experts) == {f"model.layers.{pair}.mlp.experts" for pair in range(2)}
    # One of transformers' stacks has matrices of experts without weights, too, and nobody multiplies by them.
    experts = targets.experts[layer := "model.layers.0.mlp.experts"]
    size, width = targets.shapes[f"{layer}.0.gate_proj"]
    stacks = {"gate_up_proj": (experts.num_routed, size, 2 * width), "down_proj": (experts.num_experts, width, size)}
    together(tmp_path / "stacks", stacks, list(targets.experts))
    found = read(tmp_path / "stacks", targets).matrices
    assert experts.num_routed > experts.num_experts and len(found) == 6 * experts.num_experts
    change = joined_changes(tmp_path / "stacks", layer, stacks)["gate_up_proj"]
    a, b = found[f"{layer}.{experts.num_experts - 1}.up_proj"]
    np.testing.assert_allclose(b @ a, change[experts.num_experts - 1, width:], rtol=1e-5, atol=1e-6)


@each_row(
    ("architecture", "name", "own"),
    [
        ("AXK2ForCausalLM", "self_attn.q_gate_proj", "self_attn.q_b_proj"),
        ("AXK2ForCausalLM", "input_layernorm.mlp.fc1", "input_layernorm.W_down"),
        ("AXK2ForCausalLM", "post_attention_layernorm.mlp.fc2", "post_attention_layernorm.W_up"),
        ("BailingHybridForCausalLM", "self_attn.q_proj", "attention.q_proj"),
        ("BailingHybridForCausalLM", "self_attn.forget_gate.f_proj", "attention.f_proj"),
        ("DeepseekV4ForCausalLM", "self_attn.q_b_proj", "attn.wq_b"),
        ("DeepseekV4ForCausalLM", "self_attn.compressor.indexer.kv_proj", "attn.indexer.compressor.wkv"),
        ("DeepseekV4ForCausalLM", "mlp.shared_experts.down_proj", "ffn.shared_experts.w2"),
        ("DeepseekV4ForCausalLM", "mlp.experts", "ffn.experts"),
        ("Ernie4_5_VLMoeForConditionalGeneration", "model.language_model.layers.1.mlp.up_proj", "mlp.up_proj"),
        ("HunYuanVLForConditionalGeneration", "model.language_model.layers.1.mlp.up_proj", "mlp.up_proj"),
        ("HYV3ForCausalLM", "mlp.shared_experts.up_proj", "mlp.shared_mlp.up_proj"),
        ("Glm5NextForConditionalGeneration", "model.language_model.layers.1.self_attn.q_b_proj", "self_attn.q_b_proj"),
        ("Glm5NextForConditionalGeneration", "self_attn.forget_gate.f_b_proj", "self_attn.f_b_proj"),
        ("Dots3NoteForCausalLM", "model.language_model.layers.1.self_attn.g_proj", "self_attn.g_proj"),
        ("MuseSparkForConditionalGeneration", "model.language_model.layers.1.mlp.experts", "mlp.experts"),
        ("MuseSparkForConditionalGeneration", "mlp.pre_expert_proj", "mlp.pre_expert_proj"),
        ("MistralLarge4ForConditionalGeneration", "model.language_model.layers.1.mlp.experts", "mlp.experts"),
        ("MiniMaxM3VLForCausalLM", "self_attn.indexer.k_proj", "self_attn.index_k_proj"),
        ("MiniMaxM3VLForCausalLM", "model.language_model.layers.1.mlp.experts", "block_sparse_moe.experts"),
        ("HYV4ForCausalLM", "mlp.shared_experts.linear_gate", "mlp.shared_experts.gate_proj"),
        ("HYV4ForCausalLM", "hc_attn_layer.hc_pre.hc_fn", "attn_hc.fn"),
        ("HYV4ForCausalLM", "hc_pre.hc_mlp_layer.hc_fn", "ffn_hc.fn"),
        ("HYV4ForCausalLM", "model.hc_head.hc_pre.hc_head_fn", "model.hc_head.hc_fn"),
        ("KimiLinearForCausalLM", "self_attn.forget_gate.f_a_proj", "self_attn.f_a_proj"),
        ("KimiLinearForCausalLM", "mlp.shared_experts.up_proj", "block_sparse_moe.shared_experts.up_proj"),
        ("LagunaForCausalLM", "mlp.shared_experts.up_proj", "mlp.shared_expert.up_proj"),
        ("Lfm3ForCausalLM", "self_attn.g_proj", "self_attn.gate_proj"),
        ("Qwen4ExpForConditionalGeneration", "model.language_model.layers.1.mlp.experts", "mlp.experts"),
        ("PhiMoEForCausalLM", "mlp.router", "block_sparse_moe.gate"),
        ("SarvamMoEForCausalLM", "self_attn.o_proj", "attention.dense"),
        ("ExaoneForCausalLM", "self_attn.q_proj", "attn.attention.q_proj"),
        ("ExaoneForCausalLM", "self_attn.o_proj", "attn.attention.out_proj"),
        ("ExaoneForCausalLM", "mlp.gate_proj", "mlp.c_fc_0"),
        ("ExaoneForCausalLM", "mlp.down_proj", "mlp.c_proj"),
        ("Ernie4_5_VLMoeForConditionalGeneration", "mlp.text_moe.experts.3.up_proj", "mlp.experts.3.up_proj"),
        ("Ernie4_5_VLMoeForConditionalGeneration", "mlp.vision_moe.experts", "mlp.image.experts"),
        ("Ernie4_5_VLMoeForConditionalGeneration", "mlp.vision_moe.gate", "mlp.image.gate"),
    ],
)
def test_modules_as_transformers_names_them(architecture, name, own):
    """PEFT's adapters have the names of transformers' modules, which differ from those of published checkpoints."""
    name, own = (each if each.startswith("model.") else f"model.layers.1.{each}" for each in (name, own))
    names = MODELS[architecture].checkpoint_names
    for place in ("shapes", "others"):
        found = {"shapes": {}, "experts": {}, "others": frozenset(), place: {own: (8, 8)}}
        targets = AdapterTargets(**found, names=names)
        assert targets.module(name) == targets.module(own) == own and name in targets.stored_names(own)


def test_a_matrix_that_transformers_joins(model_of, tmp_path):
    """MiniMax M3's gate and up are one module in transformers: each has its A, and its own rows of B."""
    targets, mlp = targets_of([model_of("minimax_m3")]), "model.layers.0.mlp"
    gate, up, whole = (f"{mlp}.{name}_proj" for name in ("gate", "up", "gate_up"))
    assert targets.wholes[whole] == (gate, up) and targets.sides(whole) == (64, 144)
    write_adapter(tmp_path, {whole: (144, 64)}, seed=1, r=2, target_modules=r".*\.0\.mlp\.gate.*_proj")
    found, file = read_adapter(tmp_path, targets, 4, "float32"), load_file(tmp_path / "adapter_model.safetensors")
    found = found.matrices
    a, b = (file[f"base_model.model.{whole}.lora_{side}.weight"] for side in "AB")
    assert found.keys() == {gate, up}
    for part, rows in ((gate, b[:72]), (up, b[72:])):
        np.testing.assert_array_equal(found[part][0], a)
        np.testing.assert_array_equal(found[part][1] / rows, found[gate][1][0, 0] / b[0, 0])
    write_adapter(tmp_path, {whole: (144, 64), up: (72, 64)}, seed=1, r=2, target_modules=r".*\.0\.mlp.*up_proj")
    with pytest.raises(ModelFileError, match="stands for rows of model.layers.0.mlp.gate_up_proj, as does another"):
        read_adapter(tmp_path, targets, 4, "float32")
    write_adapter(
        tmp_path, {gate: (72, 64), up: (72, 64)}, seed=1, r=2, target_modules=r".*\.0\.mlp\.(gate|up|gate_up)_proj"
    )
    assert read_adapter(tmp_path, targets, 4, "float32").matrices.keys() == {gate, up}
    write_adapter(tmp_path, {whole: (144, 64)}, seed=1, r=2, target_modules=["gate_up_proj"])
    with pytest.raises(ModelFileError, match="names it, but the file has no matrices of it .at .*gate_up_proj., and 2"):
        read_adapter(tmp_path, targets, 4, "float32")


def test_parts_of_a_matrix_that_the_checkpoint_joins(model_of, tmp_path):
    """Sarvam's queries, keys and values are three modules in transformers, and one here with the sum of their ranks."""
    targets, layer = targets_of([model_of("sarvam_moe")]), "model.layers.1"
    joined = f"{layer}.attention.query_key_value"
    size, out = targets.shapes[joined]
    parts = {f"{layer}.self_attn.{part}_proj": targets.sides(f"{layer}.self_attn.{part}_proj")[::-1] for part in "qkv"}
    assert sum(rows for rows, _ in parts.values()) == out
    options = {"r": 2, "rank_pattern": {"k_proj": 3}, "lora_alpha": 6, "target_modules": "all-linear"}
    write_adapter(tmp_path, parts, seed=1, **options)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    pairs = [[tensors[f"base_model.model.{part}.lora_{side}.weight"] for side in "AB"] for part in parts]
    change = np.concatenate([6 / len(a) * (b @ a) for a, b in pairs])
    found = read_adapter(tmp_path, targets, 8, "float32")
    (a, b) = found.matrices[joined]
    assert found.matrices.keys() == {joined} and found.rank == len(a) == 7
    np.testing.assert_allclose(b @ a, change, rtol=1e-5, atol=1e-6)
    with pytest.raises(ModelFileError, match="their ranks add up to 7; allowed: at most 4 .max_lora_rank. .at .*value"):
        read_adapter(tmp_path, targets, 4, "float32")
    write_adapter(
        tmp_path, {joined: (out, size)} | dict([*parts.items()][:1]), seed=1, r=2, target_modules="all-linear"
    )
    with pytest.raises(ModelFileError, match="stands for rows of .*query_key_value, as does another matrix"):
        read_adapter(tmp_path, targets, 8, "float32")
    names = [f"layers.1.self_attn.{part}_proj" for part in "qk"]
    write_adapter(tmp_path, dict([*parts.items()][:1]), seed=1, r=2, target_modules=names)
    with pytest.raises(ModelFileError, match="names it, but the file has no matrices of it .at .*k_proj"):
        read_adapter(tmp_path, targets, 8, "float32")


def test_parts_have_the_rows_that_transformers_takes_for_them(model_of):
    """The second half of what Molmo 2's files join is the gate, which comes first in the product."""
    parts, joined = targets_of([model_of("molmo2_vision")]).parts, "model.layers.0.mlp.ff_proj"
    assert parts["model.layers.0.mlp.up_proj"] == (joined, slice(0, 80))
    assert parts["model.layers.0.mlp.gate_proj"] == (joined, slice(80, 160))


def test_experts_without_a_gate(model_of, tmp_path):
    """Both of Nemotron-H's stacks have one matrix of an expert, and an adapter of one is none of the other."""
    targets = targets_of([model_of("nemotron_h")])
    layers = list(targets.experts)
    for layer, experts in targets.experts.items():
        assert experts.joined == {part: (f"{layer}.{{expert}}.{part}",) for part in ("up_proj", "down_proj")}
    count, sides = targets.experts[layers[0]].num_experts, targets.shapes[f"{layers[0]}.0.down_proj"]
    joined = {layer: {"down_proj": (count, *sides)} for layer in layers}
    options = {"target_modules": [], "target_parameters": ["mixer.experts.down_proj"], "r": 3, "lora_alpha": 3}
    write_adapter(tmp_path, {}, seed=1, joined=joined, **options)
    found = read_adapter(tmp_path, targets, 4, "float32").matrices
    assert found.keys() == {f"{layer}.{expert}.down_proj" for layer in layers for expert in range(count)}
    for expert, change in enumerate(joined_changes(tmp_path, layers[0], joined[layers[0]])["down_proj"]):
        a, b = found[f"{layers[0]}.{expert}.down_proj"]
        np.testing.assert_allclose(b @ a, change, rtol=1e-4, atol=1e-5)
    write_adapter(tmp_path, {f"{layers[0]}.0.gate_proj": (8, 8)}, seed=1, target_modules="all-linear")
    with pytest.raises(ModelFileError, match="and their matrices up_proj, down_proj: is it for another model"):
        read_adapter(tmp_path, targets, 4, "float32")


def test_gated_norms_have_no_adapters(model_of):
    """A layer does not tell its norms what their rows are, which a product that takes adapters must know."""
    config = model_of("axk2").config
    norm = GatedNorm(config, source="model.layers.0.input_layernorm", build=Build("float32", lora=SPEC, layer=0))
    assert norm(jnp.ones((3, config.hidden_size))).shape == (3, config.hidden_size)
    assert not any(isinstance(leaf, PoolArray) for _, leaf in nnx.to_flat_state(nnx.state(norm)))


def test_experts_one_by_one_and_those_that_are_not_there(model, targets, tmp_path):
    shapes = single(targets, "up_proj", "down_proj")
    missing = "model.layers.0.mlp.experts.3.up_proj"
    del shapes[missing]
    options = {"target_modules": ["up_proj", "down_proj"], "exclude_modules": r"model\.layers\.1\..*"}
    write_adapter(tmp_path, shapes, seed=1, r=4, **options)
    tensors, matrices = load_file(tmp_path / "adapter_model.safetensors"), read(tmp_path, targets).matrices
    assert set(matrices) == set(shapes)
    pools = [pool for pool in declared_pools(model) if pool.decl.modules[-1] == f"{LAYERS[0]}.{{expert}}.up_proj"]
    values = [slot_values(pool, SPEC, matrices)[:, 0] for pool in pools]
    # Rows of gate, then of up, each filled up to the rank of the pool.
    assert values[0].shape == (8, 16, 64) and values[1].shape == values[2].shape == (8, 8, 16)
    assert not values[0][:, :8].any() and not values[1].any()
    assert not values[0][3].any() and not values[2][3].any()
    name = "base_model.model.model.layers.0.mlp.experts.5.up_proj"
    np.testing.assert_array_equal(values[0][5, 8:12], tensors[f"{name}.lora_A.weight"])
    np.testing.assert_array_equal(values[2][5, :4], tensors[f"{name}.lora_B.weight"].T * np.float32(4))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("parts", [BOTH, {"gate_up_proj": BOTH["gate_up_proj"]}, {"down_proj": BOTH["down_proj"]}])
def test_experts_together(targets, tmp_path, parts, turned):
    together(tmp_path, parts, turned=turned, rank_pattern={r".*\.gate_up_proj": 6}, alpha_pattern={"down_proj": 3})
    found = read(tmp_path, targets)
    assert found.rank == (6 if "gate_up_proj" in parts else 4)
    assert len(found.matrices) == 16 * sum(len(NAMES[part]) for part in parts)
    for layer in LAYERS:
        for part, change in joined_changes(tmp_path, layer, parts, turned=turned).items():
            pairs = [[found.matrices[f"{layer}.{expert}.{name}"] for name in NAMES[part]] for expert in range(8)]
            ours = [np.concatenate([b @ a for a, b in each]) for each in pairs]
            np.testing.assert_allclose(ours, change, rtol=1e-4, atol=1e-6)


def test_gate_and_up_that_take_turns(model_of, tmp_path):
    """gpt-oss, of which gate_up_proj is square here: down_proj tells which sides are inputs."""
    layers, parts = [f"model.layers.{layer}.mlp.experts" for layer in range(3)], {"gate_up_proj": (6, 64, 64)}
    targets, both = targets_of([model_of("gpt_oss")]), parts | {"down_proj": (6, 32, 64)}
    for turned in (False, True):
        together(tmp_path, both, layers, turned=turned)
        matrices = read(tmp_path, targets).matrices
        change = joined_changes(tmp_path, layers[2], both, turned=turned)["gate_up_proj"]
        for first, name in enumerate(NAMES["gate_up_proj"]):
            a, b = matrices[f"{layers[2]}.4.{name}"]
            np.testing.assert_allclose(b @ a, change[4, first::2], rtol=1e-4, atol=1e-6)
    together(tmp_path, parts, layers)
    with pytest.raises(ModelFileError, match="gate_up_proj are square, and no others tell which of their sides"):
        read(tmp_path, targets)


def test_names_of_other_releases_of_transformers(model_of, tmp_path):
    targets = targets_of([model_of("mixtral")])
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    write_adapter(
        tmp_path,
        {f"model.layers.{layer}.mlp.gate": (8, 64) for layer in range(2)},
        joined={layer: {"down_proj": (8, 16, 64)} for layer in layers},
        target_modules=[],
        target_parameters=["gate.weight", "down_proj"],
        seed=1,
    )
    matrices = read(tmp_path, targets).matrices
    assert "model.layers.1.block_sparse_moe.gate" in matrices and len(matrices) == 2 + 16


def read(folder, targets):
    return read_adapter(folder, targets, 8, jnp.float32)


def configured(**changes):
    def damage(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


@pytest.mark.parametrize(
    "damage, says",
    [
        (damaged(lambda tensors: tensors.pop(B)), "has lora_A.weight of it and not the other matrix .at .*experts."),
        (damaged(lambda tensors: (tensors.pop(BELOW_A), tensors.pop(BELOW_B))), "file has no matrices.*gate_up_proj"),
        (damaged(lambda tensors: (tensors.pop(A), tensors.pop(B))), "file has no matrices of it .*experts.down_proj"),
        (
            damaged(lambda tensors: [tensors.pop(name) for name in (A, B, BELOW_A, BELOW_B)]),
            "file has no matrices of it .at model.layers.0.mlp.experts.gate_up_proj",
        ),
        (
            damaged(lambda tensors: tensors.update({A: tensors[A][:28].copy()})),
            r"shape must be \(32, 16\) or \(32, 64\), got \(28, 16\) .at .*experts.lora_A.weight",
        ),
        (
            damaged(lambda tensors: tensors.update({B: tensors[B][:, :28].copy()})),
            r"shape must be \(64, 32\), got \(64, 28\) .at .*experts.lora_B.weight",
        ),
        (damaged(lambda tensors: tensors[A].fill(np.nan)), "must be finite in float32, multiplied by .* .at .*lora_"),
        (damaged(lambda tensors: tensors.update({A: tensors[A].astype(np.int32)})), "must hold floating-point"),
        (
            damaged(lambda tensors: tensors.update({f"{PREFIX}.base_layer.base_layer.lora_A.weight": tensors[A]})),
            "experts must be 0 to 7 .* .at .*experts.base_layer.base_layer",
        ),
        (configured(target_parameters=["experts.down_proj"]), "does not name as many .* .at .*base_layer"),
        (configured(target_parameters=[]), "target_modules must name what is changed"),
        (configured(target_parameters="down_proj"), "target_parameters must be a list of names"),
        (configured(r=9), "rank is 9; allowed: at most 8"),
        (configured(rank_pattern={"gate_up_proj": 3}), r"shape must be \(24, 64\) or \(24, 32\), got \(32, 64\)"),
        (
            damaged(lambda tensors: tensors.update(of_module("model.layers.0.mlp.experts.2.up_proj", 64, 16))),
            "target_modules does not name it",
        ),
        (
            lambda folder: (
                damaged(lambda tensors: tensors.update(of_module("model.layers.0.mlp.experts.2.up_proj", 64, 16)))(
                    folder
                ),
                configured(target_modules=["up_proj"], exclude_modules=r"model\.layers\.1\..*")(folder),
            ),
            "stands for model.layers.0.mlp.experts.2.up_proj, as does another",
        ),
        (
            damaged(lambda tensors: tensors.update(of_module("model.layers.0.mlp.experts.8.up_proj", 64, 16))),
            "experts must be 0 to 7 and their matrices gate_proj, up_proj, down_proj",
        ),
        (
            damaged(lambda tensors: tensors.update(of_module("model.layers.0.mlp.experts.2.w1", 64, 16))),
            "experts must be 0 to 7",
        ),
        (
            damaged(lambda tensors: tensors.update(of_module("model.layers.1.mlp.experts", 64, 16))),
            "for another base model",
        ),
    ],
)
def test_a_file_that_is_wrong_is_named(targets, tmp_path, damage, says):
    together(tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelFileError, match=says):
        read(tmp_path, targets)


def of_module(name, size, out):
    prefix = f"base_model.model.{name}"
    a, b = np.ones((4, size), np.float32), np.ones((out, 4), np.float32)
    return {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}


def test_layers_of_experts_are_those_of_the_model(targets, tmp_path):
    """Not the number of an expert, which is a number in a name too."""
    shapes = {name: shape for name, shape in single(targets, "up_proj").items() if ".layers.2." in name}
    write_adapter(tmp_path, shapes, seed=1, r=4, target_modules=["up_proj"], layers_to_transform=[2])
    assert len(read(tmp_path, targets).matrices) == 8


def test_a_slot_is_written_whole(model):
    """What one adapter has of a pool is split over devices as the pool is, and fits into it."""
    pools = list(declared_pools(model))
    assert any(pool.decl.num_experts for pool in pools)
    arrays, new = (
        [jax.ShapeDtypeStruct(shape, pool.dtype) for pool, shape in zip(pools, shapes, strict=True)]
        for shapes in ([pool.shape for pool in pools], [slot_shape(pool, SPEC) for pool in pools])
    )
    assert all(len(each.shape) == len(pool.decl.axes) for each, pool in zip(new, pools, strict=True))
    slot = jax.ShapeDtypeStruct((), jnp.int32)
    written = jax.eval_shape(partial(write_slot, pools, SPEC), arrays, slot, new)
    assert [each.shape for each in written] == [each.shape for each in arrays]


# Experts in stacks, in the rows of a matrix, and numbered with those of images; a joined projection; transposed ones.
@pytest.mark.parametrize("name", ["gpt_oss", "granite_hybrid", "dbrx", "ernie4_5_vl_vision", "lara_mini", "gpt2"])
def test_an_adapter_of_every_module_is_merged_however_it_is_stored(model_of, name):
    """In parts too, as devices read them."""
    model, source, rng = model_of(name), SafetensorsCheckpoint(checkpoint(name)), np.random.default_rng(1)
    shapes = targets_of([model]).shapes
    matrices = {
        module: (rng.standard_normal((2, size), np.float32), rng.standard_normal((out, 2), np.float32))
        for module, (size, out) in shapes.items()
    }
    try:
        before = check_source(model, source)[0]
        found = check_source(model, MergedSource(source, matrices))[0]
        assert {*found.names()} == {*before.names()} > {f"{module}.weight" for module in matrices}
        for tensor in found.names():
            wanted = before.read(tensor)
            if (pair := matrices.get(tensor.removesuffix(".weight"))) is not None:
                wanted = wanted + pair[1] @ pair[0]
                part = found.read(tensor, slice(2, 5), slice(7, 20))
                np.testing.assert_allclose(part, wanted[2:5, 7:20], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(found.read(tensor), wanted, rtol=1e-5, atol=1e-5)
        with pytest.raises(ModelFileError, match="the checkpoint has no such matrix .at model.layers.9.x.weight"):
            check_source(model, MergedSource(source, matrices | {"model.layers.9.x": matrices[next(iter(matrices))]}))
    finally:
        source.close()


def test_experts_of_a_checkpoint_with_an_adapter_in_them(model_of, tmp_path):
    source, names = SafetensorsCheckpoint(checkpoint("qwen2_moe")), ["gate_proj", "down_proj", "gate"]
    write_adapter(tmp_path, checkpoint("qwen2_moe"), seed=1, r=4, target_modules=names)
    model = model_of("qwen2_moe")
    targets = targets_of([model])
    try:
        found = check_source(model, MergedSource(source, read(tmp_path, targets).matrices))[0]
        wanted = load_file(merged(tmp_path / "merged", checkpoint("qwen2_moe"), tmp_path) / "model.safetensors")
        for name in found.names():
            np.testing.assert_allclose(found.read(name), wanted[name], rtol=1e-5, atol=1e-6)
        changed = [name for name in wanted if not np.array_equal(wanted[name], source.read(name))]
        assert "model.layers.2.mlp.experts.5.gate_proj.weight" in changed and len(changed) == 2 * 15 + 2
    finally:
        source.close()
