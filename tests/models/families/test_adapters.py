"""Adapters in every family: rows with one give the logits of merged weights, and rows without those of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine.models.build import Build
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.layers.base.lora import write_slot
from jaxengine.models.lora import declared_pools
from jaxengine.models.registry import build_model
from jaxengine.models.weights.adapters.folder import read_adapter
from jaxengine.models.weights.adapters.pools import slot_values, targets_of, with_pools
from jaxengine.models.weights.formats.arrays import ArraySource
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.views.renamed import RenamedSource, SharedBlocksSource
from tests.fixtures.adapters import JOINED, joined_changes, write_adapter
from tests.fixtures.drawn_weights import checkpoint
from tests.models.conftest import PagedRun, forward
from tests.models.families.test_golden import ALWAYS, WITHOUT_ONE_FILE, assert_close, padded

SPEC = LoraSpec(3, 4)
# Joined projections, of which adapters have one matrix. The others in a thorough run, and experts below.
FEW = ("phi3",)
SHARED = {"zamba2_shared"}  # two layers of it have the same block
PEFT = Path(__file__).parents[2] / "fixtures" / "peft_adapters"

# Adapters have transformers' names, which files with Mistral AI's lack.
MISTRAL = frozenset(("mistral_large4_vision",))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FEW else pytest.mark.thorough("a further family"))
        for name in sorted((ALWAYS | SHARED) - WITHOUT_ONE_FILE - MISTRAL)
    ],
)
def test_rows_with_and_without_an_adapter(name, recorded, tmp_path):
    try:
        case, folder = recorded(name), checkpoint(name)
        model = build_model(case.config, Build("float32", lora=SPEC))
        targets = targets_of([model])
        assert targets.shapes
        weights, names = parts_apart(load_file(folder / "model.safetensors"), model), model.checkpoint_names
        stacks = stacked_experts(weights, model)
        stored = {
            module: next(
                key for key in weights if names.renamed(key).endswith(module.removeprefix("model.") + ".weight")
            )
            for module in targets.shapes
            if not (stacks and targets.is_expert(module))
        }
        shapes = {key.removesuffix(".weight"): targets.shapes[module][::-1] for module, key in stored.items()}
        layers = {
            layer: {part: (len(weights[key]), *size) for part, (key, size) in parts.items()}
            for layer, parts in stacks.items()
        }
        joined = sorted({part for parts in stacks.values() for part in parts})
        options = {"target_modules": "all-linear", "target_parameters": joined or None}
        write_adapter(tmp_path, shapes, seed=5, r=3, lora_alpha=3, std=0.3, joined=layers, **options)
        matrices = load_file(tmp_path / "adapter_model.safetensors")
        for key in stored.values():
            prefix = f"base_model.model.{key.removesuffix('.weight')}"
            change = matrices[f"{prefix}.lora_B.weight"] @ matrices[f"{prefix}.lora_A.weight"]
            change = change.T if key.endswith(names.transposed) else change
            weights[key] = weights[key].astype(np.float32) + change.reshape(weights[key].shape)
        for layer, parts in stacks.items():
            for part, change in joined_changes(tmp_path, layer, layers[layer]).items():
                key, (size, _) = parts[part]
                is_out_first = model.checkpoint_names.stacked_experts.out_first
                weights[key] = (weights[key] + (change if is_out_first else change.swapaxes(1, 2))).astype(np.float32)
        save_file(weights, tmp_path / "model.safetensors")
        merged = PagedRun(loaded(build_model(apart(case.config), Build("float32")), tmp_path / "model.safetensors"))
        with_adapter = PagedRun(with_slot(loaded(model, folder), read_adapter(tmp_path, targets, 4, "float32"), 1))
        prompts = {str(index): prompt for index, prompt in enumerate(case.prompts)}
        sizes = {"num_tokens": padded(sum(map(len, prompts.values())))}
        wanted = merged.step(prompts, **sizes)
        found = with_adapter.step(prompts, **sizes, adapters={"0": 1})
        assert_close(found["0"], wanted["0"])
        assert_close(found["1"], case.logits[1])
        assert np.abs(wanted["0"] - case.logits[0]).max() > 1e-2 * np.abs(case.logits[0]).max()
    finally:
        forward.clear_cache()


@pytest.mark.parametrize("name", ["qwen2_moe", pytest.param("gpt_oss", marks=pytest.mark.thorough("a further family"))])
def test_adapters_of_experts_that_peft_has_made(name, recorded):
    """The logits that PEFT gives with them: experts together, a router, a part of what experts share. Of gpt-oss gate
    and up take turns, and its stacks are as `is_transposed` says."""
    try:
        case, folder = recorded(name), checkpoint(name)
        model = build_model(case.config, Build("float32", lora=SPEC))
        adapter = read_adapter(PEFT / name, targets_of([model]), 4, "float32")
        assert adapter.rank == (3 if name == "qwen2_moe" else 2)
        run = PagedRun(with_slot(loaded(model, folder), adapter, 2))
        prompts = {str(index): prompt for index, prompt in enumerate(case.prompts)}
        found = run.step(prompts, num_tokens=padded(sum(map(len, prompts.values()))), adapters={"0": 2})
        with np.load(PEFT / name / "golden.npz", allow_pickle=False) as golden:
            wanted = golden["logits"]
        assert_close(found["0"], wanted)
        assert_close(found["1"], case.logits[1])
        assert np.abs(wanted - case.logits[0]).max() > 1e-2 * np.abs(wanted).max()
    finally:
        forward.clear_cache()


def test_layers_that_share_a_block_have_adapters_of_their_own(recorded, tmp_path):
    """As PEFT makes them: transformers ties the weights, not the modules. In each layer it also changes the low-rank
    products that other layers multiply by.
    """
    targets = targets_of([build_model(recorded("zamba2_shared").config, Build("float32", lora=SPEC))])
    stem, shapes = "model.layers.{}.shared_transformer.{}".format, {}
    for layer, number in ((0, 0), (0, 2), (1, 1), (3, 0), (3, 2)):
        shapes[stem(layer, "self_attn.o_proj")] = (32, 64)
        shapes[stem(layer, f"feed_forward.gate_up_proj_adapter_list.{number}.1")] = (80, 3)
    write_adapter(tmp_path, shapes, seed=1, r=2, target_modules=r".*(o_proj|gate_up_proj_adapter_list\.\d\.1)")
    found = read_adapter(tmp_path, targets, 4, "float32").matrices
    names = ("self_attn.o_proj", "feed_forward.gate_up_proj_adapter.1")
    assert found.keys() == {stem(layer, name) for layer in (0, 1, 3) for name in names}
    wanted = load_file(tmp_path / "adapter_model.safetensors")
    for layer, number in ((0, 0), (1, 1), (3, 2)):
        stored = stem(layer, f"feed_forward.gate_up_proj_adapter_list.{number}.1")
        a = wanted[f"base_model.model.{stored}.lora_A.weight"]
        np.testing.assert_array_equal(found[stem(layer, names[1])][0], a)


def stacked_experts(weights, model):
    """Of each layer whose experts are in one tensor and take adapters: by JOINED, the tensor's name, and (inputs,
    outputs)."""
    takes = targets_of([model]).experts if model.config.experts else {}
    found: dict[str, dict[str, tuple[str, tuple[int, int]]]] = {}
    experts = model.config.experts
    size = (experts and experts.latent_size) or model.config.hidden_size
    for key in weights:
        layer, _, part = model.checkpoint_names.renamed(key).rpartition(".")
        if layer in takes and part in JOINED:
            sides = (size, 2 * experts.intermediate_size) if part == JOINED[0] else (experts.intermediate_size, size)
            found.setdefault(layer, {})[part] = key, sides
    return {layer: {part: parts[part] for part in JOINED if part in parts} for layer, parts in found.items()}


def parts_apart(weights, model):
    """The tensors of a checkpoint with the parts of joined ones that take adapters, under transformers' names. Blocks
    that layers share are there for each layer."""
    if (blocks := apart(model.config).shared_blocks) is not None:
        source = SharedBlocksSource(RenamedSource(ArraySource(weights), model.checkpoint_names), blocks)
        weights = {name: source.read(name) for name in source.names()}
    for end, both in model.checkpoint_names.alternating.items():
        for key in [key for key in weights if key.endswith(end)]:
            rows = weights.pop(key)
            weights |= {key.removesuffix(end) + part: rows[index::2] for index, part in enumerate(both)}
    shapes = targets_of([model]).shapes
    for key, parts in {key: model.checkpoint_names.parts_of_rows(key) for key in weights}.items():
        if parts and all(part.removesuffix(".weight") in shapes for part in parts):
            sizes = [shapes[part.removesuffix(".weight")][1] for part in parts]
            weights |= zip(parts, np.split(weights.pop(key), np.cumsum(sizes)[:-1]), strict=True)
    return weights


def apart(config):
    """The configuration with weights of its own for each layer, which tied blocks share."""
    blocks = config.shared_blocks
    return config if blocks is None else replace(config, shared_blocks=replace(blocks, tied=False))


def loaded(model, path):
    source = SafetensorsCheckpoint(path)
    nnx.update(model, with_pools(model, load_params(model, source), None))
    source.close()
    return model


def with_slot(model, adapter, slot):
    pools = list(declared_pools(model))
    leaves, tree = jax.tree.flatten(nnx.state(model))
    arrays, new = [leaves[pool.index] for pool in pools], [slot_values(pool, SPEC, adapter.matrices) for pool in pools]
    written = write_slot(pools, SPEC, arrays, jnp.int32(slot), [jnp.asarray(values) for values in new])
    for pool, array in zip(pools, written, strict=True):
        leaves[pool.index] = array
    nnx.update(model, jax.tree.unflatten(tree, leaves))
    return model
