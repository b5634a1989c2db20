"""Adapters from memory, under running requests: every token is that of an adapter of these matrices, or nothing
changes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxengine import LLM, AsyncLLM, LoRARequest, RequestError, SamplingParams
from jaxengine.requests.params.options import RequestOptions
from jaxengine.runner.weights.weight_update import WeightUpdateError
from tests.conftest import TINY_CHECKPOINT
from tests.fixtures.adapters import CONFIG, write_adapter
from tests.jaxengine.engine.test_lora import LORA
from tests.tables import each_row

OPTIONS: dict[str, Any] = LORA | {"max_loras": 1}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11] * 3, [20, 21, 22]]
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("_A", "_B")
LIVE = LoRARequest("live", 9, "nowhere")


def greedy(count: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / str(seed), TINY_CHECKPOINT, seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def tensors(folders):
    return [load_file(folder / "adapter_model.safetensors") for folder in folders]


@pytest.fixture(scope="module")
def llm():
    with LLM(str(TINY_CHECKPOINT), **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM, adapter: LoRARequest | None, prompts: Any = PROMPTS, count: int = 8) -> list[list[int]]:
    outputs = llm.generate(prompts, greedy(count), use_tqdm=False, lora_request=adapter)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(llm, folders):
    """Of the adapters' files."""
    return [tokens(llm, LoRARequest(f"file {seed}", seed, folder)) for seed, folder in enumerate(folders, 1)]


def test_the_matrices_of_memory_are_those_of_the_next_token(llm, tensors, expected):
    """A new name, others for it, and the first ones again: no page of one is found by another."""
    plain = tokens(llm, None)
    assert expected[0] != expected[1] != plain
    llm.update_lora("live", tensors[0], config=CONFIG, lora_int_id=9)
    assert tokens(llm, LIVE) == expected[0]
    for seed in (1, 0, 1):
        llm.update_lora("live", iter(tensors[seed].items()))
        assert tokens(llm, LIVE) == tokens(llm, LIVE) == expected[seed] and tokens(llm, None) == plain
    assert llm.core.runner.compiles.count == 0 and not llm.is_paused()


def test_an_adapter_of_a_folder_can_be_replaced(llm, folders, tensors, expected):
    request = LoRARequest("file 1", 1, folders[0])
    llm.update_lora("file 1", tensors[1])
    assert tokens(llm, request) == expected[1]
    llm.update_lora("file 1", tensors[0], kv="drop")
    assert tokens(llm, request) == expected[0]


@pytest.mark.parametrize("kv", ["recompute", "drop", "keep"])
def test_a_running_request_goes_on(llm, tensors, expected, kv):
    llm.update_lora("live", tensors[0], config=CONFIG)
    core, options = llm.core, RequestOptions(lora="live")
    tokens(llm, LIVE, [[1, 2]])  # brings it to its slot
    core.add(core.inputs.prepare(PROMPTS[0], greedy(20), request_id=kv, options=options))
    (request,) = core.engine.scheduler.requests
    while len(core.engine.scheduler.output_token_ids(request)) < 5:
        core.step()
    before = request.num_preemptions
    llm.update_lora("live", tensors[1], kv=kv)
    known = core.engine.scheduler.output_token_ids(request).tolist()
    assert request.num_preemptions == before + (kv != "keep")
    outputs = []
    while core.has_unfinished:
        outputs += core.step()
    (found,) = [list(each.outputs[0].token_ids) for each in outputs if each.finished]
    assert found[:5] == expected[0][0][:5] and len(found) == 20 and found[: len(known)] == known
    if kv != "keep":
        assert found[len(known) :] == tokens(llm, LIVE, [PROMPTS[0] + known], 20 - len(known))[0]
    assert tokens(llm, LIVE) == expected[1]


@each_row(
    ("change", "faults"),
    [
        ({A: None}, {A.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): "other matrix"}),
        ({A: np.zeros((8, 3), np.float32), "else": np.zeros(1)}, {A: "shape", "else": "must be called"}),
        ({A: np.full((8, 64), np.nan, np.float32), B: "text"}, {B: "array"}),
        (
            {A.replace("layers.0", "layers.7"): np.zeros((8, 64))},
            {A[17:-14].replace("layers.0", "layers.7"): "no such"},
        ),
        ({A: np.full((8, 64), np.inf, np.float32)}, {A: "finite"}),
    ],
)
def test_all_or_none(llm, tensors, expected, change, faults):
    llm.update_lora("live", tensors[0], config=CONFIG)
    given = {name: each for name, each in (tensors[1] | change).items() if each is not None}
    with pytest.raises(WeightUpdateError) as error:
        llm.update_lora("live", given)
    found = error.value.faults
    assert all(any(at == name and text in what for at, what in found) for name, text in faults.items()), found
    assert not llm.is_paused() and tokens(llm, LIVE) == expected[0]


def test_what_else_is_refused(llm, tensors):
    for arguments, field in (
        ({"name": "new"}, "config"),
        ({"name": "new", "config": CONFIG, "lora_int_id": 0}, "lora_int_id"),
        ({"name": "live", "lora_int_id": 77}, "lora_int_id"),
        ({"name": "live", "kv": "forget"}, "kv"),
        ({"name": " ", "config": CONFIG}, "lora_name"),
    ):
        with pytest.raises(RequestError) as error:
            llm.update_lora(params=tensors[0], **arguments)
        assert error.value.param == field, arguments
    with pytest.raises(WeightUpdateError, match="twice"):
        llm.update_lora("live", [*tensors[0].items(), (A, tensors[0][A])])


def test_it_sleeps_and_wakes_with_its_newest_matrices(llm, tensors, expected):
    llm.update_lora("live", tensors[0], config=CONFIG)
    assert tokens(llm, LIVE) == expected[0]
    llm.sleep(1)
    llm.update_lora("live", tensors[1])
    llm.wake_up()
    assert tokens(llm, LIVE) == expected[1] and llm.core.runner.compiles.count == 0


def test_an_engine_on_a_thread_of_its_own(tensors, expected):
    async def run() -> list[int]:
        engine = AsyncLLM(str(TINY_CHECKPOINT), **OPTIONS)
        try:
            await engine.update_lora("live", tensors[0], config=CONFIG, lora_int_id=9)
            await engine.update_lora("live", tensors[1])
            async for output in engine.generate(PROMPTS[0], greedy(), "one", lora_request=LIVE):
                last = output
            return list(last.outputs[0].token_ids)
        finally:
            engine.shutdown()

    assert asyncio.run(run()) == expected[1][0]
