"""/v1/completions and the routes around it, over a real engine: what is answered, in one piece and as a stream."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request

from jaxengine.api.engine_client import EngineDeadError, EngineDrainingError
from jaxengine.requests.output.outputs import SAMPLING_FIELDS, CompletionOutput, WeightSpan
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import RequestTimes
from jaxengine.server.http.answer.sse import DONE, stream_events
from jaxengine.server.http.app import create_app
from jaxengine.server.http.completions.endpoint import _without_output
from jaxengine.server.http.request.json_logprobs import json_position
from jaxengine.server.processes.sockets import cut_unread, listen
from tests.jaxengine.server.asgi_client import Connection, Recorder, http_client, idle, post
from tests.jaxengine.server.scripted_engine import ScriptedEngine

PATH = "/v1/completions"
IDS = [504, 3575, 282, 260]
SCORED = {"prompt_logprobs": 1, "max_tokens": 1}


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(served_model_name=("tiny", "alias")))


@pytest.fixture
def recorder(chat_engine):
    return Recorder(chat_engine)


async def test_an_answer_is_what_the_engine_says(app, chat_engine):
    params = SamplingParams(seed=7, max_tokens=6, ignore_eos=True)
    (expected,) = [output async for output in chat_engine.generate({"prompt": "Once upon"}, params)][-1:]
    found = await post(app, PATH, model="alias", prompt="Once upon", seed=7, max_tokens=6, ignore_eos=True)
    assert found.status == 200
    answer = found.json
    (choice,) = answer.pop("choices")
    assert choice == {
        "index": 0,
        "text": expected.outputs[0].text,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": None,
        "routed_experts": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    assert answer["object"] == "text_completion" and answer["model"] == "alias"
    assert answer["id"] == f"cmpl-{found.headers['x-request-id']}"
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


async def test_an_echo_of_ids_has_the_text_that_its_offsets_count(app):
    found = await post(app, PATH, prompt=[1, *IDS], echo=True, logprobs=1, max_tokens=0)
    (choice,) = found.json["choices"]
    tokens = choice["logprobs"]["tokens"]
    assert tokens[0] == "<|im_start|>" and choice["text"] == "".join(tokens)
    assert choice["logprobs"]["text_offset"] == [len("".join(tokens[:count])) for count in range(len(tokens))]


def test_nothing_is_said_of_a_token_that_is_left_out():
    said: Any = dict.fromkeys(SAMPLING_FIELDS, np.array([-1.0], np.float32))
    output = CompletionOutput(
        0, "a", [5], logprobs=[{}], finish_reason="stop", weight_versions=[WeightSpan(2, 0, 1)], **said
    )
    found = _without_output(output)
    assert (found.text, found.token_ids, found.logprobs, found.finish_reason) == ("", [], [], "length")
    assert [len(getattr(found, name)) for name in SAMPLING_FIELDS] == [0, 0, 0]
    assert found.weight_versions == [(2, 0, 0)]
    plain = _without_output(CompletionOutput(0, "a", [5], finish_reason="abort"))
    assert plain == CompletionOutput(0, "", [], finish_reason="abort")


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"logprobs": 1, "echo": True}, {"return_token_ids": True}])
async def test_a_stream_joined_is_the_whole_answer(app, extra):
    fields = {"prompt": [[1, 2, 3], IDS], "seed": 3, "max_tokens": 9, "n": 2, **extra}
    whole = (await post(app, PATH, **fields)).json
    events = (await post(app, PATH, **fields, stream=True, stream_options={"include_usage": True})).events
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    *chunks, last = events
    assert last["choices"] == [] and all("usage" not in chunk for chunk in chunks)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    for expected in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [expected["finish_reason"]]
        if "logprobs" in extra:
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                joined = sum((part["logprobs"][name] for part in parts), [])
                if name == "token_logprobs":
                    assert joined == pytest.approx(expected["logprobs"][name], abs=1e-4)
                elif name != "top_logprobs":
                    assert joined == expected["logprobs"][name]
                assert len(joined) == len(expected["logprobs"][name])
        if "return_token_ids" in extra:
            assert sum((part["token_ids"] for part in parts), []) == expected["token_ids"]
            assert parts[0]["prompt_token_ids"] == expected["prompt_token_ids"]
            assert all(part["prompt_token_ids"] is None for part in parts[1:])


async def test_times_of_a_request_in_its_answer(chat_engine):
    """The times are those of requests with one output, as with vLLM's option, and agree with the engine's."""
    app = create_app(chat_engine, ServerConfig(enable_per_request_metrics=True))
    messages = [{"role": "user", "content": "Hi"}]
    for path, ask in ((PATH, {"prompt": IDS}), ("/v1/chat/completions", {"messages": messages})):
        fields = {**ask, "max_tokens": 4, "ignore_eos": True}
        whole = (await post(app, path, **fields)).json["metrics"]
        assert list(whole) == [*RequestTimes.model_fields] and min(whole.values()) >= 0
        assert whole["mean_itl_ms"] * 3 == pytest.approx(whole["generation_time_ms"])
        seconds = (whole["time_to_first_token_ms"] + whole["generation_time_ms"]) / 1000
        assert whole["tokens_per_second"] * seconds == pytest.approx(4)
        one = {**fields, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = (await post(app, path, **one)).events
        assert not any("metrics" in chunk for chunk in chunks)
        assert set(last["metrics"]) == {*RequestTimes.model_fields} - {"mean_itl_ms"}
        for more in ({"n": 2}, *([{"prompt": [IDS, IDS]}] if path == PATH else [])):
            assert (await post(app, path, **{**fields, **more})).json["metrics"] is None
            assert "metrics" not in (await post(app, path, **{**one, **more})).events[-1]


async def test_prompts_are_scored_as_evaluations_ask_for_it(app):
    """What lm_eval's local-completions sends and reads."""
    prompts = [[504, 3575, 282, 260, 1066], [1, 9690, 198]]
    fields = {"temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    answer = (await post(app, PATH, prompt=prompts, max_tokens=1, **fields)).json
    alone = (await post(app, PATH, prompt=prompts[0], max_tokens=0, **fields)).json
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert all(len(values) == len(prompt) + 1 for values in logprobs.values())
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert value <= max(top.values()) <= 0
        # The sampled token is greedy: the best of its position.
        assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
    # Scoring alone has the prompt's part, and no token of its own.
    (choice,) = alone["choices"]
    first = answer["choices"][0]["logprobs"]
    assert choice["logprobs"]["tokens"] == first["tokens"][:-1]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(first["token_logprobs"][1:-1], abs=1e-4)
    assert alone["usage"]["completion_tokens"] == 0 and choice["finish_reason"] == "length"
    refused = await post(app, PATH, prompt=prompts[0], max_tokens=0, logprob_token_ids=[5], **fields)
    assert (refused.status, refused.json["error"]["param"]) == (400, "logprob_token_ids")


async def test_the_engines_load_in_a_header(app):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    async with http_client(app) as client:
        for path, fields in ((PATH, {"prompt": [5, 6], "max_tokens": 1}), ("/v1/chat/completions", chat)):
            found = []
            for form in ("", "other", "text", "JSON"):
                answer = await client.post(path, json=fields, headers={"endpoint-load-metrics-format": form})
                found.append(answer.headers.get("endpoint-load-metrics"))
            assert found[:2] == [None, None]
            kind, usage, waiting = found[2].split(" ", 2)
            assert (kind, waiting) == ("TEXT", "named_metrics.num_requests_waiting=0.0")
            assert 0 <= float(usage.removeprefix("named_metrics.kv_cache_usage_perc=").rstrip(",")) < 1
            kind, _, load = found[3].partition(" ")
            names = {"kv_cache_usage_perc", "num_requests_waiting"}
            assert kind == "JSON" and json.loads(load)["named_metrics"].keys() == names


async def test_prompts_of_many_kinds_keep_their_order(app):
    """More prompts than the engine has places for."""
    prompts = [f"Number {number}" for number in range(11)]
    whole = (await post(app, PATH, prompt=prompts, n=3, max_tokens=2, echo=True, temperature=0.5)).json
    assert [choice["index"] for choice in whole["choices"]] == list(range(33))
    for choice in whole["choices"]:
        assert choice["text"].startswith(prompts[choice["index"] // 3])


async def test_a_bad_prompt_among_good_ones_is_refused_before_any_runs(recorder):
    app = create_app(recorder, ServerConfig())
    for stream in (False, True):
        answer = await post(app, PATH, prompt=[IDS, [1] * 300], stream=stream)
        assert answer.error["param"] == "prompt" and answer.status == 400
    assert recorder.calls == []


async def test_known_prefixes_are_counted_and_salt_hides_them(app):
    fields = {"prompt": "The same words. " * 8, "max_tokens": 1}
    counts = [
        (await post(app, PATH, **fields, cache_salt=salt)).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("one", "one", "two")
    ]
    assert counts[0] == counts[2] == 0 and counts[1] >= 8


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_pages(app, chat_engine, stream):
    before = app.state.traffic.num_running
    # n: several sequences; the second prompt: several requests of one client.
    fields = {"prompt": [IDS, IDS + [5]], "n": 2, "max_tokens": 240, "ignore_eos": True, "stream": stream}
    connection = Connection.of_json(app, PATH, **fields)
    if stream:
        assert (await connection.chunks.get()).startswith(b"data: {")
    else:
        while not chat_engine.core.has_unfinished:
            await asyncio.sleep(0.001)
    assert app.state.traffic.num_running == before + 1
    await connection.leave()
    await idle(chat_engine)
    assert app.state.traffic.num_running == before


async def test_a_client_that_does_not_read_is_ended(chat_engine):
    app = create_app(chat_engine, ServerConfig(stream_write_timeout=0.1))
    connection = Connection.of_json(app, PATH, prompt=IDS, max_tokens=240, ignore_eos=True, stream=True)
    await connection.chunks.get()
    connection.reads.clear()
    await connection.ended()
    await idle(chat_engine)


async def test_a_silent_stream_has_comments():
    """Also before its first event, after which an exception has no status."""
    go_on, closed = asyncio.Event(), asyncio.Event()

    async def events():
        try:
            await go_on.wait()
            yield b"data: 1\n\n"
            raise OverloadedError("full")
        finally:
            closed.set()

    async def app(scope, receive, send):
        config = ServerConfig(sse_keep_alive_interval=0.01)
        await (await stream_events(Request(scope, receive), events(), config))(scope, receive, send)

    left, whole = Connection(app, PATH), Connection(app, PATH)
    for connection in (left, whole, whole):
        assert (await connection.chunks.get(), connection.status) == (b": keep-alive\n\n", 200)
    await left.leave()
    assert closed.is_set()
    go_on.set()
    await whole.ended()
    said = [each for each in (whole.chunks.get_nowait() for _ in range(whole.chunks.qsize())) if each[:1] != b":"]
    assert said[::2] == [b"data: 1\n\n", DONE] and b'"message":"full' in said[1]


async def test_a_connection_that_nobody_reads_is_cut():
    """What is left of a stream whose client does not read: a connection that cannot be closed in order."""
    listener = listen("127.0.0.1", 0)
    cut_unread(listener, 0.2)
    cut = asyncio.get_running_loop().create_future()

    async def serve(_, writer):
        writer.write(bytes(16 << 20))
        writer.close()
        try:
            await writer.wait_closed()
        except OSError as error:
            cut.set_result(error)

    async with await asyncio.start_server(serve, sock=listener):
        with socket.create_connection(listener.getsockname()):
            assert isinstance(await asyncio.wait_for(cut, 60), TimeoutError)


async def test_a_slow_reader_gets_everything_in_fewer_pieces(app, chat_engine):
    fields = {"prompt": IDS, "max_tokens": 120, "ignore_eos": True, "seed": 5}
    expected = (await post(app, PATH, **fields)).json["choices"][0]["text"]
    connection = Connection.of_json(app, PATH, **fields, stream=True)
    pieces = [await connection.chunks.get()]
    connection.reads.clear()
    await idle(chat_engine)
    connection.reads.set()
    await connection.ended()
    while not connection.chunks.empty():
        pieces.append(connection.chunks.get_nowait())
    assert pieces.pop() == b"data: [DONE]\n\n"
    texts = [json.loads(piece.removeprefix(b"data: "))["choices"][0]["text"] for piece in pieces]
    assert "".join(texts) == expected and len(texts) < 60


async def test_what_fails_before_the_first_token_has_a_status_of_its_own(recorder):
    app = create_app(recorder, ServerConfig())
    recorder.fail_after = 0
    for failure, status in (
        (OverloadedError("too many wait", retry_after=2.5), 429),
        (EngineDeadError("at 0x7f00deadbeef in /usr/lib/engine.py"), 503),
        (RuntimeError("at 0x7f00deadbeef in /usr/lib/engine.py"), 500),
    ):
        recorder.failure = failure
        for stream in (False, True):
            answer = await post(app, PATH, prompt=IDS, stream=stream)
            assert answer.status == status
            assert "0x" not in answer.error["message"] and "/usr" not in answer.error["message"]
            assert answer.headers["x-request-id"]
            if status == 429:
                assert answer.headers["retry-after"] == "3"


async def test_what_fails_later_is_an_event(recorder, chat_engine):
    app = create_app(recorder, ServerConfig())
    recorder.fail_after, recorder.failure = 2, EngineDeadError("dead")
    # So many tokens that they are not all in the first output, however busy the machine is.
    long = {"temperature": 0, "max_tokens": 240, "ignore_eos": True}
    *chunks, error = (await post(app, PATH, prompt=IDS, stream=True, **long)).events
    assert len(chunks) == 2 and error["error"]["code"] == 503 and error["error"]["type"] == "ServiceUnavailableError"
    await idle(chat_engine)


async def test_a_request_ends_when_its_time_is_over(chat_engine):
    app = create_app(chat_engine, ServerConfig(request_timeout=0.001))
    (choice,) = (await post(app, PATH, prompt=IDS, max_tokens=240, ignore_eos=True)).json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout")


async def test_models(app):
    async with http_client(app) as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["tiny", "alias"]
        assert listed["data"][0]["max_model_len"] == 256
        assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
        missing = await client.get("/v1/models/no/such")
        assert missing.status_code == 404 and missing.json()["error"]["param"] == "model"
    assert (await post(app, PATH, prompt="x", model="no/such")).error["type"] == "NotFoundError"


async def test_other_clients_do_not_wait_for_many_log_probabilities(app, monkeypatch):
    """They are written on a thread: those of a prompt of 100,000 tokens take more than a second."""
    here, threads, workers = threading.current_thread(), set(), "jaxengine.server.base.workers"
    for module in ("completions.output", "chat.output", "generate"):
        where = f"jaxengine.server.http.{module}.json_position"
        monkeypatch.setattr(where, lambda each: threads.add(threading.current_thread()) or json_position(each))
    for most, on_loop in ((1000, True), (len(IDS) - 1, False)):
        monkeypatch.setattr(f"{workers}._MANY_POSITIONS", most)
        for path, fields in (
            (PATH, {"prompt": IDS, **SCORED}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **SCORED}),
            ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": SCORED}),
        ):
            threads.clear()
            assert (await post(app, path, **fields)).status == 200 and threads
            assert (here in threads) == on_loop, path


async def test_tokens_and_back(app, chat_engine, monkeypatch):
    tokenizer = chat_engine.inputs.tokenizer
    text = "Grüße <|im_end|> 你好"
    real, threads = tokenizer.convert_ids_to_tokens, set()
    monkeypatch.setattr(
        tokenizer, "convert_ids_to_tokens", lambda ids: threads.add(threading.current_thread()) or real(ids)
    )
    answer = (await post(app, "/tokenize", prompt=text, return_token_strs=True)).json
    assert answer["tokens"] == tokenizer.encode(text) and answer["count"] == len(answer["tokens"])
    assert len(answer["token_strs"]) == answer["count"] and answer["max_model_len"] == 256
    assert threads and threading.current_thread() not in threads
    assert (await post(app, "/detokenize", tokens=answer["tokens"])).json == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    answer = (await post(app, "/tokenize", messages=messages, add_generation_prompt=False)).json
    expected = chat_engine.inputs.chat_prompt(messages, add_generation_prompt=False)
    assert answer["tokens"] == expected["prompt_token_ids"] and answer["token_strs"] is None
    for fields, param in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": messages}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"messages": messages, "chat_template": "x"}, "chat_template"),
        ({"messages": [], "chat_template_kwargs": {"tools": 1}}, "messages"),
        (
            {"messages": messages, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
    ):
        assert (await post(app, "/tokenize", **fields)).error["param"] == param
    assert (await post(app, "/detokenize", tokens=[49152])).error["param"] == "tokens"
    padded = dataclasses.replace(chat_engine.inputs.model_config, vocab_size=49280)
    monkeypatch.setattr(chat_engine.inputs, "model_config", padded)
    assert (await post(app, "/detokenize", tokens=[49279])).json == {"prompt": ""}  # it may be sampled
    assert "allowed: 0 to 49279" in (await post(app, "/detokenize", tokens=[49280])).error["message"]


async def test_a_client_may_learn_of_the_tokenizer_where_that_is_wanted(app, chat_engine):
    tokenizer = chat_engine.inputs.tokenizer
    told = create_app(chat_engine, ServerConfig(enable_tokenizer_info_endpoint=True))
    custom = create_app(
        ScriptedEngine(chat_engine, "x", chat_template="{{ messages }}"),
        ServerConfig(enable_tokenizer_info_endpoint=True),
    )
    answers = []
    for each in (app, told, custom):
        async with http_client(each) as client:
            answers.append(await client.get("/tokenizer_info"))
    assert [answer.status_code for answer in answers] == [404, 200, 200]
    about = answers[1].json()
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        assert about[f"{name}_token"] == (None if number is None else tokenizer.backend.id_to_token(number))
    assert about["chat_template"] == tokenizer.chat_template and about["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert {int(number) for number in about["added_tokens_decoder"]} == tokenizer.added_token_ids
    assert answers[2].json() == {**about, "chat_template": "{{ messages }}"}


async def test_health_follows_the_engine_and_the_drain(recorder):
    app = create_app(recorder, ServerConfig())
    async with http_client(app) as client:
        routes = [("GET", path) for path in ("/health", "/live", "/livez", "/ping")]
        for method, path in (*routes, ("POST", "/ping")):
            response = await client.request(method, path)
            assert (response.status_code, response.content) == (200, b"")
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert (await client.get("/version")).json().keys() == {"version"}
        recorder.errored, recorder.fail_after = True, 0
        for failure in (EngineDeadError("dead"), EngineDrainingError("the server is shutting down")):
            recorder.failure = failure
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/live")).status_code == 200  # nothing to kill this server for
            refused = await client.post(PATH, json={"prompt": IDS})
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert (await client.get("/v1/models")).status_code == 200
        assert refused.json()["error"]["message"] == "the server is shutting down"
        assert refused.headers["connection"] == "close"


async def test_operators_may_abort_and_forget(chat_engine, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("root\n")
    app = create_app(chat_engine, ServerConfig(enable_admin=True, admin_key_file=str(keys)))
    async with http_client(app, "root") as client:
        task = asyncio.create_task(
            client.post(PATH, json={"prompt": IDS, "max_tokens": 240, "ignore_eos": True, "request_id": "one"})
        )
        while not chat_engine.core.has_unfinished:
            await asyncio.sleep(0.001)
        answer = await client.post("/abort_requests", json={"request_ids": ["cmpl-one"]})
        assert answer.json() == {"status": "aborted", "aborted": 1}
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"
        again = await client.post("/inference/v1/abort_requests", json={"request_ids": ["cmpl-one"]})  # vLLM's path
        assert again.status_code == 200
        for path in ("/reset_prefix_cache", "/reset_mm_cache"):
            assert (await client.post(path)).json() == {"success": True}
        assert (await client.get("/server_info")).json()["mm_cache"]["kind"] == "processor"
        info = (await client.get("/server_info")).json()
        assert info["engine"]["max_model_len"] == 256
        assert info["vllm_config"]["lora_config"] is info["vllm_config"]["weight_transfer_config"] is None
        assert info["vllm_config"]["model_config"]["dtype"] == "torch.float32"
        assert (await client.get("/get_world_size?include_dp=false")).json() == {"world_size": 1}
        assert (await client.get("/server_info?config_format=text")).json()["error"]["code"] == 400
        assert {row["format"] for row in info["weights"]} == {"as it is"} and info["weights"][0]["bytes"] > 0
