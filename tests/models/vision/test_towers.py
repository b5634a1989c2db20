"""How towers are stored, split and read: what Build, quantisation and checkpoints of both transformers do to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine.models.build import Build
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.declare import Source, declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.quantization.base.plain import PlainWeight
from jaxengine.models.quantization.registry import read_quantization, rounded
from jaxengine.models.registry import build_model, read_folder, read_hf
from jaxengine.models.vision.base.layers import TowerAttention
from jaxengine.models.weights.compress import compress
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.sharding.layout import MeshLayout
from tests.fixtures.picture_cases import PROMPTS
from tests.fixtures.picture_checkpoints import whole_checkpoint

ROOT = Path(__file__).parents[3]
NAMES = sorted(PROMPTS)
PARTS = {("attention", "qkv"), ("attention", "out"), ("mlp", "up"), ("mlp", "down")}
# A ClipEncoder's names, and LFM3-VL's.
OTHERS = {"fc1": "up", "fc2": "down", "inputs": "qkv", "conv": "attention"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: whole_checkpoint(name, tmp_path_factory.mktemp(name)) for name in NAMES}


def split(model):
    """Paths of the tower's weights that devices have parts of."""
    axes = {param.path[1:]: param.decl.axes for param in declared_params(model) if param.path[0] == "tower"}
    return {path for path, names in axes.items() if any(name in ("heads", "ffn") for name in names)}


@pytest.mark.parametrize("name", NAMES)
def test_devices_share_a_tower_or_have_one_each(folders, name):
    config = read_folder(folders[name])
    shared = split(build_model(config, Build("float32")))
    # A ClipEncoder's and a multiplied tower's are within it. Of LFM3-VL's convolutions there are kernels, too.
    within = [path[path[0] in ("encoder", "inner") :] for path in shared]
    named = [tuple(OTHERS.get(part, part) for part in path[1:4]) for path in within if path[0] == "layers"]
    layers = {path for path in named if path[2] != "kernel"}
    tower: Any = config.tower
    of_all = tower.num_layers if hasattr(tower, "num_layers") else tower.vit.num_layers
    count = getattr(tower, "num_used", of_all)
    assert layers == {(layer, *part) for layer in range(count) for part in PARTS}
    behind = {part for path in within if path[0] in ("merger", "projector", "up", "down") for part in path}
    # Gemma 4's tower and those of Ovis are followed by one product, HunyuanOCR's by small convolutions, MiniCPM-V's by
    # a resampler.
    others = "gemma4", "ovis2_5", "ovis2_6", "hunyuan_vl", "hy_v4_vl", "minicpmv2_6", "minicpmv4_5"
    assert behind >= {"up", "down"} or behind >= {"fc1", "fc2"} or name.startswith(others)
    assert not split(build_model(config, Build("float32", whole_parts=("tower",))))


def test_heads_that_do_not_divide_are_refused(folders):
    config = read_folder(folders["qwen2_5_vl_vision"])  # three heads of its tower, four of its text
    with pytest.raises(ValueError, match=r"tower\.layers\.0\.attention\.qkv.* cannot be split evenly"):
        build_model(config, Build("float32", MeshLayout(model=2)))
    build_model(config, Build("float32", MeshLayout(model=2), whole_parts=("tower",)))


def kinds(model, name):
    """Whether the weights of a part of the model are plain."""
    graph = nnx.iter_graph(getattr(model, name))
    return {isinstance(node, PlainWeight) for _, node in graph if hasattr(node, "matmul")}


def test_rounding_at_load_leaves_a_tower_as_it_is(folders):
    config = replace(read_folder(folders["qwen2_vl_vision"]), quantization=rounded("int8"))
    model = build_model(config, Build("float32", lora=LoraSpec(max_loras=1, max_lora_rank=4)))
    assert kinds(model, "tower") == {True} and False in kinds(model, "layers")
    assert not [path for path, _ in nnx.to_flat_state(nnx.state(model.tower)) if "lora" in path]


def test_a_checkpoint_says_what_of_its_tower_is_quantised(folders):
    raw = read_config_json(folders["qwen2_vl_vision"])
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}
    whole = build_model(read_hf(raw | {"quantization_config": settings}), Build("float32"))
    # What makes rows of patches is a convolution, and stays.
    assert kinds(whole, "tower") == {True, False} and {True} == kinds(whole.tower, "patches")
    for without in (settings | {"modules_to_not_convert": ["visual"]}, gptq()):
        model = build_model(read_hf(raw | {"quantization_config": without}), Build("float32"))
        assert kinds(model, "tower") == {True} and False in kinds(model, "layers")


def gptq():
    assert read_quantization(settings := {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True}) is not None
    return settings


