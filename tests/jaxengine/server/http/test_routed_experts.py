"""Routed experts over HTTP: an .npy file in base64, as vLLM writes it, and on its way between processes."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

from jaxengine import AsyncLLM, SamplingParams
from jaxengine.requests.output.outputs import CompletionOutput
from jaxengine.requests.params.sampling_params import RequestOutputKind
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.http.chat.output import ChatChoiceWriter
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
