"""Activations over gRPC: those that the engine gives in Python, whole and in chunks; no more than the server allows."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import load

from jaxengine import AsyncLLM
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.server.grpc import inference_pb2 as pb
from tests.jaxengine.server.grpc.grpc_rig import connected, refusal

IDS = [5, 6, 7, 8, 9, 10]
ASKED: dict[str, Any] = {"capture": ["residual:*", "mlp_output:1"], "return_hidden_states": True}
# Rows of three residual streams, an output and two hidden states, of 32 float32 numbers each.
ROW_BYTES = 6 * 32 * 4
SAMPLED = {"temperature": 1.0, "seed": 4, "ignore_eos": True, "n": 2}


@pytest.fixture(scope="module")
def engine(chat_options):
    sizes = {"compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []}}
    own = {"capture": ["residual:*", "mlp_output:1"], "capture_layers": [0, -1], "max_num_batched_tokens": 32}
    engine = AsyncLLM(**chat_options | sizes | own)
    yield engine
    engine.shutdown()


def asked(max_new_tokens: int = 4, **response: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids={"ids": IDS},
        temperature=1.0,
        sampling={"seed": 4, "num_sequences": 2},
        stopping={"max_new_tokens": max_new_tokens, "ignore_eos": True},
        response=ASKED | response,
    )


async def test_activations_are_those_of_the_engine(engine):
    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(**SAMPLED, **ASKED, max_tokens=4, output_kind=kind)
    last = [each async for each in engine.generate({"prompt_token_ids": IDS}, params, "expected")][-1]
    wanted = [{**(each.captured or {}), "hidden_states": each.hidden_states} for each in last.outputs]
    async with connected(engine) as (_, stub):
        whole = [load(each.captured) for each in (await stub.Generate(asked())).outputs]
        chunks = [chunk.outputs async for chunk in stub.GenerateStream(asked())]
        plain = await stub.Generate(pb.GenerateRequest(token_ids={"ids": IDS}))
    for index, own in enumerate(wanted):
        parts = [load(each.captured) for each in chunks if each.index == index and each.captured]
        assert len(parts) > 1 and own.keys() == whole[index].keys() and len(own) == 5
        for name, values in own.items():
            assert len(values) == len(IDS) + 4 - 1
            np.testing.assert_array_equal(whole[index][name], values, name)
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values, name)
    assert not plain.outputs[0].captured


async def test_what_is_refused(engine):
    cases = [
        ({"max_new_tokens": 9}, "capture", f"up to 30 rows of {ROW_BYTES} bytes"),
        ({"capture": [], "max_new_tokens": 60}, "return_hidden_states", "up to 132 rows of 256 bytes"),
        ({"capture": ["attention_output:0"]}, "capture", "started with residual:0-2, mlp_output:1"),
        ({"capture": ["residual"]}, "capture", "must be None or a list of names"),
    ]
    async with connected(engine, max_captured_bytes=20 * ROW_BYTES) as (_, stub):
        for fields, name, said in cases:
            for method in (stub.Generate, stub.GenerateStream):
                code, details, named = await refusal(method(asked(**fields)))
                assert code is grpc.StatusCode.INVALID_ARGUMENT and named == [f"response.{name}"], details
                assert said in details, details
        assert (await stub.Generate(asked())).outputs[0].captured
