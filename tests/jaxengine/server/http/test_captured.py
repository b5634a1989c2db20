"""Activations over HTTP: those that the engine gives in Python, whole and in pieces; no more than the server allows."""

from __future__ import annotations

import base64
import re
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from jaxengine import AsyncLLM
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import post
from tests.tables import each_row

IDS, MESSAGES = [5, 6, 7, 8, 9, 10], [{"role": "user", "content": "Hi"}]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 4, "ignore_eos": True, "seed": 4}
ASKED: dict[str, Any] = {"capture": ["residual:*", "mlp_output:1"], "return_hidden_states": True}
# Rows of three residual streams, an output and two hidden states, of 32 float32 numbers each.
ROW_BYTES = 6 * 32 * 4


@pytest.fixture(scope="module")
def engine(chat_options):
    sizes = {"compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []}}
    own = {"capture": ["residual:*", "mlp_output:1"], "capture_layers": [0, -1], "max_num_batched_tokens": 32}
    engine = AsyncLLM(**chat_options | sizes | own)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def app(engine):
    return create_app(engine, ServerConfig())


def read(choice: dict[str, Any]) -> dict[str, np.ndarray]:
    return load(base64.b64decode(choice["captured"]))


async def expected(engine: AsyncLLM, **more: Any) -> list[dict[str, np.ndarray]]:
    params = SamplingParams(**SAMPLED, **ASKED, **more, output_kind=RequestOutputKind.FINAL_ONLY)
    async for output in engine.generate({"prompt_token_ids": IDS}, params, f"expected {more}"):
        last = output
    return [{**(each.captured or {}), "hidden_states": np.asarray(each.hidden_states)} for each in last.outputs]


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys() and len(wanted) == 5
    for name, own in wanted.items():
        assert found[name].dtype == np.float32 and own.shape[0] == len(IDS) + SAMPLED["max_tokens"] - 1
        np.testing.assert_array_equal(found[name], own, name)


async def test_completions(app, engine):
    answer = await post(app, "/v1/completions", prompt=IDS, n=2, **SAMPLED, **ASKED)
    assert answer.status == 200, answer.body
    for choice, own in zip(answer.json["choices"], await expected(engine, n=2), strict=True):
        assert_same(read(choice), own)
    pieces = await post(app, "/v1/completions", prompt=IDS, stream=True, **SAMPLED, **ASKED)
    parts = [read(choice) for each in pieces.events for choice in each["choices"] if "captured" in choice]
    (own,) = await expected(engine)
    assert len(parts) > 1
    assert_same({name: np.concatenate([part[name] for part in parts]) for name in own}, own)
    plain = await post(app, "/v1/completions", prompt=IDS, **SAMPLED)
    assert "captured" not in plain.json["choices"][0]


async def test_chat_completions(app):
    given = {"messages": MESSAGES, **SAMPLED, "capture": ["residual:1"]}
    answer = await post(app, "/v1/chat/completions", **given)
    assert answer.status == 200, answer.body
    found = read(answer.json["choices"][0])["residual:1"]
    assert found.shape == (answer.json["usage"]["total_tokens"] - 1, 32)
    pieces = await post(app, "/v1/chat/completions", **given, stream=True)
    parts = [read(choice) for each in pieces.events for choice in each["choices"] if "captured" in choice]
    np.testing.assert_array_equal(np.concatenate([part["residual:1"] for part in parts]), found)


@each_row(
    ("path", "changes", "param", "said"),
    [
        ("completions", {"prompt": [IDS, IDS]}, "capture", f"up to 20 rows of {ROW_BYTES} bytes; .*max_captured_bytes"),
        ("completions", {"n": 2}, "capture", "up to 20 rows"),
        ("completions", {"max_tokens": 14}, "capture", "up to 20 rows"),
        ("completions", {"capture": None, "max_tokens": 40}, "return_hidden_states", "up to 46 rows of 256 bytes"),
        ("completions", {"capture": ["attention_output:0"]}, "capture", "started with residual:0-2, mlp_output:1"),
        ("completions", {"capture": ["residual"]}, "capture", "must be None or a list of names"),
        ("completions", {"capture": "residual:0"}, "capture", "list"),
        ("completions", {"use_beam_search": True}, "capture|return_hidden_states", "use_beam_search"),
        ("chat/completions", {}, "capture", "max_captured_bytes"),
    ],
)
async def test_what_is_refused(engine, path, changes, param, said):
    app = create_app(engine, ServerConfig(max_captured_bytes=10 * ROW_BYTES))
    given = {"messages": MESSAGES} if path.startswith("chat") else {"prompt": IDS}
    answer = await post(app, f"/v1/{path}", **given | SAMPLED | ASKED | changes)
    assert answer.status == 400 and answer.error["param"] in param.split("|"), answer.body
    assert re.search(said, answer.error["message"]), answer.error


async def test_conversations_of_a_batch_share_what_is_allowed(engine):
    given = {**SAMPLED, "capture": ["residual:1"]}
    alone = await post(create_app(engine, ServerConfig()), "/v1/chat/completions", messages=MESSAGES, **given)
    rows = alone.json["usage"]["prompt_tokens"] + SAMPLED["max_tokens"]
    app = create_app(engine, ServerConfig(max_captured_bytes=rows * 32 * 4))
    answer = await post(app, "/v1/chat/completions/batch", messages=[MESSAGES], **given)
    assert answer.status == 200 and read(answer.json["choices"][0])
    answer = await post(app, "/v1/chat/completions/batch", messages=[MESSAGES] * 2, **given)
    assert answer.status == 400 and answer.error["param"] == "capture"
    assert f"up to {2 * rows} rows of 128 bytes" in answer.error["message"]


async def test_what_fits_is_answered(engine):
    app = create_app(engine, ServerConfig(max_captured_bytes=10 * ROW_BYTES))
    assert (await post(app, "/v1/completions", prompt=IDS, **SAMPLED, **ASKED)).status == 200


async def test_an_engine_without_the_options_says_so(chat_engine):
    app = create_app(chat_engine, ServerConfig())
    for field, option in (("capture", "capture"), ("return_hidden_states", "capture_layers")):
        answer = await post(app, "/v1/completions", prompt=IDS, **SAMPLED, **{field: ASKED[field]})
        assert answer.status == 400 and answer.error["param"] == field
        assert f"without {option}" in answer.error["message"]
