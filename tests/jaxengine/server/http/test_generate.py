"""/inference/v1/generate, and the requests that trainers send to it and to the routes around it, as they send them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http import generate
from jaxengine.server.http.app import create_app
from jaxengine.server.http.generate import GenerateSampling
from tests.jaxengine.server.asgi_client import http_client, post
from tests.tables import each_row

PATH = "/inference/v1/generate"
RECORDED = Path(__file__).parents[3] / "fixtures" / "client_requests"
IDS = [5, 6, 7, 8, 9, 10]
SAMPLED = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, "seed": 4}


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig())


def body(**sampling: Any) -> dict[str, Any]:
    return {"token_ids": IDS, "sampling_params": SAMPLED | sampling}


async def test_tokens_go_in_and_come_out(app, chat_engine):
    answer = await post(app, PATH, **body(logprobs=2, prompt_logprobs=1, n=2), request_id="mine", return_token_ids=True)
    assert answer.status == 200, answer.body
    found = answer.json
    assert (found["request_id"], found["output_mode"], found["prompt_token_ids"]) == (
        "generate-tokens-mine",
        "tokens",
        IDS,
    )
    assert found["usage"]["prompt_tokens"] == 6 and found["usage"]["completion_tokens"] == 12
    assert len(found["prompt_logprobs"]) == 6 and found["prompt_logprobs"][0] is None
    params = SamplingParams(**SAMPLED, n=2, logprobs=2, output_kind=RequestOutputKind.FINAL_ONLY)
    async for output in chat_engine.generate({"prompt_token_ids": IDS}, params, "other"):
        expected = output
    for choice, other in zip(found["choices"], expected.outputs, strict=True):
        assert choice["index"] == other.index and choice["token_ids"] == other.token_ids
        assert choice["finish_reason"] == "length" and choice["stop_reason"] is None
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 6}]
        for token, position, entry in zip(other.token_ids, other.logprobs, choice["logprobs"]["content"], strict=True):
            first, *rest = entry["top_logprobs"]
            assert {**first, "top_logprobs": [first, *rest]} == entry and entry["token_id"] == token
            assert entry["token"] == f"token_id:{token}" and entry["bytes"] is None
            assert {each["token_id"]: (each["logprob"], each["rank"]) for each in (first, *rest)} == {
                key: (each.logprob, each.rank) for key, each in position.items()
            }
            assert [each["rank"] for each in rest] == sorted(each["rank"] for each in rest)


async def test_pieces_of_a_stream_are_the_whole(app):
    whole = (await post(app, PATH, **body(logprobs=0), return_token_ids=True)).json["choices"][0]
    more = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    first, *events, last = (await post(app, PATH, **body(logprobs=0), **more)).events
    assert first["prompt_token_ids"] == IDS and not any("prompt_token_ids" in each for each in events)
    choices = [each["choices"][0] for each in (first, *events)]
    assert [token for each in choices for token in each["token_ids"]] == whole["token_ids"]
    assert [entry for each in choices for entry in each["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert [each["finish_reason"] for each in choices] == [None] * (len(choices) - 1) + ["length"]
    assert choices[-1]["weight_versions"] == whole["weight_versions"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6


async def test_defaults_are_those_of_sampling_params(app, monkeypatch, chat_engine):
    """Not the model's suggestions, which a trainer knows nothing of; but for max_tokens, as in vLLM."""
    monkeypatch.setattr(chat_engine.inputs, "generation_defaults", {"temperature": 0.0, "max_tokens": 3})
    given = {"token_ids": IDS, "sampling_params": {"seed": 4, "ignore_eos": True}}
    tokens = [(await post(app, PATH, **given)).json["choices"][0]["token_ids"] for _ in range(2)]
    drawn = (await post(app, PATH, **body(max_tokens=3))).json["choices"][0]["token_ids"]
    assert tokens == [drawn, drawn]


async def test_what_sampling_made_of_each_token_is_asked_of_the_engine(app):
    answer = await post(app, PATH, **body(return_sampling_mass=True, top_k=3))
    problem = "return_sampling_mass: the engine was started without enable_sampling_mass"
    assert answer.status == 400 and answer.error["message"] == problem, answer.body


async def test_stop_strings_are_looked_for(app):
    text = (await post(app, "/v1/completions", prompt=IDS, **SAMPLED)).json["choices"][0]["text"]
    found = (await post(app, PATH, **body(stop=[text[3:6]]))).json["choices"][0]
    assert found["finish_reason"] == "stop" and found["stop_reason"] == text[3:6] and len(found["token_ids"]) < 6


def test_whoever_reads_the_engines_outputs_closes_them():
    """A request is aborted as its stream is closed; without that, when it is garbage-collected."""
    direct = re.compile(r"async for .* in .*engine\.(stream|pool)\(")
    files = Path(generate.__file__).parents[1].rglob("*.py")
    assert not [str(file) for file in files if direct.search(file.read_text())]


