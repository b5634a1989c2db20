"""Prompts of embeddings over HTTP and gRPC: files, beside prompts of tokens, with the tokens that their ids give."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file, save

from jaxengine import AsyncLLM
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import post
from tests.jaxengine.server.grpc.grpc_rig import connected, refusal
from tests.tables import each_row

IDS = [5, 6, 7, 8, 9, 10, 11]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def engine(tiny_options):
    engine = AsyncLLM(**tiny_options | {"enable_prompt_embeds": True})
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def app(engine):
    return create_app(engine, ServerConfig(max_prompts=3))


@pytest.fixture(scope="module")
def table(tiny_model):
    return load_file(Path(tiny_model) / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)


def tokens_of(choice: dict[str, Any]) -> list[str]:
    return choice["logprobs"]["tokens"]


def as_npy(rows: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


async def test_embeddings_are_answered_as_their_tokens(app, table):
    rows, reverse = table[IDS], table[IDS[::-1]]
    wanted = [await post(app, "/v1/completions", prompt=ids, **GREEDY) for ids in (IDS, IDS[::-1])]
    texts = [tokens_of(each.json["choices"][0]) for each in wanted]
    embedded = [as_npy(rows), base64.b64encode(save({"rows": reverse})).decode()]
    answer = await post(app, "/v1/completions", prompt_embeds=embedded, prompt=IDS, **GREEDY)
    assert answer.status == 200, answer.body
    assert [tokens_of(choice) for choice in answer.json["choices"]] == [*texts, texts[0]]
    assert answer.json["usage"]["prompt_tokens"] == 3 * len(IDS)
    stream = await post(app, "/v1/completions", prompt_embeds=embedded[0], prompt="", stream=True, **GREEDY)
    pieces = [tokens_of(choice) for each in stream.events for choice in each["choices"]]
    assert [token for piece in pieces for token in piece] == texts[0]


@each_row(
    "field, changes",
    [
        ("prompt", {"prompt_embeds": None}),
        ("prompt_embeds", {"prompt_embeds": "no base64!"}),
        ("prompt_embeds", {"prompt_embeds": as_npy(np.zeros((3, 5), np.float32))}),
        ("prompt_embeds", {"prompt_embeds": as_npy(np.zeros((0, 64), np.float32))}),
        ("prompt_embeds", {"prompt_embeds": as_npy(np.full((2, 64), np.nan, np.float32))}),
        ("prompt_embeds", {"prompt_embeds": as_npy(np.zeros((10_000, 64), np.float32))}),
        ("prompt_embeds", {"prompt_embeds": ["AAAA"] * 4}),
        ("prompt", {"prompt": [[5], [6], [7]]}),
        ("echo", {"echo": True}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 2}),
        ("use_beam_search", {"use_beam_search": True}),
        ("return_token_ids", {"return_token_ids": True}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("repetition_penalty", {"repetition_penalty": 1.5}),
    ],
)
async def test_what_embeddings_refuse(app, field, changes):
    body = {"prompt_embeds": as_npy(np.zeros((2, 64), np.float32)), "max_tokens": 2} | changes
    answer = await post(app, "/v1/completions", **body)
    assert answer.status == 400 and answer.json["error"]["param"] == field, (changes, answer.body)


async def test_embeddings_over_grpc(engine, table):
    file = io.BytesIO()
    np.save(file, table[IDS])
    chosen = {"temperature": 0, "stopping": {"max_new_tokens": 5, "ignore_eos": True}}
    wants = {"output_token_ids": True, "output_text": False}
    async with connected(engine) as (_, stub):
        by_ids = await stub.Generate(pb.GenerateRequest(token_ids={"ids": IDS}, response=wants, **chosen))
        for data in (file.getvalue(), save({"rows": table[IDS]})):
            answer = await stub.Generate(pb.GenerateRequest(prompt_embeds=data, response=wants, **chosen))
            assert answer.outputs[0].token_ids == by_ids.outputs[0].token_ids
            assert answer.usage.num_prompt_tokens == len(IDS)
        wide = save({"rows": np.zeros((3, 5), np.float32)})
        for field, changes in (
            ("prompt_embeds", {"prompt_embeds": b""}),
            ("prompt_embeds", {"prompt_embeds": b"PK\3\4" + bytes(100)}),
            ("prompt_embeds", {"prompt_embeds": wide}),
            ("truncate_prompt_tokens", {"truncate_prompt_tokens": 2}),
            ("response.prompt_token_ids", {"response": {"prompt_token_ids": True}}),
            ("response.prompt_candidates", {"response": {"prompt_logprobs": True}}),
            ("decoding.repetition_penalty", {"decoding": {"repetition_penalty": 1.5}}),
        ):
            request = pb.GenerateRequest(**{"prompt_embeds": file.getvalue(), **chosen, **changes})
            code, details, fields = await refusal(stub.Generate(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and fields == [field], (field, details, fields)
