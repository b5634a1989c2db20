"""`jaxengine convert`: the converted folder is the same model, for the sizes it was made for."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxengine import LLM, SamplingParams
from jaxengine.commands.cli import main
from jaxengine.config.engine_config import ConfigError
from models.build import Build
from models.registry import build_model, read_folder
from models.weights.errors import ModelFileError
from models.weights.load import load_params
from models.weights.orbax import load_checkpoint
from models.weights.safetensors import SafetensorsCheckpoint
from sharding.layout import ONE_DEVICE
from sharding.mesh import make_mesh
from tests.fixtures import quantized_models
from tests.fixtures.adapters import merged, write_adapter
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

    assert main(["convert", str(folder), "--model", source, "--disable-log-stats"]) == 2
    assert "exists; a checkpoint is written to a new folder" in capsys.readouterr().err
    with pytest.raises(ModelFileError, match="convert the model again"):
        LLM(**{**converted, "dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="allowed: auto, orbax, dummy"):
        LLM(**converted, load_format="safetensors")
    with pytest.raises(ConfigError, match="allowed: auto, safetensors, dummy"):
        LLM(**tiny_options, load_format="orbax")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pipeline-parallel-size", "2"], "pipeline_parallel_size is 2; allowed: 1"),
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