def test_every_field_of_sampling_params_is_known():
    ours = {"stop_after", "thinking_words", "return_hidden_states", "capture", "steer"}  # not vLLM's
    assert {*SamplingParams.__dataclass_fields__} - ours == GenerateSampling.known_fields() - {"watermarking"}


async def test_what_vllms_render_server_answers_is_taken(app):
    rendered = {"temperature": 1.0, "stop": ["abc"], "stop_token_ids": [], "bad_words": [], "max_tokens": 6}
    rendered |= {"output_kind": 2, "skip_clone": True, "output_text_buffer_length": 2, "watermarking": False}
    structured = {"json": None, "regex": "[ab]{3}", "choice": None, "grammar": None, "json_object": None}
    structured |= {"disable_any_whitespace": False, "disable_additional_properties": False, "whitespace_pattern": None}
    structured |= {"structural_tag": None, "_backend": None, "_backend_was_auto": False}
    unset = ("token_offsets", "features", "content_parts", "reasoning_ended", "reasoning_parser_kwargs")
    unset += ("return_token_ids", "parse_context", "stream_options", "cache_salt", "kv_transfer_params")
    given = {**dict.fromkeys((*unset, "ec_transfer_params")), "output_mode": "tokens", "stream": False, "priority": 0}
    for more in ({}, {"structured_outputs": structured}):
        answer = await post(app, PATH, token_ids=IDS, sampling_params={**rendered, **more}, **given)
        assert answer.status == 200 and answer.json["choices"][0]["token_ids"], answer.body
    scored = {"max_tokens": 1, "prompt_logprobs": 0, "prompt_logprob_start": 1}
    (first, second, *rest) = (await post(app, PATH, token_ids=IDS, sampling_params=scored)).json["prompt_logprobs"]
    assert first is second is None and rest and None not in rest


@each_row(
    ("changes", "param"),
    [
        ({"token_ids": "Hi"}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [[5]]}, "token_ids"),
        ({"token_ids": [5, -1]}, "token_ids"),
        ({"token_ids": [5, True]}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": [5] * 5000}, "token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"temperature": "1"}}, "sampling_params"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"warmth": 1}}, "sampling_params"),
        ({"sampling_params": {"n": 10**4}}, "n"),
        ({"sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias"),
        ({"sampling_params": {"extra_args": {"x": 1}}}, "extra_args"),
        ({"sampling_params": {"trace_decode_token_ids": [1]}}, "trace_decode_token_ids"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params.prompt_logprobs"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"output_mode": "text"}, "output_mode"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"do_remote_prefill": 1}}, "kv_transfer_params.do_remote_prefill"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params"),
        ({"sampling_params": {"extra_args": {"kv_transfer_params": {}}}}, "sampling_params"),
        ({"sampling_params": {"extra_args": {"alignment": [0, 1]}}}, "sampling_params"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name(changes, param, app):
    for more in ({}, {"stream": True}):
        answer = await post(app, PATH, **body() | more | changes)
        assert answer.status == 400 and answer.error["param"] == param, answer.body


@each_row("trainer", ["skyrl", "verl", "trl", "areal", "prime_rl", "slime"])
async def test_what_clients_of_trainers_send(trainer, chat_engine, tmp_path):
    """As recorded, in their order: rollouts, and what they do around an update of the weights."""
    keys = tmp_path / "keys"
    keys.write_text("root\n")
    options = {"enable_admin": True, "admin_key_file": str(keys), "served_model_name": "org/policy"}
    app = create_app(chat_engine, ServerConfig(**options))
    async with http_client(app, "root") as client:
        for case in json.loads((RECORDED / f"{trainer}.json").read_text()):
            headers = {name: value for name, value in case["headers"].items() if name != "Authorization"}
            answer = await client.request(case["method"], case["path"], json=case["body"], headers=headers)
            assert answer.status_code == case["status"], (case, answer.text)
            if answer.status_code == 404:  # what serves instead, or the option that adds the route
                assert "instead: " in answer.text or "only served with" in answer.text, (case, answer.text)
            if answer.status_code == 200:
                assert "x-unknown-fields" not in answer.headers, (case, answer.headers)
            if answer.status_code == 200 and answer.content and isinstance(answer.json(), dict):
                for choice in answer.json().get("choices", ()):
                    if (logprobs := choice["logprobs"]) is not None:
                        found = logprobs.get("content") or logprobs["token_logprobs"]
                        names = logprobs.get("tokens") or [each["token"] for each in found]
                        named = case["body"].get("return_tokens_as_token_ids")
                        tokens = [int(name.removeprefix("token_id:")) for name in names] if named else names
                        assert (
                            0
                            < len(choice["token_ids"] or tokens)
                            == len(found)
                            <= 4 + len(names) * ("echo" in case["body"])
                        )


@each_row(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "Hi", "vllm_xargs": {"x": 1}}, "vllm_xargs"),
        (
            "/v1/completions",
            {
                "prompt": "Hi",
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}},
            },
            "response_format",
        ),
        ("/v1/completions", {"prompt": "Hi", "structured_outputs": {"regex": "("}}, "structured_outputs"),
        ("/update_weights", {"path": "/none", "weight_version": 2**70}, "weight_version"),
    ],
)
async def test_an_error_names_the_field_as_it_was_given(path, body, param, chat_engine, tmp_path):
    (tmp_path / "keys").write_text("root\n")
    app = create_app(chat_engine, ServerConfig(enable_admin=True, admin_key_file=str(tmp_path / "keys")))
    async with http_client(app, "root") as client:
        answer = await client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and error["message"].startswith(param), answer.text


