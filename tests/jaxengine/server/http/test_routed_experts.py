"""Routed experts over HTTP, an .npy file in base64, as vLLM writes it; sampling masks; and both in SkyRL's form."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from jaxengine import AsyncLLM, SamplingParams
from jaxengine.requests.output.outputs import CompletionOutput
from jaxengine.requests.output.sampling_mask import SamplingMask
from jaxengine.requests.params.sampling_params import RequestOutputKind
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.http.app import create_app
from jaxengine.server.http.chat.output import ChatChoiceWriter
from jaxengine.server.http.skyrl import packed_experts, packed_support
from tests.fixtures.drawn_weights import checkpoint
from tests.jaxengine.engine.test_routed_experts import OPTIONS
from tests.jaxengine.server.asgi_client import post
from tests.jaxengine.server.grpc.grpc_rig import connected

IDS = [5, 6, 7, 8, 9, 10]
SAMPLED = {"temperature": 1.0, "top_k": 9, "max_tokens": 6, "ignore_eos": True, "seed": 4}


@pytest.fixture(scope="module")
def engine(executables_dir):
    own = {"model": str(checkpoint("qwen3_moe")), "compile_cache_dir": executables_dir, "return_sampling_mask": True}
    made = AsyncLLM(**OPTIONS | own)
    yield made
    made.shutdown()


def decoded(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


async def test_choices_have_what_the_engine_returns(engine):
    app = create_app(engine, ServerConfig())
    params = SamplingParams(**SAMPLED, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    async for output in engine.generate({"prompt_token_ids": IDS}, params, "own"):
        wanted = [each.routed_experts for each in output.outputs]
    assert wanted[0].shape == (11, 2, 3)
    for start in (0, 4):
        asked = {**SAMPLED, "n": 2, "routed_experts_prompt_start": start}
        answers = [
            await post(app, "/v1/completions", prompt=IDS, **asked),
            await post(app, "/inference/v1/generate", token_ids=IDS, sampling_params=asked),
        ]
        for answer in answers:
            assert answer.status == 200, answer.body
            for choice, own in zip(answer.json["choices"], wanted, strict=True):
                found = decoded(choice["routed_experts"])
                assert found.dtype == np.uint8
                np.testing.assert_array_equal(found, own[start:])
    streamed = await post(app, "/v1/completions", prompt=IDS, stream=True, **SAMPLED)
    assert not any("routed_experts" in choice for event in streamed.events for choice in event["choices"])


async def test_sampling_masks_are_where_vllm_and_skyrl_have_them(engine):
    """In every answer of token ids, elsewhere where they are asked for."""
    app = create_app(engine, ServerConfig())
    tokens = {"token_ids": IDS, "sampling_params": SAMPLED}
    (choice,) = (await post(app, "/inference/v1/generate", **tokens)).json["choices"]
    mask = choice["sampling_mask"]
    assert choice["logprobs"] is None and [len(row) for row in mask] == [9] * 6
    assert all(token in row == sorted(row) for token, row in zip(choice["token_ids"], mask, strict=True))
    asked = {"prompt": IDS, **SAMPLED, "return_sampling_mask": True}
    events = (await post(app, "/inference/v1/generate", **tokens, stream=True)).events
    more = (await post(app, "/v1/completions", **asked, stream=True)).events
    for each in (events, more, [(await post(app, "/v1/completions", **asked)).json]):
        assert [row for event in each for part in event["choices"] for row in part.get("sampling_mask", ())] == mask
    without = await post(app, "/v1/completions", prompt=IDS, temperature=0, max_tokens=1)
    assert without.status == 200 and "sampling_mask" not in without.json["choices"][0]
    greedy = await post(app, "/inference/v1/generate", token_ids=IDS, sampling_params={"temperature": 0})
    assert greedy.status == 400 and greedy.json["error"]["param"] == "temperature"

    (plain,) = (await post(app, "/skyrl/v1/generate", **tokens)).json["choices"]
    assert plain["rollout_sample_support"] is None and plain["token_ids"] == choice["token_ids"]
    tokens["sampling_params"] = SAMPLED | {"logprobs": 1}
    answer = await post(app, "/skyrl/v1/generate", **tokens, return_sample_support=True, cache_salt="7")
    (packed,) = answer.json["choices"]
    # SkyRL's client cuts the arrays out by these bytes.
    assert b'"rollout_sample_support":{"data":"' in answer.body and b'"routed_experts":{"data":"' in answer.body
    support, experts = (packed[name] for name in ("rollout_sample_support", "routed_experts"))
    assert (support["dtype"], support["shape"], experts["dtype"]) == ("int32", [6, 9], "uint8")
    assert np.frombuffer(base64.b64decode(support["data"]), np.int32).reshape(6, 9).tolist() == mask
    assert base64.b64decode(experts["data"]) == decoded(choice["routed_experts"]).tobytes()
    assert len(packed["logprobs"]["content"]) == 6 and packed["finish_reason"] == "length"
    for own, sampling in (
        *(({name: True}, {}) for name in ("stream", "return_token_ids")),
        *(({}, {name: value}) for name, value in (("prompt_logprobs", 0), ("logprob_token_ids", [5]))),
        *(({}, {name: value}) for name, value in (("return_sampling_mass", True), ("logprobs", 2))),
    ):
        body = {"token_ids": IDS, "sampling_params": SAMPLED | sampling, **own}
        refused = await post(app, "/skyrl/v1/generate", **body)
        (name,) = own | sampling
        assert refused.status == 400 and refused.json["error"]["param"].removeprefix("sampling_params.") == name


async def test_sampling_masks_over_grpc_and_in_rendered_requests(engine):
    """A rendered request says whether it wants masks, as without a word the engine returns them."""
    app = create_app(engine, ServerConfig())
    (choice,) = (await post(app, "/inference/v1/generate", token_ids=IDS, sampling_params=SAMPLED)).json["choices"]
    numbers = {"top_k": SAMPLED["top_k"], "seed": SAMPLED["seed"]}
    request = pb.GenerateRequest(token_ids={"ids": IDS}, temperature=SAMPLED["temperature"], sampling=numbers)
    request.stopping.MergeFrom(pb.StoppingCriteria(max_new_tokens=SAMPLED["max_tokens"], ignore_eos=True))
    async with connected(engine) as (_, stub):
        assert not (await stub.Generate(request)).outputs[0].sampling_mask
        request.response.return_sampling_mask = True
        (output,) = (await stub.Generate(request)).outputs
        parts = [part async for part in stub.GenerateStream(request)]
    for found in (output.sampling_mask, [row for part in parts for row in part.outputs.sampling_mask]):
        assert [list(row.ids) for row in found] == choice["sampling_mask"]
    for asked in (False, True):
        body = {"prompt": IDS, **SAMPLED, "return_sampling_mask": asked}
        (rendered,) = (await post(app, "/v1/completions/render", **body)).json
        assert rendered["sampling_params"]["return_sampling_mask"] is asked
        (again,) = (await post(app, "/inference/v1/generate", **rendered)).json["choices"]
        assert again["sampling_mask"] == (choice["sampling_mask"] if asked else None)


def test_what_a_token_has_beyond_top_k_makes_its_row_longer():
    mask = SamplingMask([np.array(ids, np.int32) for ids in ([3], [4, 5, 6])])
    found = packed_support(mask, 2)
    assert np.frombuffer(base64.b64decode(found["data"]), np.int32).tolist() == [3, -1, -1, 4, 5, 6]
    assert packed_experts(np.array([[[255]]], np.uint16))["dtype"] == "uint8"
    assert packed_experts(np.array([[[256]]], np.uint16))["dtype"] == "int16"


def test_a_chat_completion_has_them():
    experts = np.arange(12, dtype=np.uint16).reshape(2, 2, 3)
    output = CompletionOutput(0, "", [5], finish_reason="stop", routed_experts=experts)
    tokenizer: Any = None
    writer = ChatChoiceWriter(
        tokenizer, "assistant", "", None, as_token_ids=False, with_token_ids=False, with_versions=False
    )
    np.testing.assert_array_equal(decoded(writer.whole(output, [])["routed_experts"]), experts)
