"""Adapters of encoders: rows with one and without share a step, and are those of merged weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxengine import LLM, LoRARequest, ModelFileError
from tests.fixtures.adapters import merged, write_adapter
from tests.fixtures.encoder_models import TEXTS
from tests.jaxengine.api.test_encoders import OPTIONS, raw

# target_modules, as PEFT matches them.
TARGETS = {
    "modernbert_score": ["Wqkv", "Wo", "Wi"],
    "distilbert": ["q_lin", "v_lin", "k_lin", "out_lin", "lin1", "lin2"],
    "nomic_score": ["Wqkv", "out_proj", "fc11", "fc12", "fc2"],
    "gte": ["qkv_proj", "o_proj", "up_gate_proj", "down_proj"],
    "mpnet": ["q", "k", "v", "o"],
    "qwen2_all": ["q_proj", "v_proj", "down_proj"],
    "jina_v2_code": ["query", "value"],
    "t5_gated": ["q", "v", "wo"],
}
pytestmark = pytest.mark.thorough("test_lora_beside.py has a decoder's vectors")


def adapter_of(model: Path, folder: Path, targets: list[str]) -> LoRARequest:
    weights = load_file(model / "model.safetensors")
    matrices = {name: each.shape for name, each in weights.items() if each.ndim == 2}
    layers = {name: shape for name, shape in matrices.items() if ".layer" in name or ".block" in name}
    shapes = {name.removesuffix(".weight"): shape for name, shape in layers.items()}
    return LoRARequest("a", 1, str(write_adapter(folder, shapes, seed=1, target_modules=targets)))


@pytest.mark.parametrize("name", TARGETS)
def test_vectors_are_those_of_merged_weights(name, encoder_folder, tmp_path):
    model = Path(encoder_folder(name))
    adapter = adapter_of(model, tmp_path / "a", TARGETS[name])
    shutil.copytree(model, tmp_path / "both")
    shutil.copy(merged(tmp_path / "merged", model, Path(adapter.lora_path)) / "model.safetensors", tmp_path / "both")
    found = []
    for folder, options in ((model, {"enable_lora": True, "max_lora_rank": 8}), (model, {}), (tmp_path / "both", {})):
        with LLM(str(folder), **OPTIONS | options) as llm:
            chosen = [adapter if row % 2 else None for row in range(len(TEXTS))] if options else None
            found.append(raw(llm, TEXTS, chosen))
    mixed, plain, whole = found
    expected = np.where(np.arange(len(TEXTS))[:, None] % 2, whole, plain)
    np.testing.assert_allclose(mixed, expected, atol=2e-5 * max(1.0, np.abs(expected).max()))
    assert np.abs(plain - whole).max() > 1e-2


def test_what_takes_none_is_refused(encoder_folder, tmp_path):
    for name, targets in (("deberta_score", ["query_proj"]), ("bert_score", ["dense"])):
        model = Path(encoder_folder(name))
        adapter = adapter_of(model, tmp_path / name, targets)
        with LLM(str(model), **OPTIONS, enable_lora=True, max_lora_rank=8) as llm:
            with pytest.raises(ModelFileError, match="adapters of it are not supported|has no matrices of it"):
                raw(llm, TEXTS, adapter)
            assert np.isfinite(raw(llm, TEXTS)).all()
