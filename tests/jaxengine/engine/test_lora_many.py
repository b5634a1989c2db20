"""Room for more adapters than a few: rows of twenty at once, by the form that the host chooses for each step."""

from __future__ import annotations

import pytest

from jaxengine import LLM, LoRARequest, SamplingParams
from jaxengine.models.layers.base.lora import product_forms
from jaxengine.scheduler.base.token_params import ADAPTER, FEW_ADAPTERS
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS
from tests.fixtures.adapters import merged, write_adapter
from tests.jaxengine.engine.lora_parallel import over_devices
from tests.jaxengine.engine.test_lora import Weights

LORA = TINY_OPTIONS | {
    "max_model_len": 32,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 96,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
    "enable_prefix_caching": False,
    "enable_lora": True,
    "max_loras": 24,
    "max_lora_rank": 8,
}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = [5, 6, 7]
NUM_ADAPTERS = 22  # of 24 slots, which is more than few; 20 are few


def tokens(llm, adapters):
    outputs = llm.generate([PROMPT] * len(adapters), GREEDY, use_tqdm=False, lora_request=adapters)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(f"a{number}", number, write_adapter(folder / str(number), TINY_CHECKPOINT, seed=number, std=0.3))
        for number in range(1, NUM_ADAPTERS + 1)
    ]


@pytest.fixture(scope="module")
def llm():
    with LLM(str(TINY_CHECKPOINT), **LORA) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm, adapters, tmp_path_factory):
    """The tokens of merged weights, of each adapter and of the model alone, which is last."""
    folder, weights, found = tmp_path_factory.mktemp("merged"), Weights(llm), []
    for adapter in adapters:
        weights.load(merged(folder / adapter.lora_name, TINY_CHECKPOINT, adapter.lora_path))
        found += tokens(llm, [None])
    weights.restore()
    found += tokens(llm, [None])
    assert len(set(map(str, found))) > NUM_ADAPTERS // 2
    return found


def test_rows_of_many_adapters_in_both_forms(llm, adapters, expected, monkeypatch):
    """That all have their slots before both batches makes the first step of each one with all of its rows."""
    assert [tokens(llm, [adapter]) for adapter in adapters] == [[each] for each in expected[:-1]]
    scheduler, steps = llm.core.engine.scheduler, []
    schedule = scheduler.schedule

    def noted(*arguments):
        step = schedule(*arguments)
        if step.num_rows:
            steps.append((step.num_rows, bool(step.features & ADAPTER), bool(step.features & FEW_ADAPTERS)))
        return step

    monkeypatch.setattr(scheduler, "schedule", noted)
    assert tokens(llm, [None, *adapters[:20], None]) == [expected[-1], *expected[:20], expected[-1]]
    assert steps[0] == (22, True, True)
    steps.clear()
    assert tokens(llm, [*adapters, None]) == expected
    assert steps[0] == (23, True, False)
    steps.clear()
    tokens(llm, [None])
    assert steps[0] == (1, False, False)
    assert llm.core.runner.compiles.count == 0


def test_what_forms_there_are_is_told(llm):
    products = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
    for platform, grouped in (
        ("cpu", "matmul.xla.lora"),
        ("tpu", "matmul.xla.lora: kernels multiply bfloat16"),
        ("gpu", "matmul.xla.lora: kernels multiply bfloat16"),
        ("gpu_xla", ""),
    ):
        rows = product_forms([stage.programs.model for stage in llm.core.runner.stages], platform)
        assert {row["modules"].split(", ")[0] for row in rows} == {f"model.layers.*.{name}" for name in products}
        assert all(row["forms"].startswith(f"flat, {grouped}" if grouped else "flat") for row in rows)
    assert llm.core.utility("adapter_forms")[0]["forms"] == "flat, matmul.xla.lora"


@pytest.mark.thorough("one device runs both forms in every run, and other tests split products with adapters")
def test_over_two_devices(adapters, expected):
    job = {
        "model": str(TINY_CHECKPOINT),
        "cases": {"tp 2": LORA | {"tensor_parallel_size": 2}, "dp 2": LORA | {"data_parallel_size": 2}},
        "prompts": [PROMPT] * 21,
        "adapters": [None, *([each.lora_name, each.lora_int_id, str(each.lora_path)] for each in adapters[:20])],
    }
    rows = over_devices(job)
    assert [row["case"] for row in rows] == ["tp 2", "dp 2"]
    for row in rows:
        assert [each[:4] for each in row["tokens"]] == [expected[-1], *expected[:20]], row["case"]
        assert row["compilations"] == 0
