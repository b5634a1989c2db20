"""jaxengine.server.dynamo: Dynamo's interface over an engine, with ai-dynamo where it is installed, otherwise with what
dynamo_base.py records of it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jaxengine.scheduler.base.errors import RequestError
from tests.jaxengine.server import dynamo_base

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def dynamo():
    if dynamo_base.is_installed():
        assert dynamo_base.differences() == []
        yield importlib.import_module("jaxengine.server.dynamo")
        return
    sys.modules.update(dynamo_base.as_modules())
    try:
        yield importlib.import_module("jaxengine.server.dynamo")
    finally:
        for name in (*dynamo_base.as_modules(), "jaxengine.server.dynamo"):
            sys.modules.pop(name, None)


async def chunks_of(engine: Any, name: str, **request: Any) -> list[dict[str, Any]]:
    context = SimpleNamespace(id=lambda: name)
    return [each async for each in engine.generate({"token_ids": PROMPT, **request}, context)]


def test_a_worker_serves_tokens(dynamo, tiny_options, make_llm, tmp_path):
    """From the command line to the end: tokens, logprobs, several outputs, refused options, an abort, the end."""
    from jaxengine import SamplingParams

    flags = ["--compile-cache-dir", str(tiny_options["compile_cache_dir"]), "--skip-tokenizer-init"]
    for name in ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
        flags += [f"--{name.replace('_', '-')}", str(tiny_options[name])]
    flags += ["--num-gpu-blocks-override", "64"]
    flags += ["--compilation-config", json.dumps(tiny_options["compilation_config"])]
    address = f"ipc://{tmp_path}/events"
    flags += ["--kv-events-config", json.dumps({"enable_kv_cache_events": True, "endpoint": address})]
    expected = (
        make_llm()
        .generate(
            [{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
        )[0]
        .outputs[0]
    )

    async def talk() -> None:
        engine, worker = await dynamo.DynamoEngine.from_args(["--model", tiny_options["model"], *flags])
        assert worker.namespace == "dynamo" and worker.model_name == tiny_options["model"]
        assert worker.disaggregation_mode.value == "agg" and worker.use_kv_events
        await engine.cleanup()
        config = await engine.start(7)
        try:
            assert (config.llm.total_kv_blocks, config.llm.context_length, config.llm.max_num_seqs) == (64, 96, 8)
            (source,) = await engine.kv_event_sources()
            assert (source.endpoint, source.dp_rank) == (address, 0)
            options = {
                "sampling_options": {"temperature": 0, "use_beam_search": False, "top_p": None},
                "stop_conditions": {"max_tokens": 6, "ignore_eos": True, "stop": ["x"], "stop_token_ids_hidden": [99]},
                "output_options": {"logprobs": 1},
            }
            found = await chunks_of(engine, "a", **options)
            assert [token for each in found for token in each["token_ids"]] == expected.token_ids
            assert {each["index"] for each in found} == {0} and found[-1]["finish_reason"] == "length"
            assert found[-1]["completion_usage"] == {"prompt_tokens": 20, "completion_tokens": 6, "total_tokens": 26}
            assert expected.logprobs is not None
            scores = [own[token].logprob for own, token in zip(expected.logprobs, expected.token_ids, strict=True)]
            assert [one for each in found for one in each["log_probs"]] == pytest.approx(scores, abs=1e-5)
            assert found[0]["top_logprobs"][0][0]["rank"] == 1
            stops = {"max_tokens": 3, "ignore_eos": True}
            both = await chunks_of(engine, "b", sampling_options={"n": 2, "seed": 1}, stop_conditions=stops)
            assert sorted(each["index"] for each in both if "finish_reason" in each) == [0, 1]
            for name, value in (("best_of", 3), ("temperature", -1.0), ("surprise", 1)):
                with pytest.raises(RequestError, match=name):
                    await chunks_of(engine, "c", sampling_options={name: value})
            left = engine.generate(
                {"token_ids": PROMPT, "stop_conditions": {"ignore_eos": True}}, SimpleNamespace(id=lambda: "d")
            )
            await anext(left)
            await engine.abort(SimpleNamespace(id=lambda: "d"))
            assert [each["finish_reason"] async for each in left if "finish_reason" in each] == ["cancelled"]
        finally:
            await engine.cleanup()
        await engine.cleanup()

    asyncio.run(talk())
    transfer = (
        '{"kv_connector": "NixlConnector", "kv_role": "%s", "kv_connector_extra_config": {"transport": "folder", \
"shared_storage_path": "/tmp"}}'
    )
    for role, mode in (("kv_producer", "prefill"), ("kv_consumer", "decode")):
        argv = ["--model", "m", "--kv-transfer-config", transfer % role]
        engine, worker = asyncio.run(dynamo.DynamoEngine.from_args(argv))
        assert worker.disaggregation_mode.value == mode
        handed = {"disaggregated_params": {"kv_transfer_params": {"do_remote_prefill": True}}}
        params = engine._params({"token_ids": PROMPT, "prefill_result": handed, "stop_conditions": {"max_tokens": 9}})
        direction = {"prefill": "do_remote_decode", "decode": "do_remote_prefill"}[mode]
        assert params.extra_args == {"kv_transfer_params": {direction: True}}
        assert params.max_tokens == {"prefill": 1, "decode": 9}[mode] and params.return_sampling_mask is False
