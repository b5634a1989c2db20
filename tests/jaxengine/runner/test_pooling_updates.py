"""New weights of a pooling model under the names that its checkpoints have; no engine is started."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.registry import build_model
from jaxengine.models.weights.load import load_params
from jaxengine.runner.weights.weight_update import WeightUpdateError, read_weights
from tests.fixtures.token_models import make_token_model
from tests.tables import each_row

DENSE = "2_Dense/model.safetensors"


def runner_of(folder: str) -> Any:
    """Make the parts of an engine's runner that `read_weights` looks at."""
    source = open_model(EngineConfig(model=folder))
    model = build_model(source.config, Build("float32"))
    params = [leaf.get_value() for _, leaf in nnx.to_flat_state(load_params(model, source.weights))]
    source.close()
    stage = SimpleNamespace(programs=SimpleNamespace(model=model, mesh=None), params=params)
    return SimpleNamespace(config=SimpleNamespace(nnodes=1), stages=[stage])


def tensors_of(folder: Path, doubled: bool = False) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, those of Dense modules under the names that the engine has for them."""
    found = load_file(folder / "model.safetensors")
    for index, file in enumerate(sorted(folder.glob("*_Dense/model.safetensors"))):
        found |= {f"dense.{index}.{name}": array for name, array in load_file(file).items()}
    return {name: array * 2 if doubled else array for name, array in found.items()}


# Checkpoints with a prefix of their own, with that of all models beside heads without it, and without any but with
# files of Dense modules.
# ColBERT's projection is among its other tensors.
@each_row("name", ["bert_score", "modernbert_score", "embedding_gemma", "colbert"])
def test_a_checkpoints_own_names(encoder_folder, tmp_path, name):
    own = str(make_token_model(tmp_path / "own", name)) if name == "colbert" else encoder_folder(name)
    folder, runner = tmp_path / name, runner_of(own)
    old = [np.asarray(each) for each in runner.stages[0].params]
    shutil.copytree(own, folder)
    for file in folder.rglob("*.safetensors"):
        save_file({name: array * 2 for name, array in load_file(file).items()}, file)
    for given in (folder, tensors_of(Path(own), doubled=True)):
        new = read_weights(runner, given)
        assert new.num_leaves == len(old)
        new.put()
        for before, after in zip(old, runner.stages[0].params, strict=True):
            np.testing.assert_array_equal(before * 2, np.asarray(after))


def test_what_is_not_there_is_named(encoder_folder, tmp_path):
    folder, name = tmp_path / "model", "embedding_gemma"
    shutil.copytree(encoder_folder(name), folder)
    (folder / DENSE).unlink()
    runner = runner_of(encoder_folder(name))
    num_leaves = len(runner.stages[0].params)
    with pytest.raises(WeightUpdateError, match=DENSE):
        read_weights(runner, folder)
    assert read_weights(runner, folder, strict=False).num_leaves == num_leaves - 1
    with pytest.raises(WeightUpdateError, match="other.weight: the model has no use"):
        read_weights(runner, tensors_of(Path(encoder_folder(name))) | {"other.weight": np.zeros(3, np.float32)})
