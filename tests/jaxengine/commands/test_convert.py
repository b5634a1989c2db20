"""`jaxengine convert`: the converted folder is the same model, for the sizes it was made for."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine import LLM, SamplingParams
from jaxengine.checkpoint.model_source import open_model
from jaxengine.commands.cli import main
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.formats.orbax import SCALES_FILE, load_checkpoint
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.views.kv_scales import KVScales, KVShape, scales_for
from jaxengine.runner.start.kv_scales import read_largest, stored_scales
from jaxengine.sharding.layout import ONE_DEVICE
from jaxengine.sharding.mesh import make_mesh
from tests.fixtures import quantized_models
from tests.fixtures.adapters import merged, write_adapter
from tests.fixtures.drawn_weights import checkpoint
from tests.fixtures.picture_checkpoints import whole_checkpoint

PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9]}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)


def tokens(llm):
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_a_converted_model_is_the_same_model(tiny_options, tmp_path, make_llm, capsys):
    source, folder = tiny_options["model"], tmp_path / "converted"
    assert main(["convert", str(folder), "--model", source, "--disable-log-stats"]) == 0
    converted = {**tiny_options, "model": str(folder)}
    assert tokens(LLM(**converted)) == tokens(make_llm())
    assert tokens(LLM(**converted, load_format="orbax")) == tokens(make_llm())
    assert not (folder / SCALES_FILE).exists() and "kv_cache_scales" not in (folder / "layout.json").read_text()

    assert main(["convert", str(folder), "--model", source, "--disable-log-stats"]) == 2
    assert "exists; a checkpoint is written to a new folder" in capsys.readouterr().err
    with pytest.raises(ModelFileError, match="convert the model again"):
        LLM(**{**converted, "dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="allowed: auto, orbax, dummy"):
        LLM(**converted, load_format="safetensors")
    with pytest.raises(ConfigError, match="allowed: auto, safetensors, mistral, runai_streamer, .*, dummy"):
        LLM(**tiny_options, load_format="orbax")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pipeline-parallel-size", "2"], "pipeline_parallel_size is 2; allowed: 1"),
        (["--rope-theta", "5000"], "hf_overrides has rope_theta, and a converted folder keeps"),
        (["--tensor-parallel-size", "64"], "parallel sizes whose product is at most"),
    ],
)
def test_what_cannot_be_converted(tiny_options, tmp_path, capsys, options, message):
    folder = tmp_path / "converted"
    assert main(["convert", str(folder), "--model", tiny_options["model"], *options]) == 2
    assert message in capsys.readouterr().err and not Path(folder).exists()


def test_a_gguf_file_is_not_converted(tmp_path, capsys):
    """Its tokenizer is inside it, not a file beside the weights."""
    assert main(["convert", str(tmp_path / "converted"), "--disable-log-stats"]) == 2
    assert "name a Hugging Face folder or hub id with safetensors" in capsys.readouterr().err


def test_a_model_with_an_adapter_in_its_weights(tiny_options, tmp_path, capsys):
    source, adapter, folder = Path(tiny_options["model"]), tmp_path / "adapter", tmp_path / "converted"
    write_adapter(adapter, source, seed=4, use_rslora=True, rank_pattern={"q_proj": 3})
    options = ["--model", str(source), "--merge-lora", str(adapter), "--disable-log-stats"]
    assert main(["convert", str(folder), *options]) == 0
    config = read_folder(source)
    model, mesh = build_model(config, Build("float32")), make_mesh(ONE_DEVICE, jax.devices()[:1])
    wanted = SafetensorsCheckpoint(merged(tmp_path / "merged", source, adapter))
    ours, theirs = load_checkpoint(folder, model, mesh=mesh), load_params(model, wanted, mesh=mesh)
    wanted.close()
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    write_adapter(adapter, {"model.layers.9.mlp.up_proj": (4, 4)}, seed=1, target_modules=["up_proj"])
    assert main(["convert", str(tmp_path / "other"), *options]) == 2
    assert "the adapter is for another base model" in capsys.readouterr().err and not (tmp_path / "other").exists()
    module = "model.layers.3.shared_transformer.self_attn.o_proj"
    write_adapter(adapter, {module: (32, 64)}, seed=1, target_modules=r".*3\.shared_transformer.*o_proj")
    options[1] = str(checkpoint("zamba2_shared"))
    assert main(["convert", str(tmp_path / "other"), *options]) == 2
    assert "o_proj in one of layers 0, 3, which share its weights" in capsys.readouterr().err


def test_plain_experts_of_a_quantised_model_are_refused(tmp_path, capsys):
    """Nothing in the converted folder would say that they are plain."""
    shutil.copytree(checkpoint("aria_text"), source := tmp_path / "source")
    raw = json.loads((source / "config.json").read_text())
    stored = json.loads(json.dumps(quantized_models.FORMATS["ct int channel"][0]))
    for group in stored["config_groups"].values():
        group["targets"] = [r"re:.*\.experts\..*"]
    raw["quantization_config"] = stored
    (source / "config.json").write_text(json.dumps(raw))
    assert main(["convert", str(tmp_path / "new"), "--model", str(source), "--disable-log-stats"]) == 2
    assert "is quantised except for model.layers.0.mlp.experts." in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_model_that_sees(tmp_path):
    """Its tower is converted with it, and its processor's settings lie beside."""
    model, folder = whole_checkpoint("qwen2_vl_vision", tmp_path / "model"), tmp_path / "converted"
    options = ["--disable-log-stats", "--dtype", "float32"]
    assert main(["convert", str(folder), "--model", str(model), *options]) == 0
    assert {file.name for file in model.glob("*.json")} <= {file.name for file in folder.iterdir()}
    read = assert_same_weights(folder, model)
    assert len(jax.tree.leaves(read)) > len(jax.tree.leaves(read["layers"]))


