"""Integers of any size, in every integer field, by every way in: refused by name or served, and nobody else notices."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from jaxengine import LLM, SamplingParams
from jaxengine.requests.params.options import RequestOptions
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import FinishReason
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.grpc.inference_pb2 import GenerateRequest
from jaxengine.server.http.app import create_app
from jaxengine.server.link.messages import Load
from jaxengine.server.link.queue_limits import QueueLimits
from jaxengine.server.link.remote_engine import RemoteEngine
from jaxengine.server.link.send_queue import SendQueue
from tests.jaxengine.server.asgi_client import post
from tests.scheduler.loop import Loop, check_output, make
from tests.tables import each_row

EDGES = [sign * size + by for size in (2**31, 2**63, 2**64, 10**30) for sign in (1, -1) for by in (-1, 0)] + [10**400]
FIELDS = {
    "n": lambda value: {"n": value},
    "top_k": lambda value: {"top_k": value},
    "seed": lambda value: {"seed": value},
    "max_tokens": lambda value: {"max_tokens": value},
    "min_tokens": lambda value: {"min_tokens": value},
    "logprobs": lambda value: {"logprobs": value},
    "prompt_logprobs": lambda value: {"prompt_logprobs": value},
    "stop_token_ids": lambda value: {"stop_token_ids": [value]},
    "allowed_token_ids": lambda value: {"allowed_token_ids": [value]},
    "logit_bias": lambda value: {"logit_bias": {value: 1.0}},
}
PROMPT = {"prompt_token_ids": [5, 6, 7]}
PLAIN = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=["fcfs", "priority", pytest.param("fair", marks=pytest.mark.thorough("without priorities, as fcfs"))],
)
def llm(request, tiny_options):
    llm = LLM(**tiny_options, scheduling_policy=request.param)
    yield llm
    llm.shutdown()


def test_every_integer_field_of_sampling_params(llm):
    expected = llm.generate(PROMPT, PLAIN, use_tqdm=False)[0].outputs[0].token_ids
    for (name, fields), value in itertools.product(FIELDS.items(), EDGES):
        try:
            params = SamplingParams(**{"max_tokens": 3, "temperature": 1.0, **fields(value)})
            llm.generate(PROMPT, params, use_tqdm=False)
        except RequestError as error:
            assert error.param == name and len(str(error)) < 400, (name, value)
        assert not llm.core.engine.scheduler.num_unfinished
    assert llm.generate(PROMPT, PLAIN, use_tqdm=False)[0].outputs[0].token_ids == expected


@each_row("value", EDGES)
def test_priority_timeout_and_token_ids(llm, value):
    policy = llm.core.config.scheduling_policy
    fits = -(2**63) <= value < 2**63
    if policy == "priority" and fits:
        assert llm.generate([PROMPT] * 2, PLAIN, use_tqdm=False, priority=[value, 0])[0].finished
    else:
        with pytest.raises(RequestError, match="^priority ") as error:
            llm.generate([PROMPT] * 2, PLAIN, use_tqdm=False, priority=[value, 0])
        assert error.value.param == "priority"
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.generate({"prompt_token_ids": [value]}, PLAIN, use_tqdm=False)
    options = RequestOptions(timeout=value)
    if 0 < value <= 10**9:
        options.verify_against(policy, False)
    else:
        with pytest.raises(RequestError, match="^timeout "):
            options.verify_against(policy, False)
    assert llm.generate(PROMPT, PLAIN, use_tqdm=False)[0].finished


@pytest.fixture
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(request_timeout=20.0))


@each_row("name", [*FIELDS, "priority", "timeout", "prompt"])
async def test_http_refuses_or_serves(app, name):
    for value in EDGES[:-1]:
        fields = {"priority": value, "timeout": value, "prompt": [value]}
        body = {name: fields[name]} if name in fields else FIELDS[name](value)
        if name == "logit_bias":
            body = {name: {str(value): 1.0}}
        answer = await post(app, "/v1/completions", **{"prompt": [5, 6], "max_tokens": 1, **body})
        assert answer.status in (200, 400), (name, value, answer.body)
        assert answer.status == 200 or answer.error["param"] in (name, "logprobs", "prompt_logprobs")
    assert (await post(app, "/v1/completions", prompt=[5, 6], max_tokens=1)).status == 200


@each_row("value", EDGES)
def test_grpc_has_no_room_for_more(value):
    if -(2**31) <= value < 2**31:
        assert GenerateRequest(priority=value).priority == value
    else:
        with pytest.raises(ValueError):
            GenerateRequest(priority=value)


def test_a_request_that_cannot_be_told_to_the_engine_is_not_waited_for(make_llm):
    """What gets past the door after all: nothing of it may stay in the API process."""

    async def run():
        remote = object.__new__(RemoteEngine)
        processor = llm.core._processor
        remote.__dict__.update(
            _processor=processor, _limits=QueueLimits.of(8, 10, None), _send_queue=SendQueue(), _streams={}
        )
        remote.__dict__.update(_replicas={}, _load=Load())
        prepared = llm.core.inputs.prepare(PROMPT, PLAIN, request_id="ghost")
        prepared.requests[0].priority = 2**64
        with pytest.raises(OverflowError):
            remote._submit(prepared)
        assert (
            not list(remote._send_queue.read(1)) and not remote._replicas and not remote._streams and not len(processor)
        )

    llm = make_llm()
    asyncio.run(run())


def test_a_request_that_fits_no_column_ends_alone():
    loop = Loop(policy="priority")
    before, bad, after = make("a", range(5), 8), make("b", range(6), 8, priority=2**63), make("c", range(7), 8)
    late = make("d", range(8), 8, stop_token_ids=(2**40,))
    for request in (before, bad, after, late):
        loop.scheduler.add_request(request)
    loop.run()
    for request in (bad, late):
        assert request.finish_reason is FinishReason.ERROR and "OverflowError" in str(request.stop_reason)
    for request in (before, after):
        check_output(request)
    assert loop.scheduler.num_free_pages == loop.scheduler.num_pages and np.all(~loop.scheduler.ranks[0].slots.active)
