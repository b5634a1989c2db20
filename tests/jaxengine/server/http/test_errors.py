"""What a request must not do: reach a route without a key, take memory or time, or have the server fail."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import tracemalloc
from collections import defaultdict
from pathlib import Path

import pytest
import schemathesis
from fastapi import APIRouter
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from starlette.routing import Route

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import ROUTERS, create_app
from jaxengine.server.http.request.arrival import LimitsMiddleware
from jaxengine.server.http.request.auth import OPEN_PATHS
from jaxengine.server.http.request.limits import read_json
from jaxengine.server.http.request.not_built import NOT_BUILT, SWITCHED_OFF
from jaxengine.server.http.tokenize import DetokenizeRequest
from jaxengine.server.observe.scrub import scrub
from tests.jaxengine.server.asgi_client import Answer, Connection, http_client, idle, post
from tests.tables import each_row

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(request_timeout=2.0))


@pytest.fixture
def locked_config(tmp_path):
    """Two keys of clients and one of operators."""
    keys = tmp_path / "admin"
    keys.write_text("root\n")
    options = {"api_key": ("first", "second"), "enable_admin": True, "admin_key_file": str(keys)}
    options |= {"enable_batch_api": True, "batch_storage_dir": str(tmp_path / "batches")}
    return ServerConfig(**options, root_path="/proxy", enable_tokenizer_info_endpoint=True)


@pytest.fixture
def locked(chat_engine, locked_config):
    return create_app(chat_engine, locked_config)


async def send(app, body: bytes, path: str = PATH, **headers: str) -> Answer:
    async with http_client(app) as client:
        return Answer(await client.post(path, content=body, headers={"Content-Type": "application/json", **headers}))


def routes_of(app, engine, config):
    """(method, path) of every route, those of the framework included."""
    routes = [route for router in ROUTERS for route in router(engine, config).routes]
    assert len(routes) > 15 and all(isinstance(route, Route) for route in routes)
    routes += [route for route in app.routes if isinstance(route, Route)]
    return {(method, re.sub(r"{[^}]*}", "x", route.path)) for route in routes for method in route.methods}


async def test_no_route_answers_without_a_key(locked, locked_config, chat_engine):
    routes = routes_of(locked, chat_engine, locked_config)
    assert {("POST", PATH), ("GET", "/openapi.json"), ("POST", "/abort_requests"), ("GET", "/v1/models/x")} < routes
    assert ("GET", "/tokenizer_info") in routes
    async with http_client(locked) as client:
        for method, path in [*routes, ("GET", "/nowhere"), ("OPTIONS", PATH), ("GET", "/health/../load")]:
            response = await client.request(method, path)
            # The page at / is the same for all and holds nothing of the engine.
            assert response.status_code == (200 if path in OPEN_PATHS else 401), (method, path)
        for path in ("/proxy/load", "/%2Fhealth", "/Health", "/health/", "/v1/health", "/proxyload"):
            assert (await client.get(path)).status_code == 401, path
        assert (await client.get("/proxy/health")).status_code == 200


@pytest.mark.parametrize(
    "value", ["Bearer wrong", "Bearer firs", "Bearer firstx", "Basic first", "first", "Bearer", ""]
)
async def test_what_is_no_key(locked, value):
    async with http_client(locked) as client:
        response = await client.get("/load", headers={"Authorization": value})
        assert response.status_code == 401 and response.json()["error"]["type"] == "AuthenticationError"
        assert response.headers["www-authenticate"] == "Bearer"
        two = [("Authorization", value), ("Authorization", "Bearer first")]
        assert (await client.get("/load", headers=two)).status_code == 401


async def test_every_key_opens_what_it_is_for(locked):
    for key, status in (("first", 403), ("second", 403), ("root", 200)):
        async with http_client(locked, key) as client:
            assert (await client.get("/load")).status_code == 200
            for path in ("/reset_prefix_cache", "/reset_mm_cache"):
                assert (await client.post(path)).status_code == status


async def test_operators_routes_need_their_key_where_others_need_none(chat_engine, tmp_path):
    keys = tmp_path / "admin"
    keys.write_text("root\n")
    app = create_app(chat_engine, ServerConfig(enable_admin=True, admin_key_file=str(keys)))
    async with http_client(app) as client:
        assert (await client.get("/load")).status_code == 200
        assert (await client.post("/reset_prefix_cache")).status_code == 401
    async with http_client(create_app(chat_engine, ServerConfig())) as client:
        assert (await client.post("/reset_prefix_cache")).status_code == 404


async def test_browsers_ask_before_they_have_a_key(chat_engine):
    app = create_app(chat_engine, ServerConfig(api_key=("k",), allowed_origins=("https://a.example",)))
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with http_client(app) as client:
        allowed = await client.options(PATH, headers={"Origin": "https://a.example", **asks})
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = await client.options(PATH, headers={"Origin": "https://b.example", **asks})
        assert "access-control-allow-origin" not in other.headers


async def test_headers_have_a_limit(app):
    for headers in ({"X": "a" * (1 << 20)}, {f"X-{number}": "a" * 1000 for number in range(100)}):
        assert (await send(app, b"{}", **headers)).error["code"] == 431


async def test_a_body_has_a_limit(app):
    for length in ("200000000", "9" * 5000, "-1", "1e3"):
        answer = await send(app, b"{}", **{"Content-Length": length})
        assert answer.status == (413 if length.isdigit() else 400)
        assert answer.headers["connection"] == "close"


async def test_a_body_that_says_nothing_of_its_length_is_never_held_whole(app):
    piece = b" " * (1 << 20)
    tracemalloc.start()
    connection = Connection(app, PATH, *[piece] * 200)
    await connection.ended()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Some more is read, and dropped, so that a client that sends before it reads sees the answer.
    assert connection.status == 413 and connection.num_bodies_taken == 33 + 64
    assert peak < 40 << 20  # no more than the largest body that is taken


async def test_a_part_of_a_body_may_be_empty():
    """ASGI lets servers leave out `body`."""
    parts = iter(
        [{"type": "http.request", "body": b"12345", "more_body": True}, {"type": "http.request", "more_body": True}]
    )
    sent = []

    async def receive():
        return next(parts, {"type": "http.request"})

    async def send(message):
        sent.append(message)

    async def refuse(scope, receive, send):
        await send({"type": "http.response.start", "status": 413})
        await send({"type": "http.response.body"})

    scope = {"type": "http", "path": PATH, "query_string": b"", "headers": []}
    await LimitsMiddleware(refuse, 100, 100, 10.0)(scope, receive, send)
    assert [each.get("more_body", False) for each in sent] == [False, True, False] and next(parts, None) is None


@each_row(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "n": 1e2}',
        b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "a", "x": "\\ud800"}',
        b'{"prompt": "\\udfff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\xff"}',
        '{"prompt": "a"}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "x": "\\' + b'"[' * 1000,
        b"\x1f\x8b\x08\x00",
        b'{"prompt": "a", "x": [1e999]}',
        b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}",
    ],
)
async def test_what_is_no_json_is_refused(app, body):
    error = (await send(app, body)).error
    assert error["code"] == 400 and "$" not in error["message"]


def test_brackets_in_strings_do_not_count():
    value = {"a": "[{" * 1000, "b": '"\\[[[' * 100, "c": [[]] * 100, "d": "\U0001f600"}
    assert read_json(json.dumps(value).encode()) == value


async def test_only_json_is_read(app):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", ""):
        answer = await send(app, b'{"prompt": "a"}', **{"Content-Type": kind})
        assert answer.error["code"] == 415
    assert (
        await send(app, b'{"prompt": [1], "max_tokens": 1}', **{"Content-Type": "Application/JSON; charset=utf-8"})
    ).status == 200
    answer = await send(app, gzip.compress(b'{"prompt": [1]}'), **{"Content-Encoding": "gzip"})
    assert answer.status == 415 and "Content-Encoding is 'gzip'" in answer.error["message"]
    assert (await send(app, b'{"prompt": [1], "max_tokens": 1}', **{"Content-Encoding": "Identity"})).status == 200


@each_row(
    ("fields", "param"),
    [
        ({"n": 10**9}, "n"),
        ({"n": -1}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 10_000, "max_tokens": None}, "min_tokens"),
        ({"temperature": 1e308}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_k": -2}, "top_k"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"bad_words": ["a" * 10_000]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "1"}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": [1] * 256}, "prompt"),
        ({"prompt": "a " * 500_000}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"priority": 1}, "priority"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "a" * 129}, "request_id"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a" * 1025}, "cache_salt"),
        ({"timeout": 0}, "timeout"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncation_side": "up"}, "truncation_side"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"other": 1}, "stream": True}, "stream_options"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "include_obfuscation"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "b", "structured_outputs": {"regex": "a"}}, "guided_regex"),
    ],
)
async def test_a_value_out_of_bounds_is_named(app, fields, param):
    answer = await post(app, PATH, **{"prompt": "a", **fields})
    assert (answer.status, answer.error["param"], answer.error["type"]) == (400, param, "BadRequestError")
    assert param in answer.error["message"] and len(answer.body) < 3000


@each_row(
    ("path", "base"),
    [
        (PATH, {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ],
)
async def test_a_field_of_earlier_clients_is_answered_with_its_new_name(app, path, base):
    for name, value, new in (
        ("guided_json", {"type": "object"}, "structured_outputs.json"),
        ("guided_regex", "a", "structured_outputs.regex"),
        ("guided_choice", ["a"], "structured_outputs.choice"),
        ("guided_grammar", "start: A", "structured_outputs.grammar"),
        ("guided_json_object", True, "structured_outputs.json_object"),
        ("guided_whitespace_pattern", " ", "structured_outputs.whitespace_pattern"),
        ("guided_decoding", {"regex": "a"}, "structured_outputs"),
    ):
        answer = await post(app, path, **base, **{name: value})
        assert answer.status == 400, (name, answer.body)
        message = answer.json["error"]["message"]
        assert message.startswith(name) and message.endswith(f"now called {new}"), message


async def test_what_is_said_under_an_earlier_name_too_is_said_once(app):
    """As guidance does, which does not know how old its server is."""
    new = {"structured_outputs": {"regex": "[a-c]{3}"}}
    old = {"guided_regex": "[a-c]{3}", "guided_decoding_backend": "guidance"}
    ask = {"prompt": "a", "temperature": 0, "timeout": 60}
    answers = [await post(app, PATH, **ask, **fields) for fields in (new, new | old)]
    assert [answer.status for answer in answers] == [200, 200]
    (first,), (second,) = (answer.json["choices"] for answer in answers)
    assert first["text"] == second["text"] and re.fullmatch("[a-c]{3}", first["text"])


async def test_a_route_that_is_missing_says_what_serves_instead(app):
    docs = Path(__file__).parents[4]
    async with http_client(app) as client:
        for path in NOT_BUILT:
            for asked, answer in (
                (path, await client.post(path, json={})),
                (f"{path}/", await client.post(f"{path}/", json={}, follow_redirects=True)),
                (f"{path}/a/b", await client.post(f"{path}/a/b", json={})),
            ):
                error = answer.json()["error"]
                assert answer.status_code == 404 and f"{path} is not built; instead: " in error["message"], asked
                named = re.findall(r"docs/\w+\.md", error["message"])
                assert named and all((docs / name).exists() for name in named), error
        serving = (docs / "docs/serving.md").read_text()  # which these errors name
        for path, option in SWITCHED_OFF.items():
            assert f"`{path}`" in serving, path
            for method in ("GET", "POST"):
                answer = await client.request(method, path)
                assert answer.status_code == 404 and f"only served with {option}" in answer.text, (path, answer.text)
        assert (await client.get("/v1/batches/a")).json()["error"]["code"] == 404
        assert (await client.post("/v1/messages/batches")).json()["error"]["type"] == "not_found_error"
        assert "no route '/v2/nothing'; /docs lists all" in (await client.get("/v2/nothing")).text
        # What a route has not found stays as the route says it, and so does another method.
        assert "Response with id 'compact' not found" in (await client.get("/v1/responses/compact")).text
        assert (await client.get("/v1/completions")).status_code == 405


def test_the_tables_of_missing_routes_are_true(chat_engine, locked_config):
    """Routes that depend on options are in one table. Adapters and profiles need an engine with them."""
    always, more = (
        {route.path for router in ROUTERS for route in router(chat_engine, config).routes if isinstance(route, Route)}
        for config in (ServerConfig(), locked_config)
    )
    assert len(always) > 20 and not always & SWITCHED_OFF.keys() and not more & NOT_BUILT.keys()
    of_engine = {
        "/adapters",
        "/load_lora_adapter",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/start_profile",
        "/stop_profile",
    }
    assert {path for path in more - always if "{" not in path} == SWITCHED_OFF.keys() - of_engine


async def test_ids_that_clients_choose_stay_harmless(app, caplog):
    for name, kept in (("abc-1_2", True), ("a b", False), ("a" * 129, False), ("", False), ("a;b", False)):
        answer = await send(app, b'{"prompt": [1], "max_tokens": 1}', **{"X-Request-Id": name})
        assert answer.status == 200 and (answer.headers["x-request-id"] == name) == kept
        assert re.fullmatch(r"cmpl-[A-Za-z0-9_-]+", answer.json["id"])
        assert answer.json["id"].startswith(f"cmpl-{name}" if kept else "cmpl-")
    # One id for several calls at once is what proxies do; only request_id is a name of its own.
    body = b'{"prompt": [1], "max_tokens": 9, "ignore_eos": true}'
    answers = await asyncio.gather(*(send(app, body, **{"X-Request-Id": "same"}) for _ in range(3)))
    assert [answer.status for answer in answers] == [200] * 3 and len({answer.json["id"] for answer in answers}) == 3
    answers = await asyncio.gather(*(post(app, PATH, prompt=[1], request_id="same") for _ in range(2)))
    assert sorted(answer.status for answer in answers) == [200, 400]


async def test_fields_that_nobody_knows_are_named(app, caplog):
    unknown = {"extra": 1, "bad\r\nX-Injected: 1": 2, "\u4f60": 3, "a" * 500: 4}
    answer = await post(app, PATH, prompt=[1], max_tokens=1, **unknown)
    assert answer.status == 200 and "x-injected" not in answer.headers
    assert answer.headers["x-unknown-fields"] == "extra, bad??X-Injected??1, ?, " + "a" * 64
    assert "extra" in caplog.text and "\r" not in caplog.text
    many = await post(app, PATH, prompt=[1], max_tokens=1, **{f"f{number}": 1 for number in range(900)})
    assert len(many.headers["x-unknown-fields"]) < 200


@each_row(
    "message, told",
    [
        ("no file /home/user/model/config.json here", "no file <path> here"),
        ("cannot open '/usr/lib/python3/site.py': it", "cannot open '<path>': it"),
        (f"{__file__}:3 says", "<path>:3 says"),
        ("file:///home/user/model is bad", "file://<path> is bad"),
        ("<Thing at 0x7f3a2b1c4d50>", "<Thing at <address>>"),
        (r"C:\Users\me\x.txt is bad", "<path> is bad"),
        ('failed: Traceback (most recent call last):\n  File "/a/b.py", line 3\nX', "failed: <traceback>"),
        ("temperature must be from 0 to 2, got 1/3", None),
        ("Pointer '#/properties/x' does not exist", None),
        ("Pointer '#/home/x' and '/properties/x/items' do not exist", None),
        ("there is no /v1/foo, but /v1/completions", None),
        ("https://example.com/home/a.png cannot be read", None),
        ("application/json or text/plain", None),
        ("a" * 5000, "a" * 2000 + "..."),
    ],
)
def test_messages_do_not_show_the_server_from_inside(message, told):
    assert scrub(message) == (message if told is None else told)


def test_what_the_caller_wrote_is_shown_as_it_is():
    assert scrub("no /home/me/a in /home/you/b", "'/home/me/a'") == "no /home/me/a in <path>"


async def test_errors_show_the_callers_texts_and_the_served_names(chat_engine):
    app = create_app(chat_engine, ServerConfig(served_model_name=("/home/models/tiny",)))
    unknown = await post(app, PATH, prompt="a", model="/home/me/tiny")
    assert unknown.status == 404
    assert "'/home/me/tiny' does not exist; this server has /home/models/tiny" in unknown.error["message"]
    wrong = await post(app, PATH, prompt="a", max_tokens="/home/me/tokens")
    assert wrong.status == 400 and "'/home/me/tokens'" in wrong.error["message"]


async def test_nobody_waits_for_a_parser(app):
    """Bodies that are costly to look at leave the server answering others."""
    costly = asyncio.create_task(send(app, b"[" + b"[],[]," * 100_000 + b"1]"))
    num_answered = 0
    while not costly.done():
        async with http_client(app) as client:
            await asyncio.sleep(0)
            assert (await client.get("/health")).status_code == 200
        num_answered += not costly.done()
    assert costly.result().status == 400 and num_answered


def test_a_router_whose_bodies_are_not_guarded_is_no_part_of_the_application(chat_engine, monkeypatch):
    def careless(*_):
        routes = APIRouter()

        @routes.post("/careless")
        async def read(body: DetokenizeRequest) -> int:
            return len(body.tokens)

        return routes

    monkeypatch.setattr("jaxengine.server.http.app.ROUTERS", (*ROUTERS, careless))
    with pytest.raises(TypeError, match="/careless"):
        create_app(chat_engine, ServerConfig())


async def test_nothing_is_left_behind(app, chat_engine):
    await idle(chat_engine)
    assert app.state.traffic.num_running == 0


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.thorough("test_wrong_types_end_in_no_server_error has wrong values", but=(GenerationMode.POSITIVE,))
def test_no_request_that_fits_the_document_or_nearly_does_is_the_servers_fault(chat_engine, mode, thorough):
    app = create_app(chat_engine, ServerConfig(request_timeout=0.1))
    operations = [each.ok() for each in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()]
    assert len(operations) > 8
    statuses = defaultdict(set)
    for operation in operations:
        # Bodies have many fields; the rest has next to none.
        most = (20 if thorough else 10) if mode is GenerationMode.POSITIVE else 8 if thorough else 4
        count = most if operation.method == "post" and operation.body else 2

        @settings(
            max_examples=count, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE and "messages" in case.body:
                case.body["messages"] = [{"role": "user", "content": "hi"}]  # the document does not say more
            elif isinstance(case.body, dict) and mode is GenerationMode.POSITIVE and case.path == "/tokenize":
                # One of both, for a model that there is; or few draws would be answered, in some releases none.
                case.body = {**case.body, "prompt": case.body.get("prompt") or "hi", "model": None}
            if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE and operation.label == f"POST {PATH}":  # noqa: B023
                case.body |= {"prompt": case.body.get("prompt") or "hi", "prompt_embeds": None}  # nor what is a file
            response = case.call()
            statuses[operation.label].add(response.status_code)  # noqa: B023
            assert response.status_code < 500, (response.status_code, response.content[:500])
            if response.status_code >= 400:
                error = (said := response.json()).get("error", said)  # Cohere's has a message alone
                assert error.get("code", response.status_code) == response.status_code
                assert not re.search(r"0x[0-9a-f]{6,}|/work/|/site-packages/|Traceback", error["message"])

        with contextlib.suppress(Unsatisfiable):  # a route without arguments cannot be asked wrongly
            check()
        assert statuses[operation.label] or mode is GenerationMode.NEGATIVE
    if mode is GenerationMode.POSITIVE:
        assert all(200 in statuses[f"POST {path}"] for path in (PATH, "/v1/chat/completions", "/tokenize"))
