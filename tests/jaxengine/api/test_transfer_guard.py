"""Engines where jax_transfer_guard forbids transfers, as a trainer may for its own loop: those of an engine go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxengine import LLM, AsyncLLM, LoRARequest, SamplingParams, open_model
from tests.conftest import TINY_CHECKPOINT
from tests.fixtures.adapters import CONFIG, write_adapter
from tests.jaxengine.engine.offload_cases import prompts_of
from tests.jaxengine.engine.test_lora import LORA

PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, repetition_penalty=1.2, logit_bias={5: 2.0}),
]
TIERS = {"num_gpu_blocks_override": 40, "max_model_len": 64, "kv_offloading_size": 0.05}


@pytest.fixture(scope="module")
def own_tree():
    return jax.tree.map(np.asarray, open_model(TINY_CHECKPOINT).params)


@pytest.fixture(params=["of the process", "of the thread"])
def guard(request) -> Iterator[None]:
    """No thread, or only not this one, may transfer arrays without saying so."""
    with ExitStack() as ends:
        if request.param == "of the thread":
            ends.enter_context(jax.transfer_guard("disallow_explicit"))
        else:
            ends.callback(jax.config.update, "jax_transfer_guard", jax.config.jax_transfer_guard)
            jax.config.update("jax_transfer_guard", "disallow_explicit")
        with pytest.raises(Exception, match="Disallowed host-to-device"):
            jax.jit(lambda x: x + 1)(np.zeros(3))
        yield


def tokens(llm: LLM, adapter: LoRARequest | None) -> list[list[int]]:
    prompts = [{"prompt_token_ids": each} for each in prompts_of(8)]
    outputs = llm.generate(prompts, PARAMS * 4, use_tqdm=False, lora_request=adapter)
    return [list(each.outputs[0].token_ids) for each in outputs]


def test_an_engine_serves(own_tree, guard, tmp_path):
    """From its start on: adapters, pages that leave and come back, new weights, sleep; each has a thread of its own."""
    adapter = LoRARequest("own", 1, write_adapter(tmp_path / "adapter", TINY_CHECKPOINT, seed=1))
    with LLM(str(TINY_CHECKPOINT), **LORA | TIERS) as llm:
        first = tokens(llm, adapter)
        assert first != tokens(llm, None)
        assert llm.core.engine.extensions.by_name["offload"].flush()
        assert tokens(llm, adapter) == first
        llm.update_weights(load_file(TINY_CHECKPOINT / "model.safetensors"))
        llm.update_weights(str(TINY_CHECKPOINT))
        llm.update_weights(own_tree)
        llm.update_lora("own", load_file(tmp_path / "adapter" / "adapter_model.safetensors"), config=CONFIG)
        assert llm.weight_info(checksum=True)["weight_version"] == 3
        llm.sleep(level=1)
        llm.wake_up()
        assert tokens(llm, adapter) == first
        assert llm.core.runner.compiles.count == 0


def test_streams(guard, tiny_options):
    async def stream() -> list[int]:
        engine = AsyncLLM(**tiny_options)
        try:
            async for output in engine.generate({"prompt_token_ids": [1, 2, 3]}, PARAMS[0], "a"):
                found = output
            return list(found.outputs[0].token_ids)
        finally:
            engine.shutdown()

    assert len(asyncio.run(stream())) == 9