async def test_what_is_rendered_generates_the_same(app, chat_engine):
    """A conversation and prompts, by way of their tokens, give what they give directly."""
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "response_format": {"type": "json_object"},
        "logit_bias": {"5": -3},
        **SAMPLED,
    }
    chat |= {"ignore_eos": False, "return_token_ids": True, "request_id": "a"}
    rendered = (await post(app, "/v1/chat/completions/render", **chat)).json
    answer = (await post(app, "/v1/chat/completions", **chat)).json
    assert rendered["request_id"] == "chatcmpl-a" and rendered["token_ids"] == answer["prompt_token_ids"]
    assert rendered["priority"] == 0  # vLLM's generate takes no null
    assert rendered["sampling_params"] == {
        "seed": 4,
        "max_tokens": 6,
        "logit_bias": {"5": -3.0},
        "structured_outputs": {"json_object": True},
    }
    (choice,) = (await post(app, PATH, **rendered)).json["choices"]
    assert choice["token_ids"] == answer["choices"][0]["token_ids"]
    # The same conversation in the other APIs' forms, with their names of fields.
    plain = {"messages": chat["messages"], "max_tokens": 6, "request_id": "a"}
    message = (await post(app, "/v1/messages/render", **plain, stream=True, stop_sequences=["x"])).json
    response = (await post(app, "/v1/responses/render", input="Hi", max_output_tokens=6, cache_salt="s")).json
    assert message["token_ids"] == response["token_ids"] == rendered["token_ids"]
    assert (message["request_id"], message["stream"], response["cache_salt"]) == ("msg-a", True, "s")
    assert message["sampling_params"] == {"stop": ["x"], "max_tokens": 6}
    assert response["sampling_params"] == {"max_tokens": 6} and response["request_id"].startswith("resp_")
    earlier = await post(app, "/v1/responses/render", input="Hi", previous_response_id="resp_1")
    assert (earlier.status, earlier.json["error"]["param"]) == (400, "previous_response_id")
    prompts = {"prompt": [[5], [5, 6]], "min_p": 0.5, "stop": "x", "stream": True, "priority": 0, "cache_salt": "s"}
    first, second = (await post(app, "/v1/completions/render", **prompts)).json
    assert second["token_ids"] == [5, 6] and second["request_id"] == first["request_id"][:-1] + "1"
    assert second["sampling_params"] == {"min_p": 0.5, "stop": ["x"], "max_tokens": 16}
    assert (second["stream"], second["cache_salt"], second["priority"]) == (True, "s", 0)
    for path, name, fields in (
        ("chat/completions", "use_beam_search", {"messages": chat["messages"], "n": 2}),
        ("completions", "echo", {"prompt": "Hi"}),
    ):
        refused = await post(app, f"/v1/{path}/render", **fields, **{name: True})
        assert (refused.status, refused.json["error"]["param"]) == (400, name)
    long = await post(app, "/v1/completions/render", prompt="word " * 300)
    assert (long.status, long.json["error"]["param"]) == (400, "prompt")
    texts = {"prompt": ["Hi there", "ü 😀"], "return_token_offsets": True}
    for each, text in zip((await post(app, "/v1/completions/render", **texts)).json, texts["prompt"], strict=True):
        pieces = [text[start:end] for start, end in each["token_offsets"]]
        assert len(pieces) == len(each["token_ids"]) and pieces[-1] and text.endswith(pieces[-1])
        assert (await post(app, PATH, **each)).status == 200
    short = await post(app, "/v1/completions/render", **texts, truncate_prompt_tokens=1)
    assert [each["token_offsets"][0][1] for each in short.json] == [len(text) for text in texts["prompt"]]
    placed = (await post(app, "/v1/chat/completions/render", **chat, return_token_offsets=True)).json
    assert len(placed["token_offsets"]) == len(placed["token_ids"]) > 3
    given = {"prompt": [5, 6], "return_token_offsets": True}
    assert (await post(app, "/v1/completions/render", **given)).json[0]["token_offsets"] is None
    assert (await post(app, "/v1/completions", **given)).error["param"] == "return_token_offsets"
    # A field that each prompt's entry repeats cannot multiply the size of a request.
    small, salted = create_app(chat_engine, ServerConfig(max_request_bytes=1024)), {"cache_salt": "s" * 200}
    refused = await post(small, "/v1/completions/render", prompt=[[5]] * 8, **salted)
    assert (refused.status, refused.json["error"]["param"]) == (400, "prompt"), refused.body
    assert (await post(small, "/v1/completions/render", prompt=[5] * 8, **salted)).status == 200
