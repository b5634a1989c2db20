"""Every field of every request acts or is refused by its name."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import FinishReason
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.grpc import admin_pb2 as admin_pb
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.grpc.answers import FINISH_REASONS
from jaxengine.server.grpc.convert import SAMPLING_FIELDS, Generation, RequestReader, Wanted, field_of
from jaxengine.server.grpc.limits import MAX_FIELDS, refuse_many_fields
from jaxengine.server.grpc.server import ADMIN, INFERENCE
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.completions.protocol import CompletionRequest
from tests.jaxengine.server.grpc.grpc_rig import connected, refusal
from tests.tables import each_row

# A sound value of each field that becomes a sampling parameter as it is.
SAMPLING = {
    "temperature": 0.5,
    "sampling.num_sequences": 3,
    "sampling.top_k": 7,
    "sampling.top_p": 0.25,
    "sampling.min_p": 0.125,
    "sampling.seed": -7,
    "decoding.presence_penalty": -1.5,
    "decoding.frequency_penalty": 0.5,
    "decoding.repetition_penalty": 1.25,
    "decoding.logit_bias": {7: -0.5},
    "decoding.allowed_token_ids": [3, 9],
    "decoding.bad_words": ["no", "never"],
    "decoding.extra_args": {"boost": 2, "share": 0.5, "on": True},
    "decoding.trace_decode_token_ids": [4, 5, 4],
    "stopping.max_new_tokens": 9,
    "stopping.min_new_tokens": 2,
    "stopping.stop_token_ids": [5, 6],
    "stopping.stop_strings": ["x", "y"],
    "stopping.include_stop_strings": True,
    "stopping.ignore_eos": True,
    "response.skip_special_tokens": False,
    "response.spaces_between_special_tokens": False,
    "response.logprob_token_ids": [7, 3],
    "response.capture": ["residual:1", "mlp_output:*"],
    "response.return_hidden_states": True,
    "response.return_sampling_mask": True,
}
# Sampling parameters of HTTP's requests that gRPC has in another form, and those for which gRPC lacks what they need.
IN_OTHER_FIELDS = {"logprobs", "prompt_logprobs", "structured_outputs"}
# A parser, fields of answers, and vectors.
LACKING = {"thinking_token_budget", "return_sampling_mass", "prompt_logprob_start", "steer"}
LACKING |= {"repetition_detection", "stream_interval", "routed_experts_prompt_start", "prompt_logprob_token_ids"}


def constraint(made: Generation) -> tuple[str, Any] | None:
    asked = made.params.structured_outputs
    return None if asked is None else (asked.kind, getattr(asked, asked.kind))  # pyright: ignore


TOP_2 = {"top_n": 2}
TAG = '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}'
# The other fields, with a sound value and what it makes of the request (Generation).
OTHERS: dict[str, tuple[Any, Any]] = {
    "request_id": ("mine", lambda made: made.request_id == "mine"),
    "text": ("Hello there", lambda made: made.prompt == {"prompt_token_ids": [19556, 665]}),
    "token_ids.ids": ([4, 5], lambda made: made.prompt == {"prompt_token_ids": [4, 5]}),
    "messages.messages": ([{"role": "user", "content": "Hi"}], lambda made: len(made.prompt["prompt_token_ids"]) > 9),
    "truncate_prompt_tokens": (1, lambda made: made.prompt == {"prompt_token_ids": [665]}),
    "priority": (3, lambda made: made.priority == 3),
    "kv.bypass_prefix_cache": (True, lambda made: len(made.prompt.get("cache_salt", "")) == 32),
    "kv.cache_salt": ("salt", lambda made: made.prompt.get("cache_salt") == "salt"),
    "response.prompt_token_ids": (True, lambda made: made.wanted.prompt_token_ids),
    "response.prompt_logprobs": (True, lambda made: made.wanted.prompt_logprobs and made.params.prompt_logprobs == 0),
    "response.prompt_candidates": (TOP_2, lambda made: made.params.prompt_logprobs == 2),
    "response.output_text": (False, lambda made: not made.wanted.text and not made.params.detokenize),
    "response.output_token_ids": (True, lambda made: made.wanted.token_ids),
    "response.output_logprobs": (True, lambda made: made.wanted.logprobs and made.params.logprobs == 0),
    "response.output_candidates": (TOP_2, lambda made: made.wanted.candidates and made.params.logprobs == 2),
    "decoding.json": ('{"type": "object"}', lambda made: constraint(made) == ("json", '{"type": "object"}')),
    "decoding.regex": ("a+", lambda made: constraint(made) == ("regex", "a+")),
    "decoding.choice": ({"choices": ["a", "b"]}, lambda made: constraint(made) == ("choice", ("a", "b"))),
    "decoding.grammar": ('start: "a"', lambda made: constraint(made) == ("grammar", 'start: "a"')),
    "decoding.json_object": (True, lambda made: constraint(made) == ("json_object", True)),
    "decoding.structural_tag": (TAG, lambda made: constraint(made) == ("structural_tag", TAG)),
}
# Tested where a call shows what they do, embeddings in tests/jaxengine/server/http/test_prompt_embeds.py.
ELSEWHERE = {"model", "prompt_embeds"}
WRONG: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.5, math.nan, math.inf],
    "sampling.num_sequences": [0, 129, 2**32 - 1],
    "sampling.top_k": [2**32 - 1],
    "sampling.top_p": [0.0, 1.5, math.nan],
    "sampling.min_p": [-0.5, 1.5, math.nan],
    "decoding.presence_penalty": [2.5, math.nan],
    "decoding.frequency_penalty": [-2.5, math.inf],
    "decoding.repetition_penalty": [0.0, -1.0, math.inf, math.nan],
    "decoding.logit_bias": [{49152: 1.0}, {1: math.nan}],
    "decoding.allowed_token_ids": [[49152], [2**32 - 1], [1] * 50000],
    "decoding.bad_words": [[""], ["x"] * 129],
    "stopping.max_new_tokens": [0, 257],
    "stopping.min_new_tokens": [17],
    "stopping.stop_token_ids": [[49152]],
    "stopping.stop_strings": [[""], ["x"] * 17],
    "decoding.json": ["", "{", "3", '{"$ref": "http://x/y"}', "[" * 100_000],
    "decoding.extra_args": [{"no_such": 1}, {"x": math.nan}, {"alignment": [0, 1]}],
    "decoding.trace_decode_token_ids": [[5], [49152]],
    "response.logprob_token_ids": [[49152], list(range(129))],
    "response.capture": [["residual"], ["layers.3"], ["residual:1"]],  # the engine has none
    **dict.fromkeys(("response.return_hidden_states", "response.return_sampling_mask"), [True]),  # nor these options
    "decoding.regex": ["a" * 11_000],
    "decoding.choice": [{"choices": []}, {"choices": ["a", "a"]}],
    "decoding.grammar": [""],
    "decoding.json_object": [False],
    "decoding.structural_tag": ["", "{", "3", '{"type": "structural_tag"}', '{"format": {"type": "no_such"}}'],
    "request_id": ["a b", "x" * 129, "new\nline"],
    "text": [""],
    "token_ids.ids": [[], [49152], [1] * 256],
    "messages.messages": [[], [{"role": "", "content": "Hi"}]],
    "messages.chat_template_kwargs": [{"messages": "mine"}, {"x": math.nan}],
    "messages.mm_processor_kwargs": [{"max_pixels": 4096}, {"x": math.nan}],
    "priority": [1],
    "kv.cache_salt": ["x" * 1025],
    "response.prompt_candidates": [{}, {"top_n": 21}, {"all": True}, {"all": False}],
    "response.output_candidates": [{}, {"top_n": 21}, {"all": True}, {"all": False}],
}
# An error is about the oneof's member, not about the part of it.
NAMED = {"token_ids.ids": "token_ids", "messages.messages": "messages"}


def asked(path: str, value: Any) -> pb.GenerateRequest:
    """A sound request but for one field, with a small prompt where that is no part of it."""
    request = pb.GenerateRequest()
    if path.partition(".")[0] == "messages":
        request.messages.messages.add(role="user", content="Hi")
        if path == "messages.messages":
            request.messages.ClearField("messages")
    elif path.partition(".")[0] not in ("text", "token_ids"):
        request.text = "Hello there"
    group, _, name = path.rpartition(".")
    part = getattr(request, group) if group else request
    part.MergeFrom(type(part)(**{name: value}))
    if not part.ListFields():
        part.SetInParent()
    if path == "text":
        request.text = value
    return request


def test_names_of_fields_in_errors():
    update = admin_pb.UpdateWeightsRequest(options={"weight_version_number": 1})
    for request, param, field in (
        (pb.GenerateRequest(), "extra_args.max_repeats", "decoding.extra_args.max_repeats"),
        (pb.GenerateRequest(), "max_tokens", "stopping.max_new_tokens"),
        (update, "version", "options.weight_version_number"),
        (admin_pb.UpdateWeightsRequest(), "version", "options.weight_version"),
    ):
        assert field_of(request, param) == field


def test_every_field_is_in_a_table():
    fields = set()
    for field in pb.GenerateRequest.DESCRIPTOR.fields:
        if field.message_type is None:
            fields.add(field.name)
        else:
            fields.update(f"{field.name}.{inner.name}" for inner in field.message_type.fields)
    options = "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "mm_processor_kwargs"
    chat = {f"messages.{name}" for name in options}
    assert fields == {*SAMPLING, *OTHERS, *ELSEWHERE, *chat}
    assert set(SAMPLING) == set(SAMPLING_FIELDS)


def test_every_finish_reason_has_a_value():
    assert set(FINISH_REASONS) == set(FinishReason)


def test_every_sampling_parameter_of_http_is_in_grpc():
    params = {field.name for field in dataclasses.fields(SamplingParams)}
    asked = {name for each in (CompletionRequest, ChatRequest) for name in each.model_fields} & params
    assert asked - set(SAMPLING_FIELDS.values()) == IN_OTHER_FIELDS | LACKING
    assert "vllm_xargs" in ChatRequest.model_fields and "extra_args" in SAMPLING_FIELDS.values()


async def test_tokens_by_id_are_reported_as_candidates(chat_engine):
    reader = RequestReader(chat_engine.inputs, ServerConfig())
    made = await reader.generation(asked("response.logprob_token_ids", [7, 3]), stream=False)
    assert made.wanted.candidates and made.params.logprobs == 0
    request = asked("response.logprob_token_ids", [7, 3])
    request.response.output_candidates.top_n = 2
    assert (await reader.generation(request, stream=False)).params.logprobs == 2


def test_a_trace_may_be_longer_than_the_vocabulary():
    inputs: Any = SimpleNamespace(generation_defaults={}, model_config=SimpleNamespace(vocab_size=4))
    reader = RequestReader(inputs, ServerConfig())
    request = pb.GenerateRequest(text="a", decoding={"trace_decode_token_ids": [1, 2] * 5})
    made = reader._sampling_params(request, Wanted(), stream=False)
    assert made.trace_decode_token_ids == (1, 2) * 5
    for field in ("allowed_token_ids", "bad_words"):
        values = ["1"] * 5 if field == "bad_words" else [1] * 5
        with pytest.raises(RequestError, match=f"decoding.{field} has 5 entries; allowed: 4"):
            reader._sampling_params(pb.GenerateRequest(text="a", decoding={field: values}), Wanted(), stream=False)


@each_row("path", SAMPLING)
async def test_a_field_becomes_a_sampling_parameter(chat_engine, path):
    value = SAMPLING[path]
    made = await RequestReader(chat_engine.inputs, ServerConfig()).generation(asked(path, value), stream=False)
    default = await RequestReader(chat_engine.inputs, ServerConfig()).generation(asked("priority", 0), stream=False)
    given = getattr(made.params, SAMPLING_FIELDS[path])
    assert given == (tuple(value) if isinstance(value, list) else value)
    assert given != getattr(default.params, SAMPLING_FIELDS[path])


@pytest.mark.parametrize("path", OTHERS)
async def test_a_field_acts(chat_engine, path):
    value, acts = OTHERS[path]
    made = await RequestReader(chat_engine.inputs, ServerConfig()).generation(asked(path, value), stream=False)
    assert acts(made)
    if path not in ("text", "token_ids.ids", "messages.messages"):
        assert not acts(
            await RequestReader(chat_engine.inputs, ServerConfig()).generation(asked("sampling.seed", 1), stream=False)
        )


async def test_zeros_that_mean_something_are_not_left_out(chat_engine):
    reader = RequestReader(chat_engine.inputs, ServerConfig())
    reader._inputs.generation_defaults, before = {"temperature": 0.5, "top_k": 5, "min_p": 0.5}, {}
    try:
        plain = await reader.generation(asked("priority", 0), stream=False)
        zeros = pb.GenerateRequest(text="a", sampling={"top_k": 0, "min_p": 0.0})
        made = await reader.generation(zeros, stream=False)
        greedy = await reader.generation(asked("temperature", 0.0), stream=False)
    finally:
        reader._inputs.generation_defaults = before
    assert (plain.params.temperature, plain.params.top_k, plain.params.min_p) == (0.5, 5, 0.5)
    assert (made.params.temperature, made.params.top_k, made.params.min_p) == (0.5, 0, 0.0)
    assert greedy.params.is_greedy


async def test_messages_and_their_options(chat_engine):
    reader, tokenizer = RequestReader(chat_engine.inputs, ServerConfig()), chat_engine.inputs.tokenizer

    async def text(messages: list[dict[str, str]], **options: Any) -> str:
        request = pb.GenerateRequest(messages={"messages": messages, **options})
        made = await reader.generation(request, stream=True)
        assert made.params.max_tokens is None, "an answer has the rest of the context"
        return tokenizer.decode(made.prompt["prompt_token_ids"], skip_special_tokens=False)

    said = [{"role": "user", "content": "Hi"}]
    assert (await text(said)).endswith("<|im_start|>assistant\n")
    assert not (await text(said, add_generation_prompt=False)).endswith("assistant\n")
    begun = [*said, {"role": "assistant", "content": "Hello, I"}]
    assert (await text(begun, continue_final_message=True)).endswith("Hello, I")
    assert await text(said, chat_template_kwargs={"not_in_the_template": 1}) == await text(said)


async def test_wrong_values_are_refused_by_name(chat_engine):
    async with connected(chat_engine) as (_, stub):
        for path, values in WRONG.items():
            for value in values:
                code, details, fields = await refusal(stub.Generate(asked(path, value)))
                case = f"{path}={str(value)[:40]}: {details}"
                assert code is grpc.StatusCode.INVALID_ARGUMENT and len(details) < 2000, case
                assert fields == [NAMED.get(path, path)], case
        for request in (pb.GenerateRequest(), pb.ScoreRequest()):
            method = stub.Generate if isinstance(request, pb.GenerateRequest) else stub.Score
            assert (await refusal(method(request)))[2] == ["prompt"]
        both = pb.GenerateRequest(text="a", kv={"bypass_prefix_cache": True, "cache_salt": "a"})
        assert (await refusal(stub.Generate(both)))[2] == ["kv.cache_salt"]
        greedy = pb.GenerateRequest(text="a", temperature=0, sampling={"num_sequences": 2})
        assert (await refusal(stub.GenerateStream(greedy)))[2] == ["sampling.num_sequences"]
        late = pb.TokenizeRequest(messages={"messages": [{"role": "user", "content": "Hi"}]}, add_special_tokens=True)
        assert (await refusal(stub.Tokenize(late)))[2] == ["add_special_tokens"]
        assert (await refusal(stub.Tokenize(pb.TokenizeRequest())))[2] == ["prompt"]
        assert (await refusal(stub.Score(pb.ScoreRequest(text="a", candidates={}))))[2] == ["candidates"]
        assert (await refusal(stub.Score(pb.ScoreRequest(text="a", candidates=TOP_2 | {"top_n": 99}))))[2] == [
            "candidates"
        ]


async def test_models_are_called_by_their_names(chat_engine):
    requests = {
        "Generate": pb.GenerateRequest(text="a", model="c"),
        "GenerateStream": pb.GenerateRequest(text="a", model="c"),
        "Score": pb.ScoreRequest(text="a", model="c"),
        "Tokenize": pb.TokenizeRequest(text="a", model="c"),
        "Detokenize": pb.DetokenizeRequest(token_ids=[1], model="c"),
    }
    async with connected(chat_engine, served_model_name=("a", "b")) as (_, stub):
        for name, request in requests.items():
            assert (await refusal(getattr(stub, name)(request)))[0] is grpc.StatusCode.NOT_FOUND
        for given, answered in (("", "a"), ("a", "a"), ("b", "b")):
            request = pb.GenerateRequest(text="a", model=given, stopping={"max_new_tokens": 1})
            assert (await stub.Generate(request)).model == answered


def tag(number: int, wire_type: int) -> bytes:
    value, encoded = number << 3 | wire_type, b""
    while value > 127:
        encoded, value = encoded + bytes([value & 127 | 128]), value >> 7
    return encoded + bytes([value])


def mistyped(message: Descriptor, path: str = "") -> Iterator[tuple[str, bytes]]:
    """(field, a message in which it came as a 64-bit number, which none of them is)."""
    if message.full_name.startswith("google."):
        return
    for field in message.fields:
        yield path + field.name, tag(field.number, 1) + struct.pack("<d", 1.0)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for name, inner in mistyped(field.message_type, f"{path}{field.name}."):
                yield name, tag(field.number, 2) + bytes([len(inner)]) + inner
    yield f"{path}999", tag(999, 0) + b"\x01"


async def test_every_field_as_another_type_and_fields_that_are_none(chat_engine, tmp_path):
    (tmp_path / "key").write_text("operator")
    options = {"enable_admin": True, "admin_key_file": str(tmp_path / "key")}
    count = 0
    async with connected(chat_engine, **options) as (channel, _):
        for service in (INFERENCE, ADMIN):
            for method in service.methods:
                kind = channel.unary_stream if method.server_streaming else channel.unary_unary
                call = kind(f"/{service.full_name}/{method.name}")
                for name, data in mistyped(method.input_type):
                    refused = await refusal(call(data, metadata=(("authorization", "Bearer operator"),)))
                    assert (refused[0], refused[2]) == (grpc.StatusCode.INVALID_ARGUMENT, [name]), method.name
                    count += 1
                for data in (b"\xff\xff\xff", b"\x0a\x7f", tag(1, 2) + b"\x02\xff\xfe"):
                    refused = await refusal(call(data, metadata=(("authorization", "Bearer operator"),)))
                    assert refused[0] is grpc.StatusCode.INVALID_ARGUMENT, (method.name, data)
    assert count > 150


@pytest.mark.timeout(120)
async def test_large_messages_are_refused_without_work(chat_engine):
    """Nothing here may take long on the event loop, which all other calls share."""
    many = {
        "messages": pb.GenerateRequest(messages={"messages": [{}] * 400_000}),
        "messages.chat_template_kwargs": asked("messages.chat_template_kwargs", {str(key): 1 for key in range(50_000)}),
        "messages.mm_processor_kwargs": asked("messages.mm_processor_kwargs", {str(key): 1 for key in range(50_000)}),
        "stopping.stop_token_ids": asked("stopping.stop_token_ids", [1] * 4_000_000),
        "decoding.choice": asked("decoding.choice", {"choices": [""] * 400_000}),
        "token_ids": pb.GenerateRequest(token_ids={"ids": [1] * 8_000_000}),
        "text": pb.GenerateRequest(text="x" * 20_000_000),
    }
    unknown = tag(999, 0) + b"\x01"
    async with connected(chat_engine) as (channel, stub):
        call = channel.unary_unary("/jaxengine.v1.Inference/Generate")
        for field, request in many.items():
            data = request.SerializeToString()
            for sent in (data, data + unknown):
                code, _, fields = await refusal(call(sent))
                assert code is grpc.StatusCode.INVALID_ARGUMENT and fields == [field if sent is data else "999"]
        code, details, fields = await refusal(call(unknown * 400_000))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "not supported" in details and not fields
        # Such messages take seconds to parse or to read, so their fields are counted before that.
        parts = pb.GenerateRequest(messages={"messages": [{"role": "user", "parts": [{"text": ""}] * 2_000_000}]})
        struct = asked("decoding.extra_args", {str(key): 1 for key in range(200_000)})
        for sent in (unknown * 3_000_000, parts.SerializeToString(), struct.SerializeToString()):
            code, details, _ = await refusal(call(sent))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "more than 500000 fields" in details
        fewer = pb.GenerateRequest(messages={"messages": [{"role": "user", "parts": [{"text": ""}] * 100_001}]})
        assert "allowed: 100000" in (await refusal(call(fewer.SerializeToString())))[1]
        long = pb.DetokenizeRequest(token_ids=[1] * 2_000_000)
        assert (await refusal(stub.Detokenize(long)))[2] == ["token_ids"]


def test_fields_are_counted_as_the_parser_finds_them():
    """Fields that only look like messages, groups and bytes that are no message are counted without an error."""
    kind = pb.GenerateRequest.DESCRIPTOR
    many, fits = b"\x1a\x00" * (MAX_FIELDS + 1), b"\x1a\x00" * MAX_FIELDS
    bias = pb.GenerateRequest(text="", decoding={"logit_bias": dict.fromkeys(range(MAX_FIELDS - 2), 1.0)})
    text = pb.GenerateRequest(text=many.decode()).SerializeToString()
    nested = pb.GenerateRequest(messages={"messages": [{"parts": [{"text": "a"}]}] * 170_000}).SerializeToString()
    others = (b"\x0d____", b"\x09________", b"\x0b\x0c", b"\xff\xff\xff\xff\x0f\x80\x80\x00", b"\x18\x01")
    for data in (fits, text, bias.SerializeToString(), *(each * (MAX_FIELDS // 4) for each in others)):
        refuse_many_fields(data, kind)
    for data in (b"\x1a\xff", b"\xff" * 9, b"\x80" * 20, b"\x1a", b"\x18", b"\x0d", b"", b"\xaa\x06\x7f\x0a"):
        refuse_many_fields(data, kind)
    for data in (many, nested, *(each * (MAX_FIELDS + 1) for each in others)):
        with pytest.raises(RequestError, match="more than 500000 fields"):
            refuse_many_fields(data, kind)


def test_no_scalar_whose_zero_means_something_can_be_left_out_silently():
    """Where the default is not the type's zero, a field says whether it was given."""
    off = {"stopping.include_stop_strings", "stopping.ignore_eos"}
    off |= {"response.return_hidden_states", "response.return_sampling_mask"}
    defaults_other_than_zero = {
        *(path for path in SAMPLING if path not in off),
        "response.output_text",
        "messages.add_generation_prompt",
    }
    for path in defaults_other_than_zero:
        message: Any = pb.GenerateRequest()
        *groups, name = path.split(".")
        for group in groups:
            message = getattr(message, group)
        assert isinstance(message, Message)
        field = message.DESCRIPTOR.fields_by_name[name]
        assert field.has_presence or not isinstance(SAMPLING.get(path), int | float), path
