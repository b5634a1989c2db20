"""Routed experts over HTTP: an .npy file in base64, as vLLM writes it, and on its way between processes."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from jaxengine import AsyncLLM, SamplingParams
from jaxengine.engine.output import EngineOutput
from jaxengine.requests.outputs import CompletionOutput
from jaxengine.requests.sampling_params import RequestOutputKind
from jaxengine.scheduler.request import FinishReason, Request
from jaxengine.scheduler.token_params import TokenParams
from jaxengine.server.http.app import create_app
from jaxengine.server.http.chat.output import ChatChoiceWriter
from jaxengine.server.link import messages
from jaxengine.server.options import ServerConfig
from tests.fixtures.drawn_weights import checkpoint
from tests.jaxengine.engine.test_routed_experts import OPTIONS
from tests.jaxengine.server.asgi_client import post

IDS = [5, 6, 7, 8, 9, 10]
SAMPLED = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, "seed": 4}


@pytest.fixture(scope="module")
def engine(executables_dir):
    made = AsyncLLM(**OPTIONS | {"model": str(checkpoint("qwen3_moe")), "compile_cache_dir": executables_dir})
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


def test_a_chat_completion_has_them():
    experts = np.arange(12, dtype=np.uint16).reshape(2, 2, 3)
    output = CompletionOutput(0, "", [5], finish_reason="stop", routed_experts=experts)
    tokenizer: Any = None
    writer = ChatChoiceWriter(
        tokenizer, "assistant", "", None, as_token_ids=False, with_token_ids=False, with_versions=False
    )
    np.testing.assert_array_equal(decoded(writer.whole(output, [])["routed_experts"]), experts)


def test_they_reach_the_process_that_speaks_with_the_client():
    """Those of a request that its text may end come with its tokens, all others with the end."""
    mine = [Request(str(handle), np.arange(3, dtype=np.int32), TokenParams(), 9, tag=handle) for handle in (0, 1)]
    theirs = {handle: Request(str(handle), np.arange(3, dtype=np.int32), TokenParams(), 9) for handle in (0, 1)}
    rows = np.arange(48, dtype=np.uint16).reshape(8, 2, 3)

    def step(output: EngineOutput) -> None:
        for update in messages.updates_of(output, [0]).values():
            read: Any = messages.decode_from_engine(messages.encode(update))
            messages.output_of(read, theirs.__getitem__)

    for request in mine:
        request.found = {"routed_experts": [rows[:3], rows[3:4]]}
    step(EngineOutput(found=[mine[0]]))
    assert not mine[0].found and mine[1].found and not theirs[1].found
    np.testing.assert_array_equal(np.concatenate(theirs[0].found["routed_experts"]), rows[:4])
    for request in mine:
        request.found.setdefault("routed_experts", []).append(rows[4:])
        request.finish_reason = FinishReason.LENGTH
    step(EngineOutput(found=[mine[0]], finished=mine))
    for request in theirs.values():
        np.testing.assert_array_equal(np.concatenate(request.found["routed_experts"]), rows)