@pytest.mark.parametrize("name", ["awq", "fp8 block"])
def test_a_quantised_model(tmp_path, name):
    """Its codes and scales, and what says what they are."""
    model, folder = quantized_models.write(tmp_path, name), tmp_path / "converted"
    assert main(["convert", str(model), str(folder), "--disable-log-stats", "--dtype", "float32"]) == 0
    assert read_folder(folder).quantization == read_folder(model).quantization is not None
    read = assert_same_weights(folder, model)
    assert {np.dtype("uint8"), np.dtype("float8_e4m3fn")} & {leaf.dtype for leaf in jax.tree.leaves(read)}


def assert_same_weights(folder, model):
    """Those of a converted folder are the model's own, bit for bit, and returned."""
    abstract, source = build_model(read_folder(model), Build("float32")), SafetensorsCheckpoint(model)
    stored = load_checkpoint(folder, abstract, mesh=make_mesh(ONE_DEVICE, jax.devices()[:1]))
    read = load_params(abstract, source)
    source.close()
    assert len(jax.tree.leaves(stored)) == len(jax.tree.leaves(read))
    assert all(map(np.array_equal, jax.tree.leaves(stored), jax.tree.leaves(read)))
    return read


KV_SHAPE = KVShape(num_layers=2, paged=(0, 1), num_heads=2, values_in_keys=False)
CONVERT = ["--disable-log-stats", "--dtype", "float32"]


