"""Adapters of experts: one by one or all of a layer together, as PEFT writes both, and what is wrong with files."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.build import Build
from models.config.hf import read_config_json
from models.config.lora import LoraSpec
from models.lora import declared_pools
from models.registry import build_model, read_hf
from models.weights.errors import ModelFileError
from models.weights.lora_pools import slot_values, targets_of
from models.weights.peft import read_adapter
from tests.fixtures.adapters import joined_changes, write_adapter

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


def test_experts_one_by_one_and_those_that_are_not_there(model, targets, tmp_path):
    shapes = single(targets, "up_proj", "down_proj")
    missing = "model.layers.0.mlp.experts.3.up_proj"
    del shapes[missing]
    options = {"target_modules": ["up_proj", "down_proj"], "exclude_modules": r"model\.layers\.1\..*"}
    write_adapter(tmp_path, shapes, seed=1, r=4, **options)
    tensors, matrices = load_file(tmp_path / "adapter_model.safetensors"), read(tmp_path, targets).matrices
    assert set(matrices) == set(shapes)
    pools = [pool for pool in declared_pools(model) if pool.decl.modules[-1] == f"{LAYERS[0]}.{{expert}}.up_proj"]
    values = [slot_values(pool, SPEC, matrices) for pool in pools]
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


def damaged(change):
    def damage(folder):
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


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
        (damaged(lambda tensors: tensors[A].fill(np.nan)), "its matrices must be finite"),
        (damaged(lambda tensors: tensors.update({A: tensors[A].astype(np.int32)})), "must hold floating-point"),
        (
            damaged(lambda tensors: tensors.update({f"{PREFIX}.base_layer.base_layer.lora_A.weight": tensors[A]})),
            "target_parameters does not name as many",
        ),
        (configured(target_parameters=["experts.down_proj"]), "does not name as many .* .at .*base_layer"),
        (configured(target_parameters=[]), "target_modules must name what is changed"),
        (configured(target_parameters="down_proj"), "target_parameters must be a list of names"),
        (configured(target_parameters=["gate_up_proj", "down_proj", "down_proj_bias"]), ".at down_proj_bias"),
        (configured(r=9), "rank is 9; allowed is at most 8"),
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
