"""Adapters of experts in an engine: rows give the tokens of merged weights, on one device and over several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine import LLM, LoRARequest
from tests.fixtures.adapters import JOINED, merged, write_adapter
from tests.fixtures.drawn_weights import checkpoint
from tests.jaxengine.engine.lora_parallel import over_devices
from tests.jaxengine.engine.test_lora import GREEDY, OPTIONS, PROMPTS, Weights, tokens

pytestmark = pytest.mark.thorough("layers and logits of the same are compared in tests/models")

LORA = OPTIONS | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 3}
EP = {"enable_expert_parallel": True}
RAGGED = {"all2all_backend": "ragged_all_to_all"}
PARALLEL = {
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "ep 2": {"tensor_parallel_size": 2} | EP,
    "ep 2, rows sent": {"tensor_parallel_size": 2} | EP | RAGGED,
    "dp 2, ep": {"data_parallel_size": 2} | EP,
    "tp 2, pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
# Of qwen2_moe, whose layer 1 is dense, with a shared MLP and its gate.
LAYERS = {f"model.layers.{layer}.mlp.experts": {JOINED[0]: (6, 64, 32), JOINED[1]: (6, 16, 64)} for layer in (0, 2)}
ADAPTERS = {
    "one by one": {"target_modules": r".*\.experts\.[0-4]\..*_proj", "lora_alpha": 32},
    "all linear": {"target_modules": "all-linear", "r": 3},
    "together": {
        "target_modules": ["q_proj", "shared_expert_gate"],
        "target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"gate_up_proj": 5},
        "joined": LAYERS,
        "r": 4,
    },
}


@pytest.fixture(scope="module")
def model():
    return checkpoint("qwen2_moe")


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: LoRARequest(name, number, write_adapter(folder / str(number), model, seed=number, std=0.4, **changes))
        for number, (name, changes) in enumerate(ADAPTERS.items(), 1)
    }


@pytest.fixture(scope="module")
def llm(model):
    with LLM(str(model), **LORA) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm, model, adapters, tmp_path_factory):
    """The tokens of merged weights by adapter, and of the model alone under None."""
    folder, weights = tmp_path_factory.mktemp("merged"), Weights(llm)
    found = {None: tokens(llm, PROMPTS)}
    for name, adapter in adapters.items():
        weights.load(merged(folder / str(adapter.lora_int_id), model, Path(adapter.lora_path)))
        found[name] = tokens(llm, PROMPTS)
    weights.restore()
    assert len({str(each) for each in found.values()}) == 4
    return found


def test_three_adapters_and_none_at_once(llm, adapters, expected):
    """Through two slots."""
    rows = [(name, index) for index in range(len(PROMPTS)) for name in (*adapters, None)]
    found = tokens(llm, [PROMPTS[index] for _, index in rows], [adapters.get(name) for name, _ in rows])
    assert found == [expected[name][index] for name, index in rows]
    assert llm.core.runner.compiles.count == 0


@pytest.mark.parametrize("name", PARALLEL)
def test_over_several_devices(name, model, adapters, expected, executables_dir):
    rows = [(each, index) for index in range(len(PROMPTS)) for each in (*adapters, None)]
    job = {
        "model": str(model),
        "cases": {name: LORA | {"compile_cache_dir": executables_dir, **PARALLEL[name]}},
        "prompts": [PROMPTS[index] for _, index in rows],
        "adapters": [
            None if each is None else [each, adapters[each].lora_int_id, str(adapters[each].lora_path)]
            for each, _ in rows
        ],
    }
    (found,) = over_devices(job)
    assert found["tokens"] == [expected[adapter][index] for adapter, index in rows]
    assert found["compilations"] == 0


def test_on_quantised_weights(model, adapters, tmp_path):
    """int8 by channel, as beside the weights that it stands for; routers and gates are stored as they are."""
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if ".layers." in name and weight.ndim == 2 and not name.endswith((".gate.weight", "shared_expert_gate.weight")):
            scales = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
            weights[name] = np.rint(weight / scales) * scales
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    found = []
    for folder, quantization in ((model, "int8"), (tmp_path, None)):
        with LLM(str(folder), **LORA, quantization=quantization) as llm:
            found.append([tokens(llm, PROMPTS, each, GREEDY) for each in (None, *adapters.values())])
    assert found[0] == found[1] and len({str(each) for each in found[0]}) == 4