@pytest.fixture(scope="module")
def with_scales(tmp_path_factory) -> tuple[Path, Path, KVScales]:
    """A checkpoint whose cache is to be of fp8, so coarse that tokens show it; the same, converted; its scales."""
    folder = tmp_path_factory.mktemp("scales")
    model, converted = quantized_models.write(folder, "ct int channel", num_layers=2), folder / "converted"
    config = json.loads((model / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (model / "config.json").write_text(json.dumps(config))
    # One of a layer, one of each head, and numbers that are not those of fewer bits.
    scales = KVScales(np.float32([[0.9, 0.9], [0.7, 1 / 3]]), np.float32([[0.8, 0.8], [0.1, 0.1]]))
    stored = {
        "0.self_attn.k_scale": [0.9],
        "1.self_attn.k_proj.k_scale": [0.7, 1 / 3],
        "0.self_attn.v_scale": [0.8],
        "1.self_attn.v_proj.output_scale": [0.1],
    }
    tensors = load_file(model / "model.safetensors")
    tensors |= {f"model.layers.{name}": np.float32(values) for name, values in stored.items()}
    save_file(tensors, model / "model.safetensors")
    # Of a file that has the name by chance nothing is taken.
    (model / SCALES_FILE).write_text("{}")
    assert main(["convert", str(model), str(converted), *CONVERT]) == 0
    return model, converted, scales


def test_scales_of_keys_and_values(with_scales, executables_dir, tmp_path):
    """A converted model's cache is the checkpoint's, bit for bit; test_kv_scales.py has what checkpoints say."""
    _, converted, scales = with_scales
    steps = {"cudagraph_capture_sizes": [], "prefill_sizes": []}
    options = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 48, "max_num_seqs": 2}
    options |= {"compilation_config": steps, "disable_log_stats": True, "compile_cache_dir": executables_dir}
    options |= {"num_gpu_blocks_override": 30}
    runner = LLM(str(converted), **options).core.runner
    assert runner.config.kv_cache_dtype == "float8_e4m3fn"
    np.testing.assert_array_equal(runner.stages[0]._kv.k_scale, scales.k)
    np.testing.assert_array_equal(runner.stages[0]._kv.v_scale, scales.v)
    # A file for `kv_cache_scales` as any other, and what is converted again keeps it.
    largest = read_largest(converted / SCALES_FILE, KV_SHAPE)
    np.testing.assert_array_equal(scales_for(largest.k, "float8_e4m3fn"), scales.k)
    assert main(["convert", str(converted), str(tmp_path / "again"), *CONVERT]) == 0
    again = stored_scales(open_model(EngineConfig(model=str(tmp_path / "again"), skip_tokenizer_init=True)))
    assert again is not None and np.array_equal(again.k, scales.k) and np.array_equal(again.v, scales.v)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: there is no such file, though layout.json says there is"),
        ('{"largest_keys": [[1, 2', "not JSON"),
        ('{"largest_keys": [[1, 2], [3, 4]]}', "must hold largest_keys and largest_values of 2 heads in 2 layers"),
        ('{"largest_keys": [[1, 2], [3, NaN]], "largest_values": [[1, 2], [3, 4]]}', "must hold largest_keys"),
    ],
)
def test_scales_that_are_missing_or_damaged(with_scales, tmp_path, content, said):
    converted = shutil.copytree(with_scales[1], tmp_path / "converted")
    (converted / SCALES_FILE).unlink()
    if content is not None:
        (converted / SCALES_FILE).write_text(content)
    source = open_model(EngineConfig(model=str(converted), skip_tokenizer_init=True))
    with pytest.raises(ModelFileError, match=f"{SCALES_FILE}: {said}"):
        stored_scales(source)


def test_scales_that_cannot_be_used_are_known_before_weights_are_read(with_scales, tmp_path, monkeypatch, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((with_scales[0] / "config.json").read_bytes())
    tensors = load_file(with_scales[0] / "model.safetensors")
    tensors.pop("model.layers.0.self_attn.v_scale")
    save_file(tensors, model / "model.safetensors")
    monkeypatch.setattr("jaxengine.commands.convert.load_weights", lambda *_: pytest.fail("weights are read"))
    assert main(["convert", str(model), str(tmp_path / "converted"), *CONVERT]) == 2
    assert "though other layers have theirs (at model.layers.0.self_attn.v_scale)" in capsys.readouterr().err
    assert not (tmp_path / "converted").exists()


def test_a_disk_that_is_full_before_the_scales(with_scales, tmp_path, monkeypatch, capsys):
    write_text = Path.write_text

    def full(path, *content, **options):
        if path.name == SCALES_FILE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(path, *content, **options)

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["convert", str(with_scales[0]), str(tmp_path / "converted"), *CONVERT]) == 2
    assert "converted.part: cannot be written: [Errno 28] No space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
