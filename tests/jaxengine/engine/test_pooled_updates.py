"""Pooled requests whose weights are replaced while their prompts are computed: each result is of one version alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxengine import LLM, PoolingParams
from jaxengine.requests.params.options import RequestOptions
from tests.conftest import use_scheduler
from tests.fixtures.adapters import CONFIG, write_adapter

PROMPTS = [[5 + (7 * number + index) % 40 for index in range(count)] for number, count in enumerate((23, 14, 30))]
TASKS = {"last": "embed", "mean": "embed", "tokens": "token_embed"}


class Run:
    """Pooled requests for PROMPTS in an engine that computes four tokens of each in a step.

    Attributes:
      found: results by the number of the prompt.
    """

    def __init__(self, llm: LLM, params: PoolingParams, monkeypatch: pytest.MonkeyPatch, lora: str | None = None):
        """Add the requests, and compute a part of each prompt. lora: name of their adapter, None for none."""
        self.llm, self.found, step = llm, dict[int, np.ndarray](), llm.core.step
        numbers: dict[str, int] = {}

        def collecting() -> list[Any]:
            outputs = step()
            ended = (each for each in outputs if each.finished and each.request_id in numbers)
            self.found |= {numbers[each.request_id]: np.asarray(each.outputs.data) for each in ended}
            return outputs

        monkeypatch.setattr(llm.core, "step", collecting)
        scheduler = use_scheduler(llm, long_prefill_token_threshold=4)
        for number, prompt in enumerate(PROMPTS):
            prepared = llm.core.inputs.prepare({"prompt_token_ids": prompt}, params, options=RequestOptions(lora=lora))
            numbers[prepared.request_id] = number
            llm.core.add(prepared)
        computed = scheduler.ranks[0].slots.num_computed
        while computed.max() < 12:  # an adapter may have to come first
            llm.core.step()
        assert len(scheduler.requests) == len(PROMPTS) and computed[computed > 0].tolist() == [12, 12, 12], computed

    def end(self) -> dict[int, np.ndarray]:
        """Run to the end; return the results."""
        while self.llm.core.has_unfinished:
            self.llm.core.step()
        return self.found


WAYS = [("keep", kv) for kv in ("recompute", "drop", "keep")] + [("wait", "recompute"), ("abort", "keep")]


@pytest.mark.parametrize("kind", TASKS)
def test_a_result_is_of_one_version(make_pooling_llm, pooling_folder, monkeypatch, kind):
    name, params = "mean" if kind == "mean" else "last", PoolingParams(task=TASKS[kind])
    llm, old = make_pooling_llm(name), load_file(pooling_folder(name) + "/model.safetensors")
    new = {key: values * np.float32(1 + 0.3 * (index % 2)) for index, (key, values) in enumerate(old.items())}

    def run() -> Run:
        return Run(llm, params, monkeypatch)

    try:
        versions = []
        for tensors in (old, new):
            llm.update_weights(tensors, kv="drop")
            versions.append(run().end())
        assert np.abs(versions[0][0] - versions[1][0]).max() > 1e-2
        for mode, kv in WAYS:
            llm.update_weights(old, kv="drop")
            running = run()
            llm.update_weights(new, mode=mode, kv=kv)
            expected = versions[mode != "wait"]
            for found, wanted in ((running.end(), {} if mode == "abort" else expected), (run().end(), versions[1])):
                assert mode == "abort" or found.keys() == wanted.keys()
                for key, values in wanted.items():
                    np.testing.assert_allclose(found[key], values, atol=1e-5, err_msg=f"{mode}, {kv}, prompt {key}")
    finally:
        monkeypatch.undo()
        llm.update_weights(old, kv="drop")
        use_scheduler(llm)


@pytest.mark.thorough("an engine of its own")
@pytest.mark.parametrize("kv", ["recompute", "drop", "keep"])
def test_a_result_is_of_one_adapter(make_pooling_llm, pooling_folder, monkeypatch, tmp_path, kv):
    llm = make_pooling_llm("last", ("enable_lora", True), ("max_lora_rank", 64))
    weights = load_file(pooling_folder("last") + "/model.safetensors")
    shapes = {name.removesuffix(".weight"): each.shape for name, each in weights.items() if "_proj" in name}
    folders = [write_adapter(tmp_path / str(seed), shapes, seed=seed) for seed in (1, 2)]
    old, new = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    params = PoolingParams(task="embed")

    def run() -> Run:
        return Run(llm, params, monkeypatch, "own")

    try:
        expected = []
        for tensors in (old, new):
            llm.update_lora("own", tensors, config=CONFIG, lora_int_id=1, kv="drop")
            expected.append(run().end())
        assert np.abs(expected[0][0] - expected[1][0]).max() > 1e-2
        llm.update_lora("own", old, kv="drop")
        running = run()
        llm.update_lora("own", new, kv=kv)
        for found in (running.end(), run().end()):
            assert found.keys() == expected[1].keys()
            for key, values in expected[1].items():
                np.testing.assert_allclose(found[key], values, atol=1e-5, err_msg=f"prompt {key}")
    finally:
        monkeypatch.undo()
        use_scheduler(llm)
