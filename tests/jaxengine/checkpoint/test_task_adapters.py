"""Jina embeddings v5: the adapter of the chosen task is in the weights, as PEFT adds it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxengine import LLM, ConfigError
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.pooled import with_own_files
from tests.fixtures.adapters import scale_of
from tests.fixtures.task_models import NAMES, TASKS, TEXTS, make_task_model

GOLDENS = np.load(Path(__file__).parents[2] / "fixtures" / "task_models.npz")
MESSAGES = {
    "summary": "jina_task must be null, or one of the folder adapters: retrieval, text-matching, got 'summary'",
    7: "jina_task must be null, or one of the folder adapters: retrieval, text-matching, got 7",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("tasks")
    return {name: make_task_model(parent / name, name) for name in NAMES}


def opened(folder: Path, **overrides):
    source = open_model(EngineConfig(model=str(folder), hf_overrides=overrides or None))
    with source.closing_on_error():
        return source


def of_numpy(folder: Path, task: str | None) -> dict[str, np.ndarray]:
    """The checkpoint's matrices with the adapter of a task, in float64, by the model's names."""
    tensors = {
        f"model.{name}": value.astype(np.float64) for name, value in load_file(folder / "model.safetensors").items()
    }
    if task is not None:
        adapter = folder / "adapters" / task
        parts = load_file(adapter / "adapter_model.safetensors")
        config = json.loads((adapter / "adapter_config.json").read_text())
        for key in [key for key in parts if ".lora_A." in key]:
            module = key.removeprefix("base_model.model.").partition(".lora_A.")[0]
            change = parts[key.replace(".lora_A.", ".lora_B.")].astype(np.float64) @ parts[key]
            tensors[f"model.{module}.weight"] += scale_of(config, module) * change
    return tensors


@pytest.mark.parametrize("name", NAMES)
def test_weights_have_the_adapter_of_the_task(name, folders):
    cases = {"retrieval": {}, "text-matching": {"jina_task": "text-matching"}, None: {"jina_task": None}}
    for task, overrides in cases.items():
        source = opened(folders[name], **overrides)
        expected = of_numpy(folders[name], task)
        assert {*source.weights.names()} == {*expected}
        for tensor, values in expected.items():
            np.testing.assert_allclose(source.weights.read(tensor), values, rtol=1e-6, atol=1e-6, err_msg=tensor)
        source.close()
        assert source.config.is_causal is (name == "decoder")
        assert source.pooling.pooler.pooling_type == "LAST"


def test_files_of_an_update_have_the_adapter_too(folders):
    pooler, names = opened(folders["decoder"]).config.pooler, ("model.layers.0.self_attn.q_proj.weight", slice(3, 7))
    source = with_own_files(folders["decoder"], SafetensorsCheckpoint(folders["decoder"]), CheckpointNames(), pooler)
    expected = of_numpy(folders["decoder"], "retrieval")[names[0]]
    np.testing.assert_allclose(source.read(*names, slice(2, 9)), expected[3:7, 2:9], rtol=1e-6, atol=1e-6)
    source.close()


def test_a_task_without_an_adapter_is_an_error_and_a_merged_checkpoint_has_no_adapters(folders, tmp_path):
    for task, text in MESSAGES.items():
        with pytest.raises(ModelFileError, match=text):
            opened(folders["decoder"], jina_task=task)
    merged = tmp_path / "merged"
    shutil.copytree(folders["decoder"], merged, ignore=shutil.ignore_patterns("adapters"))
    assert opened(merged).config.pooler.adapter is None
    with pytest.raises(ModelFileError, match="adapters: it has none, got 'retrieval'"):
        opened(merged, jina_task="retrieval")
    config = json.loads((merged / "config.json").read_text())
    (merged / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    with pytest.raises(ConfigError, match="hf_overrides has 'jina_task', which this model's configuration does not"):
        opened(merged, jina_task="retrieval")


@pytest.mark.thorough("test_weights_have_the_adapter_of_the_task")
@pytest.mark.parametrize("name", NAMES)
def test_embeddings_are_those_of_peft(name, folders, executables_dir):
    options = {"dtype": "float32", "max_num_seqs": 4, "block_size": 4, "num_gpu_blocks_override": 100}
    options |= {"max_num_batched_tokens": 64, "max_model_len": 64, "compile_cache_dir": executables_dir}
    for task in ("none", *TASKS):
        chosen = None if task == "none" else task
        llm = LLM(str(folders[name]), hf_overrides={"jina_task": chosen}, **options)
        found = np.stack([each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)])
        llm.shutdown()
        np.testing.assert_allclose(found, GOLDENS[f"{name} {task}"], atol=2e-5)