def loaded(folder, **changes):
    config = replace(read_folder(folder), **changes)
    model = build_model(config, Build("float32"))
    source = SafetensorsCheckpoint(folder)
    values = load_params(model, source)
    source.close()
    return dict(nnx.to_flat_state(values))


@pytest.mark.parametrize("name", ["qwen2_vl_vision", "mistral3_pictures_vision"])
def test_a_rounded_checkpoint_has_the_tower_as_it_was(folders, name, tmp_path):
    config = replace(read_folder(folders[name]), quantization=rounded("int8"))
    source = SafetensorsCheckpoint(folders[name])
    (tmp_path / "rounded").mkdir()
    settings, _ = compress(source, build_model(config, Build("float32")), tmp_path / "rounded")
    source.close()
    raw = read_config_json(folders[name]) | {"quantization_config": settings}
    (tmp_path / "rounded" / "config.json").write_text(json.dumps(raw))
    ours, theirs = loaded(folders[name]), loaded(tmp_path / "rounded")
    towers = [path for path in ours if path[0] == "tower"]
    assert towers == [path for path in theirs if path[0] == "tower"]
    assert all((ours[path].get_value() == theirs[path].get_value()).all() for path in towers)
    assert ours.keys() != theirs.keys()


@pytest.mark.parametrize("name", ["qwen2_vl_vision", "mistral3_pictures_vision"])
def test_names_of_both_transformers_are_read(folders, name, tmp_path):
    ours = loaded(folders[name])
    folder = whole_checkpoint(name, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    older = {"visual.": "model.visual.", "model.": "model.language_model."}
    if name.startswith("mistral3"):
        older = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
        older |= {f"{part}.": f"model.{part}." for part in ("vision_tower", "multi_modal_projector")}
    renamed = {}
    for tensor, values in tensors.items():
        old = next((old for old in older if tensor.startswith(old)), None)
        renamed[tensor if old is None else older[old] + tensor[len(old) :]] = values
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / "model.safetensors")
    theirs = loaded(folder)
    assert ours.keys() == theirs.keys()
    assert all((ours[path].get_value() == theirs[path].get_value()).all() for path in ours)


def test_a_model_that_is_not_to_see_reads_its_text(folders, tmp_path):
    ours, blind = loaded(folders["qwen3_vl_vision"]), loaded(folders["qwen3_vl_vision"], tower=None)
    assert blind.keys() == {path for path in ours if path[0] != "tower"}
    folder = whole_checkpoint("qwen3_vl_vision", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    gone = next(tensor for tensor in tensors if tensor.endswith("pos_embed.weight"))
    save_file({name: values for name, values in tensors.items() if name != gone}, folder / "model.safetensors")
    loaded(folder, tower=None)
    with pytest.raises(ModelFileError, match=r"missing.*visual\.pos_embed\.weight"):
        loaded(folder)


@pytest.mark.thorough("a process of its own with two devices")
@pytest.mark.parametrize("name", ["qwen3_vl_vision", "mistral3_pictures_vision"])
def test_devices_see_together_what_one_sees(folders, name):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.models.vision.split_tower", str(folders[name])]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert float(np.float64(done.stdout.split()[-1])) < 1e-5


def test_a_device_attends_with_its_part_of_the_heads():
    """Two devices' parts of 4 heads of queries, and of 4 or 2 of keys and values, add up to what one device finds."""
    size, rng = 32, np.random.RandomState(0)
    x = jnp.asarray(rng.standard_normal((5, size)), jnp.float32)

    def attend(q, k, v):
        assert q.shape == k.shape == v.shape
        return jnp.einsum("nqk,knh->qnh", jax.nn.softmax(jnp.einsum("qnh,knh->nqk", q, k)), v)

    for num_kv in (4, 2):
        rows = size, num_kv * 8, num_kv * 8
        sources = tuple(Source(name, count) for name, count in zip("qkv", rows, strict=True))
        options: dict[str, Any] = {"bias": False, "out_bias": False, "build": Build("float32")}
        attention: Any = TowerAttention(size, 4, qkv=sources, out="o", **options)
        qkv = np.asarray(rng.standard_normal((size, sum(rows))), np.float32)
        out = np.asarray(rng.standard_normal((size, size)), np.float32)

        def result(qkv, out, attention: Any = attention):
            attention.qkv.weight.values.set_value(jnp.asarray(qkv))
            attention.out.weight.values.set_value(jnp.asarray(out))
            return np.asarray(attention(x, None, attend))

        cut = np.split(qkv, np.cumsum(rows)[:2], axis=1)
        parts = [
            result(np.concatenate([np.split(each, 2, axis=1)[part] for each in cut], axis=1), np.split(out, 2)[part])
            for part in range(2)
        ]
        np.testing.assert_allclose(sum(parts), result(qkv, out), rtol=1e-4, atol=1e-4)
