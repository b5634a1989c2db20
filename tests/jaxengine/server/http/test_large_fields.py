"""Whatever a field holds, and however much of it, others have their turn on the event loop meanwhile."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import json
import pydoc
import threading
import time
import tracemalloc
from typing import Any

import pytest

from jaxengine.requests.params.param_limits import MAX_BAD_WORDS_CHARS, MAX_STOP_CHARS, MAX_TOKEN_IDS
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import OverloadedError, RequestError, show_value
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.prompts import MAX_DETOKENIZE
from jaxengine.server.base.workers import Workers
from jaxengine.server.http.app import create_app
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.completions.protocol import CompletionRequest
from jaxengine.server.http.request.errors import ApiError
from jaxengine.server.http.request.limits import MAX_CONTAINERS, MAX_FIELDS, MAX_NAMES, MAX_TEXTS, MAX_VALUES, read_json
from jaxengine.server.http.responses.protocol import ResponsesRequest
from jaxengine.server.http.tokenize import DetokenizeRequest, TokenizeRequest
from jaxengine.tokens.tokenizer import Tokenizer
from tests.jaxengine.server.asgi_client import Connection, post
from tests.jaxengine.server.scripted_engine import ScriptedEngine
from tests.tables import each_row

LARGE = 300_000  # bytes of a body
SHAPES = {
    "one text": lambda: "x" * LARGE,
    "texts": lambda: ["x"] * (LARGE // 5),
    "ids": lambda: [7] * (LARGE // 3),
    "wide ids": lambda: list(range(100_000, 100_000 + LARGE // 8)),
    "names": lambda: {f"{number:07d}": 1 for number in range(LARGE // 14)},
    "objects": lambda: [{"type": "x"}] * (LARGE // 16),
}
ENDPOINTS = {
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
# What blocked for seconds: each of these has every shape.
ONCE_SLOW = {"bad_words", "stop", "logit_bias", "prompt", "tokens", "tools", "text", "unknown"}
# Seconds of processor time, so that a busy machine makes no difference.
LONGEST_TURN = 0.25


@pytest.fixture(scope="module")
def app(chat_engine):
    engine: Any = ScriptedEngine(chat_engine, "Hi")
    return create_app(engine, ServerConfig())


async def longest_turn(connection: Connection) -> float:
    """The most that was done between two turns of ours until the answer was there, without garbage collections: those
    of a test's process also look at what other tests have left."""
    gc.disable()
    try:
        longest, last = 0.0, time.thread_time()
        ended = asyncio.create_task(connection.ended())
        while not ended.done():
            await asyncio.sleep(0.002)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
        await ended
        return longest
    finally:
        gc.enable()


