"""A request as large as a body may be costs no more work than it has right entries: what is wrong is one fault."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.prepared import verify_salt
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.completions.generative_scoring import GenerativeScoringRequest
from jaxengine.server.http.completions.protocol import CompletionRequest
from jaxengine.server.http.derender.protocol import DerenderChat, DerenderCompletion
from jaxengine.server.http.messages.protocol import MessagesRequest
from jaxengine.server.http.pooling import run
from jaxengine.server.http.request.errors import ApiError
from jaxengine.server.http.request.limits import MAX_CONTAINERS, read_json
from jaxengine.server.http.responses.protocol import ResponsesRequest
from jaxengine.server.http.tokenize import DetokenizeRequest, TokenizeRequest
from tests.tables import each_row

BASES: dict[type[BaseModel], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "Hi"}]},
    CompletionRequest: {"prompt": "Hi"},
    ResponsesRequest: {"input": "Hi"},
    MessagesRequest: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    TokenizeRequest: {"prompt": "Hi"},
    DetokenizeRequest: {"tokens": [1]},
    GenerativeScoringRequest: {"query": "a", "items": ["b"], "label_token_ids": [1]},
    DerenderChat: {},
    DerenderCompletion: {},
}
NUMBER = 2_000
ENTRIES = (0, "x", None, True, 1.5, [], {}, {"a": 1}, {"a": "b"}, {"type": "function", "function": {"name": 1}})


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_in(part)


def large_values(annotation: Any, depth: int = 0) -> Iterator[Any]:
    """Lists and objects of many entries, and objects that hold such where the field's own model looks for them."""
    for entry in ENTRIES:
        yield [entry] * NUMBER
        yield {f"key{number}": entry for number in range(NUMBER)}
    if depth < 3:
        for model in models_in(annotation):
            for name, field in model.model_fields.items():
                for value in large_values(field.annotation, depth + 1):
                    yield {field.alias or name: value}


@each_row(("model", "name"), [(model, name) for model in BASES for name in model.model_fields])
def test_faults_are_not_collected_one_by_one(model, name):
    """Each costs a few hundred bytes: pydantic made half a gigabyte of a megabyte of documents. Errors are counted, so
    that some thousand entries tell what a megabyte of them would."""
    for value in large_values(model.model_fields[name].annotation):
        try:
            model.model_validate({**BASES[model], name: value})
        except ValidationError as error:
            assert error.error_count() <= 10, (name, error.error_count())
        except RequestError:
            continue


@each_row("name", ["stop", "documents", "metadata", "tools", "messages", "chat_template_kwargs"])
def test_the_right_entries_of_large_fields_are_still_taken(name):
    right = {
        "stop": ["x"] * 10,
        "documents": [{"title": "t", "text": "x"}] * 1000,
        "metadata": {"a": "b"},
        "tools": [{"function": {"name": f"f{number}"}} for number in range(128)],
        "messages": [{"role": "user", "content": "Hi"}] * 10_000,
        "chat_template_kwargs": {str(number): number for number in range(256)},
    }[name]
    assert ChatRequest.model_validate({**BASES[ChatRequest], name: right})


def test_messages_that_another_api_makes_too_many_are_refused():
    ask = [{"role": "user", "content": "Hi"}] * 10_000
    with pytest.raises(RequestError, match="messages is not valid: at most 10000 entries are allowed, not 10001"):
        MessagesRequest(messages=ask, max_tokens=1, system="Be brief").chat_request()
    with pytest.raises(RequestError, match="input is not valid: at most 10000 entries are allowed, not 10001"):
        ResponsesRequest(input="", instructions="Be brief").chat_request(ask)


@each_row("name", ["chat_template_kwargs", "structured_outputs"])
@each_row("model", [ChatRequest, ResponsesRequest, MessagesRequest])
def test_objects_of_options_have_few_names(model, name):
    many = {str(number): number for number in range(257)}
    with pytest.raises(ValidationError, match="at most 256 entries are allowed, not 257"):
        model.model_validate({**BASES[model], name: many})


def test_objects_are_not_copied_before_they_are_looked_at():
    """450,000 names cost a fifth of a second in which nothing else ran."""
    bias = {str(number): 1 for number in range(NUMBER)}
    assert ResponsesRequest.model_validate({**BASES[ResponsesRequest], "logit_bias": bias}).logit_bias is bias


@each_row("salt", ["", "x" * 10**6, 7])
def test_a_salt_is_bounded_and_not_repeated(salt):
    """Its repr was made on the event loop."""
    with pytest.raises(RequestError, match="^cache_salt is .{0,40}; allowed: a string of 1 to 1024 characters$"):
        verify_salt(salt)
    with pytest.raises(ValidationError, match="cache_salt"):
        ChatRequest.model_validate({**BASES[ChatRequest], "cache_salt": salt})


@each_row("model", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_a_name_that_is_repeated_is_bounded(model):
    """31 MB of it went into the log and into the answer."""
    assert model.model_validate({**BASES[model], "user": "x" * 1024}).user
    with pytest.raises(ValidationError, match="user has 1025 characters; allowed: 1024"):
        model.model_validate({**BASES[model], "user": "x" * 1025})


@pytest.mark.parametrize("container", ["{}", "[]"])
def test_a_body_of_nothing_but_brackets_is_not_built(container):
    whole = "[" + ",".join([container] * (MAX_CONTAINERS - 1)) + "]"
    assert len(read_json(whole.encode())) == MAX_CONTAINERS - 1
    with pytest.raises(ApiError, match=f"more than {MAX_CONTAINERS} arrays and objects"):
        read_json(f"[{whole}]".encode())
    assert read_json(f'["{container * MAX_CONTAINERS}"]'.encode())


async def test_prompts_that_run_hold_a_bounded_size_of_media(monkeypatch):
    """A request's prompts with media are loaded one by one, and only while the running ones hold less than the bound;
    the next one is loaded when one of them has ended."""
    monkeypatch.setattr(run, "MAX_HELD_BYTES", 100)
    held, most, loaded = 0, 0, 0

    class Engine:
        inputs = SimpleNamespace(config=SimpleNamespace(max_num_seqs=8))

        async def pool(self, prompt, params, name, options):
            nonlocal held, most
            most = max(most, held)
            await asyncio.sleep(0)
            held -= prompt["media"].items[0].num_bytes
            yield SimpleNamespace(finish_reason=run.STOP, stop_reason=None, name=name)

    async def load():
        nonlocal held, loaded
        loaded += 1
        held += 60
        return {"media": SimpleNamespace(items=[SimpleNamespace(num_bytes=60)])}

    server = object.__new__(run.PoolingServer)
    server.engine = Engine()
    body = SimpleNamespace(cache_salt=None)
    found = await server.answers([load] * 6, PoolingParams(), body, "a", RequestOptions())
    assert [each.name for each in found] == [f"a-{at}" for at in range(6)]
    assert (held, most, loaded) == (0, 120, 6)