def test_every_field_at_its_largest(app):
    bodies: dict[str, str] = {shape: json.dumps(make()) for shape, make in SHAPES.items()}

    async def run():
        shapes, turns = itertools.cycle(bodies), []
        for path, (model, base) in ENDPOINTS.items():
            for name in ("unknown", *model.model_fields):
                for shape in bodies if name in ONCE_SLOW else [next(shapes)]:
                    others = {field: value for field, value in base.items() if field != name}
                    body = json.dumps(others)[:-1] + (", " if others else "") + f'"{name}": {bodies[shape]}}}'
                    connection = Connection(app, path, body.encode())
                    turns.append((await longest_turn(connection), path, name, shape))
                    assert connection.status in (200, 400, 404), (path, name, shape, connection.status)
        assert max(turns)[0] < LONGEST_TURN, sorted(turns)[-5:]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("value", "of"),
    [
        ("[" + "7," * MAX_VALUES + "7]", f"{MAX_VALUES} values"),
        ("[" + '"",' * MAX_TEXTS + '""]', f"{MAX_TEXTS} texts"),
        ('{"a":[' + '"\\"\\\\",' * MAX_TEXTS + '""]}', f"{MAX_TEXTS} texts"),
        ("{" + '"":7,' * MAX_NAMES + '"":7}', f"{MAX_NAMES} names"),
    ],
)
def test_more_than_a_body_may_hold_is_not_built(value, of):
    with pytest.raises(ApiError, match=f"more than {of}"):
        read_json(value.encode())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "{" + ",".join(f'"{name}":{name}' for name in range(10**6, 10**6 + MAX_NAMES // 10)) + "}", id="names"
        ),
        pytest.param(
            "[" + ",".join(f'{{"{name}":{name}}}' for name in range(MAX_CONTAINERS // 10)) + "]", id="objects"
        ),
    ],
)
def test_what_is_let_through_takes_little_memory(text):
    """A tenth of what may come, within a tenth of twice the largest body and sixteen MiB more."""
    tracemalloc.start()
    try:
        value = read_json(text.encode())
        assert tracemalloc.get_traced_memory()[1] < 7.8 * (1 << 20)
    finally:
        tracemalloc.stop()
    assert len(value) >= 20_000


def test_what_stands_in_a_text_does_not_count():
    text = '[{:,",' * (MAX_VALUES // 2)
    assert read_json(json.dumps({"a": text, "b": ["\\", "x"]}).encode()) == {"a": text, "b": ["\\", "x"]}


def test_many_texts_are_read_as_few_are():
    value = {"texts": [f'{number}\\"é\n' for number in range(40_000)], "more": {"a": [1, -2.5e3, None, True, {}, []]}}
    assert read_json(json.dumps(value).encode()) == value
    many = json.dumps(value)[:-1] + ', "more": 1e400}'
    for wrong in (many, many.replace("1e400", "NaN"), many.replace("1e400", "1,"), many.replace("1e400", '"\\ud800"')):
        with pytest.raises(ApiError, match="is not valid"):
            read_json(wrong.encode())


def test_many_numbers_are_read_as_few_are():
    value = {"ids": list(range(300_000)), "more": [[], [1.5, -2e3], [3, "]", {"a": [4]}], {}, [[5], 6]]}
    for indent in (None, 1):
        assert read_json(json.dumps(value, indent=indent).encode()) == value
    ids = ",".join(map(str, range(300_000)))
    for wrong in ("{},", "{},,1", ",{}", "{} 1", "{},1e400", "{},01", "{},-", "{},NaN", "{}, "):
        for body in (f"[{wrong.format(ids)}]", f"[{wrong.format(ids)}", f"[[1], [{wrong.format(ids)}]]"):
            with pytest.raises(ApiError, match="is not valid"):
                read_json(body.encode())


READ = [
    (b' {"a": 1, "b": 2, "a": [3]} ', {"a": [3], "b": 2}),
    (b"[-0, -0.0, 1e5, 1E-2, 0.1e-400, 5e-324]", [0, -0.0, 1e5, 0.01, 0.0, 5e-324]),
    (b"[18446744073709551616, -9223372036854775809]", [2**64, -(2**63) - 1]),
    (b"1" * 4300, int("1" * 4300)),
    (b'"\\ud83d\\ude00\\u0000\\/"', "\U0001f600\0/"),
    (b"[" * 64 + b"]" * 64, "nested"),
    (b'["' + b"[" * 65 + b'"]', ["[" * 65]),
]
NOT_READ = [
    (b"[NaN]", "not valid JSON: NaN is not a JSON number"),
    (b'{"a": -Infinity}', "not valid JSON: -Infinity is not a JSON number"),
    (b"[1e999]", "not valid JSON: Number out of range"),
    (b'{"n": 1' + b"0" * 5000 + b"}", "not valid JSON: Integer value out of range"),
    (b"\xef\xbb\xbf{}", "not valid JSON: it begins with a byte order mark"),
    (b"", "not valid JSON: it ends too early"),
    (b'{"a": "', "not valid JSON: it ends too early"),
    (b"[1,]", r"not valid JSON: trailing comma in array \(byte 3\)"),
    (b"{'a': 1}", "not valid JSON: object keys must be strings"),
    (b'"\n"', "not valid JSON: invalid character"),
    (b"01", "not valid JSON: invalid number"),
    (b"{} {}", "not valid JSON: trailing characters"),
    (b'["\\ud800"]', "not valid Unicode text"),
    (b'{"\\ud83d\\ud83d": 1}', "not valid Unicode text"),
    (b'"\\udfff"', "not valid Unicode text"),
    (b'"\\ud800 and more of the text"', "not valid Unicode text"),
    (b'"\xed\xa0\x80"', "not valid Unicode text"),
    (b'"\xff"', "not valid Unicode text"),
    ("{}".encode("utf-16"), "not valid Unicode text"),
    (b"[" * 65 + b"]" * 65, "nested deeper than 64"),
    (b'{"a":' * 64 + b"[]" + b"}" * 64, "nested deeper than 64"),
    (b"[" * 100_000, "nested deeper than 64"),
]


@each_row(("body", "value"), READ)
def test_what_json_says(body, value):
    read = read_json(bytearray(body))
    if value == "nested":
        read, value = json.dumps(read).encode(), body
    assert read == value and str(read) == str(value)  # a float stays one, and -0.0 is not 0


@each_row(("body", "problem"), NOT_READ)
def test_what_is_no_json_is_named(body, problem):
    with pytest.raises(ApiError, match=problem):
        read_json(body)


@pytest.mark.parametrize("before", range(6))
def test_half_a_character_is_found_where_pieces_of_a_body_meet(before):
    with pytest.raises(ApiError, match="Unicode"):
        read_json(b'"' + b"x" * ((1 << 20) - 1 - before) + b'\\ud800"')


async def test_more_fields_than_anybody_has_are_refused(app):
    answer = await post(app, "/v1/completions", prompt="Hi", **{f"x{number}": 1 for number in range(MAX_FIELDS)})
    assert answer.status == 400 and f"allowed: {MAX_FIELDS}" in answer.error["message"]
    answer = await post(app, "/v1/completions", prompt="Hi", **{f"x{number}": 1 for number in range(MAX_FIELDS - 1)})
    assert answer.status == 200


async def test_bounds_are_named(app):
    vocab_size = 49152
    for path, fields, said in (
        ("/v1/completions", {"bad_words": ["x" * (MAX_BAD_WORDS_CHARS + 1)]}, f"{MAX_BAD_WORDS_CHARS} characters"),
        ("/v1/completions", {"stop": ["x" * MAX_STOP_CHARS, "y"]}, f"{MAX_STOP_CHARS} characters"),
        ("/v1/completions", {"logit_bias": {str(i): 1 for i in range(vocab_size + 1)}}, f"vocabulary has {vocab_size}"),
        ("/v1/completions", {"prompt": [7] * 300}, "prompt is too long: 300 tokens > 255 maximum"),
        ("/detokenize", {"tokens": [7] * (MAX_DETOKENIZE + 1)}, f"allowed: {MAX_DETOKENIZE}"),
    ):
        answer = await post(app, path, **{**ENDPOINTS[path][1], **fields})
        assert answer.status == 400 and said in answer.error["message"], answer.body
    whole = {"logit_bias": {str(i): 1 for i in range(vocab_size)}, "stop": "x" * MAX_STOP_CHARS}
    assert (await post(app, "/v1/completions", prompt=[7] * 300, truncate_prompt_tokens=5, **whole)).status == 200


async def test_a_conversation_that_cannot_fit_reaches_no_template(app, monkeypatch):
    """Which would have a copy of it, and its answer would be another."""
    rendered = []
    monkeypatch.setattr(Tokenizer, "apply_chat_template", lambda *args, **options: rendered.append(args))
    long = "x" * 10**6
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/responses", {"input": long}),
        ("/tokenize", {"prompt": None, "messages": [{"role": "user", "content": long}]}),
    ):
        answer = await post(app, path, **fields)
        assert answer.status == 400 and "prompt is too long: 1000000 characters > " in answer.error["message"]
    assert not rendered


async def test_long_conversations_of_other_apis_are_converted_on_a_thread(app, monkeypatch):
    """A conversion took up to a second of the event loop; short ones stay on it."""
    here, threads, http = threading.get_ident(), [], "jaxengine.server.http"

    def watched(plain, *args):
        threads.append(threading.get_ident())
        return plain(*args)

    for name in (
        "messages.protocol.read_messages",
        "messages.protocol.left_out_blocks",
        "chat.cohere_protocol._chat_messages",
        "responses.endpoint.read_input",
        "render.read_input",
        "invocations.read_json",
    ):
        monkeypatch.setattr(f"{http}.{name}", functools.partial(watched, pydoc.locate(f"{http}.{name}")))
    for path, field, number in (
        ("/v1/messages", "messages", 2),
        ("/v1/messages/render", "messages", 1),
        ("/v1/messages/count_tokens", "messages", 2),
        ("/cohere/v2/chat", "messages", 1),
        ("/cohere/v2/chat/render", "messages", 1),
        ("/v1/responses", "input", 1),
        ("/v1/responses/input_tokens", "input", 1),
        ("/v1/responses/render", "input", 1),
        ("/invocations", "input", 2),
    ):
        for length, is_here in ((2, True), (70_000, False)):
            conversation = [{"role": "user", "content": "x" * length}]
            answer = await post(app, path, **{"max_tokens": 1, field: conversation})
            assert answer.status in (200, 400), (path, answer.body)
            found = [thread == here for thread in threads]
            assert found == [is_here] * number, (path, length)
            threads.clear()


def test_lists_of_ids_are_bounded_and_checked():
    assert SamplingParams(stop_token_ids=[3, 1, 3, 2, 1]).stop_token_ids == (3, 1, 2)
    for wrong in ([1, True], [1, -1], [2**31], [1, "2"], [0] * (MAX_TOKEN_IDS + 1)):
        with pytest.raises(RequestError, match="stop_token_ids"):
            SamplingParams(stop_token_ids=wrong)
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_TOKEN_IDS + 1), 1.0))


def test_a_large_value_is_shown_without_being_sorted():
    class Name(str):
        def __lt__(self, other):
            raise AssertionError("sorted")

    assert show_value({Name(number): 1 for number in range(2000)}) == "<dict of 2000>"
    assert show_value({"b": 1, "a": 2}) == "{'a': 2, 'b': 1}"


async def test_work_that_waits_is_bounded_and_ends_without_its_caller():
    workers, begun, end = Workers(num_threads=1, max_waiting=1), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work():
        loop.call_soon_threadsafe(begun.set)
        end.wait(30)
        return 1

    first, second = asyncio.create_task(workers.run(work)), asyncio.create_task(workers.run(int, "2"))
    await begun.wait()
    with pytest.raises(OverloadedError):
        await workers.run(int, "3")
    first.cancel()
    with pytest.raises(OverloadedError):  # its thread is still busy
        await workers.run(int, "3")
    end.set()
    assert await second == 2 and await workers.run(int, "4") == 4
