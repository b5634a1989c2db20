"""Every field of a completion request acts or is refused by name; none is taken in silence.

A field is either a row of CASES, which says how to see that it acts, or one of `CompletionRequest.refused`.
"""

from __future__ import annotations

import json
import logging
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from jaxengine.requests.params.repetition import RepetitionDetectionParams
from jaxengine.requests.params.sampling_params import RequestOutputKind
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.adapters import LoadRequest, UnloadRequest
from jaxengine.server.http.app import create_app
from jaxengine.server.http.audio.protocol import TranscriptionRequest
from jaxengine.server.http.chat.batch import BatchChatRequest
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.completions.generative_scoring import GenerativeScoringRequest
from jaxengine.server.http.completions.protocol import CompletionRequest
from jaxengine.server.http.generate import GenerateRequest
from jaxengine.server.http.messages.protocol import Conversation, MessagesRequest
from jaxengine.server.http.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from jaxengine.server.http.responses.protocol import ResponsesRequest
from jaxengine.server.http.tokenize import DetokenizeRequest, TokenizeRequest
from tests.jaxengine.server.asgi_client import Answer, Recorder, post
from tests.tables import each_row

PATH = "/v1/completions"
TEXT = "The quick brown fox"
BASE = {"prompt": TEXT, "max_tokens": 3, "ignore_eos": True, "seed": 1}


class Seen(NamedTuple):
    """What a request came to: how the engine was called, how texts were encoded, what was logged and answered."""

    calls: list[Any]
    special: list[bool]
    log: str
    answer: Answer
    sessions: list[str | None]

    @property
    def prompt(self) -> Any:
        return self.calls[0][0]

    @property
    def params(self) -> Any:
        return self.calls[0][1]

    @property
    def choice(self) -> dict[str, Any]:
        return self.answer.json["choices"][0]

    @property
    def usage(self) -> dict[str, Any]:
        return self.answer.json["usage"]


class Case(NamedTuple):
    """A value of a field, and what it does to a request that has `others` already.

    seen: whether it acted, from the request without it and the one with it.
    """

    value: Any
    seen: Callable[[Seen, Seen], bool]
    others: dict[str, Any] = {}


def as_param(name: str, value: Any, expected: Any = None) -> tuple[str, Case]:
    """A field that the engine gets as a sampling parameter; the sampler's tests show what each of them does."""
    expected = value if expected is None else expected
    return name, Case(
        value,
        lambda before, after: getattr(after.params, name) == expected and getattr(before.params, name) != expected,
    )


CASES: dict[str, Case] = {
    **dict(
        [
            as_param("allowed_token_ids", [5, 6], (5, 6)),
            as_param("bad_words", ["dog"], ("dog",)),
            as_param("frequency_penalty", 0.5),
            as_param("ignore_eos", False),
            as_param("include_stop_str_in_output", True),
            as_param("logit_bias", {"7": 2}, {7: 2.0}),
            as_param("min_p", 0.1),
            as_param("min_tokens", 2),
            as_param("presence_penalty", 0.5),
            as_param("repetition_penalty", 1.5),
            as_param(
                "repetition_detection",
                {"max_pattern_size": 9, "min_count": 3},
                RepetitionDetectionParams(max_pattern_size=9, min_count=3),
            ),
            as_param("seed", 5),
            as_param("skip_special_tokens", False),
            as_param("spaces_between_special_tokens", False),
            as_param("stop", ["x"], ("x",)),
            as_param("stop_token_ids", [4], (4,)),
            as_param("stream_interval", 4),
            as_param("temperature", 0.5),
            as_param("top_k", 7),
            as_param("top_p", 0.9),
            as_param("return_sampling_mass", True),
            as_param("return_sampling_mask", True),
            as_param("trace_decode_token_ids", [7, 8, 7], (7, 8, 7)),
        ]
    ),
    "vllm_xargs": Case(
        {"favour": 1.5},
        lambda before, after: (before.params.extra_args, after.params.extra_args) == (None, {"favour": 1.5}),
    ),
    "kv_transfer_params": Case(
        {"do_remote_prefill": False},
        lambda before, after: (
            after.params.extra_args == {"kv_transfer_params": {"do_remote_prefill": False}}
            and before.params.extra_args is None
        ),
    ),
    "add_special_tokens": Case(False, lambda before, after: (before.special, after.special) == ([True], [False])),
    # Only n is allowed, which asks for nothing.
    "best_of": Case(2, lambda before, after: after.answer.error["param"] == "best_of"),
    "cache_salt": Case("pepper", lambda before, after: after.prompt["cache_salt"] == "pepper"),
    "echo": Case(True, lambda before, after: after.choice["text"] == TEXT + before.choice["text"]),
    # Only with use_beam_search; what it does, the tests of beam searches show.
    "length_penalty": Case(2.0, lambda before, after: after.answer.error["param"] == "length_penalty"),
    "logprobs": Case(
        2, lambda before, after: before.choice["logprobs"] is None and len(after.choice["logprobs"]["tokens"]) == 3
    ),
    "logprob_token_ids": Case(
        [5, 6],
        lambda before, after: all(
            set(top) == {"token_id:5", "token_id:6", token}
            for token, top in zip(
                after.choice["logprobs"]["tokens"], after.choice["logprobs"]["top_logprobs"], strict=True
            )
        ),
        {"logprobs": 2, "return_tokens_as_token_ids": True},
    ),
    # Only of an engine with these options; what they do, tests/jaxengine/server/http/test_captured.py shows.
    "capture": Case(["residual:1"], lambda before, after: after.answer.error["param"] == "capture"),
    "return_hidden_states": Case(True, lambda before, after: after.answer.error["param"] == "return_hidden_states"),
    # Only of an engine with steer; what it does, the engine's tests show.
    "steer": Case(
        [{"at": "residual:1", "vector": [1.0], "scale": 2}],
        lambda before, after: after.answer.error["param"] == "steer",
    ),
    # Only of an engine with enable_return_routed_experts; what it does, tests of its own show.
    "routed_experts_prompt_start": Case(
        1, lambda before, after: after.answer.error["param"] == "routed_experts_prompt_start", {"prompt": [5, 6, 7]}
    ),
    "max_tokens": Case(2, lambda before, after: after.usage["completion_tokens"] == 2),
    "model": Case(
        "other", lambda before, after: [each.answer.json["model"] for each in (before, after)] == ["tiny", "other"]
    ),
    "n": Case(2, lambda before, after: len(after.answer.json["choices"]) == 2),
    "priority": Case(1, lambda before, after: [each.calls[0][3] for each in (before, after)] == [0, 1]),
    # test_prompt_embeds.py has an engine that takes them.
    "prompt_embeds": Case("AAAA", lambda before, after: after.answer.error["param"] == "prompt_embeds"),
    "prompt": Case("Another", lambda before, after: after.prompt["prompt"] == "Another"),
    "prompt_logprobs": Case(
        1, lambda before, after: len(after.choice["prompt_logprobs"]) == after.usage["prompt_tokens"]
    ),
    "prompt_logprob_start": Case(
        2,
        lambda before, after: (
            [each is None for each in after.choice["prompt_logprobs"]][:4] == [True, True, True, False]
            and after.choice["prompt_logprobs"][3:] == before.choice["prompt_logprobs"][3:]
        ),
        {"prompt_logprobs": 1, "prompt": [5, 6, 7, 8, 9]},
    ),
    "prompt_logprob_token_ids": Case(
        [3, 900],
        lambda before, after: (
            all({"3", "900"} <= each.keys() for each in after.choice["prompt_logprobs"][1:])
            and all("900" not in each for each in before.choice["prompt_logprobs"][1:])
        ),
        {"prompt_logprobs": 0, "prompt": [5, 6, 7, 8, 9]},
    ),
    "request_id": Case("mine", lambda before, after: after.answer.json["id"] == after.calls[0][2] == "cmpl-mine"),
    "response_format": Case(
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [7]}}},
        lambda before, after: json.loads(after.choice["text"]) == 7,
        {"ignore_eos": False, "max_tokens": 20},
    ),
    "return_token_ids": Case(
        True,
        lambda before, after: (
            before.choice["token_ids"] is None
            and len(after.choice["token_ids"]) == 3
            and after.choice["prompt_token_ids"] == after.prompt["prompt_token_ids"]
        ),
    ),
    "return_tokens_as_token_ids": Case(
        True,
        lambda before, after: (
            all(token.startswith("token_id:") for token in after.choice["logprobs"]["tokens"])
            and before.choice["logprobs"]["tokens"] != after.choice["logprobs"]["tokens"]
        ),
        {"logprobs": 1},
    ),
    "return_weight_versions": Case(
        True,
        lambda before, after: (
            "weight_versions" not in before.choice
            and [(span["start"], span["end"]) for span in after.choice["weight_versions"]] == [(0, 3)]
        ),
    ),
    "stream": Case(
        True,
        lambda before, after: (
            1 <= len(after.answer.events) <= 3 and after.params.output_kind is RequestOutputKind.DELTA
        ),
    ),
    "session_id": Case("talk", lambda before, after: (before.sessions, after.sessions) == ([None], ["talk"])),
    "stream_options": Case(
        {"include_usage": True, "continuous_usage_stats": True},
        lambda before, after: (
            all("usage" in event for event in after.answer.events)
            and not any("usage" in event for event in before.answer.events)
        ),
        {"stream": True},
    ),
    "structured_outputs": Case(
        {"choice": ["certainly"]},
        lambda before, after: after.choice["text"] == "certainly",
        {"ignore_eos": False, "max_tokens": 20},
    ),
    "timeout": Case(0.001, lambda before, after: after.choice["stop_reason"] == "timeout", {"max_tokens": 200}),
    "truncate_prompt_tokens": Case(
        2, lambda before, after: after.prompt["prompt_token_ids"] == before.prompt["prompt_token_ids"][-2:]
    ),
    "truncation_side": Case(
        "right",
        lambda before, after: (
            len(after.prompt["prompt_token_ids"]) == 2
            and before.prompt["prompt_token_ids"] != after.prompt["prompt_token_ids"]
        ),
        {"truncate_prompt_tokens": 2},
    ),
    "use_beam_search": Case(
        True,
        lambda before, after: len(before.calls) == 1 and len(after.calls) > 1 and after.params.logprobs == 4,
        {"seed": None, "n": 2},
    ),
    "user": Case("some one", lambda before, after: "'some one'" in after.log and "'some one'" not in before.log),
}


@pytest.fixture
def ask(chat_engine, caplog, monkeypatch):
    """Sends a request and tells what came of it."""
    recorder, tokenizer = Recorder(chat_engine), chat_engine.inputs.tokenizer
    app = create_app(recorder, ServerConfig(served_model_name=("tiny", "other")))
    encode_batch, special = tokenizer.encode_batch, []

    def encode(texts, add_special_tokens=True):
        special.append(add_special_tokens)
        return encode_batch(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", encode)
    caplog.set_level(logging.DEBUG, "jaxengine.server.http")

    async def send(fields: dict[str, Any]) -> Seen:
        for record in (recorder.calls, recorder.sessions, special, caplog.records):
            record.clear()
        caplog.clear()
        answer = await post(app, PATH, **fields)
        return Seen(list(recorder.calls), special[:1], caplog.text, answer, list(recorder.sessions))

    return send


def test_every_field_has_a_row():
    assert set(CASES) == set(CompletionRequest.model_fields)
    assert not set(CASES) & set(CompletionRequest.refused)


@each_row("field", sorted(CASES))
async def test_a_field_acts(ask, field):
    case = CASES[field]
    fields = {**BASE, **case.others}
    before, after = await ask(fields), await ask({**fields, field: case.value})
    assert before.answer.status == 200, before.answer.body
    assert case.seen(before, after), after.answer.body
    if field not in ("prompt", "max_tokens"):
        default = await ask({**{name: value for name, value in fields.items() if name != field}, field: None})
        assert default.answer.status == 200  # as clients say that they leave it open


@each_row("field", sorted(CompletionRequest.refused))
async def test_a_field_that_is_not_built_is_refused(ask, field):
    for value in ("x", 7, {"a": 1}, [[1]]):
        refused = (await ask({**BASE, field: value})).answer
        assert refused.status == 400 and refused.error["param"] == field and field in refused.error["message"]
    for value in (None, *CompletionRequest.refused[field]):
        seen = await ask({**BASE, field: value})
        assert seen.answer.status == 200 and "x-unknown-fields" not in seen.answer.headers


# Fields of vLLM 0.33's requests: those of most, and what each has of its own.
_TEXT = """
    cache_salt ec_transfer_params frequency_penalty ignore_eos include_stop_str_in_output kv_transfer_params logit_bias
    min_p mm_payload model presence_penalty priority repetition_penalty request_id return_mm_kwargs seed session_id
    skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream structured_outputs temperature top_k
    top_p user vllm_xargs watermarking
"""
_BOTH = f"""{_TEXT}
    add_special_tokens allowed_token_ids bad_words echo length_penalty logprob_token_ids logprobs max_tokens min_tokens
    n prompt_logprobs repetition_detection response_format return_token_ids return_token_offsets
    return_tokens_as_token_ids return_weight_versions routed_experts_prompt_start stream_interval stream_options
    thinking_token_budget truncate_prompt_tokens truncation_side use_beam_search
"""
_POOLED = """
    cache_salt chat_template_kwargs mm_processor_kwargs model padding priority request_id truncate_prompt_tokens
    truncation_side use_activation user
"""
_INPUT = f"""{_POOLED}
    add_generation_prompt add_special_tokens chat_template continue_final_message input media_io_kwargs messages
"""
_CHAT = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message include_reasoning
    max_completion_tokens media_io_kwargs messages mm_processor_kwargs tool_choice top_logprobs
"""
_CLAUDE = "chat_template_kwargs messages model output_config system thinking tool_choice tools"
_PAIRS = f"{_POOLED} instruction max_tokens_per_doc max_tokens_per_query"
_VECTORS = f"{_INPUT} dimensions embed_dtype encoding_format endianness"
OF_VLLM = {
    CompletionRequest: f"{_BOTH} prompt prompt_embeds suffix",
    ChatRequest: f"{_BOTH} {_CHAT} documents parallel_tool_calls reasoning_effort return_prompt_text tools",
    BatchChatRequest: f"""{_CHAT}
        best_of cache_salt early_stopping echo frequency_penalty guided_decoding_backend include_stop_str_in_output
        length_penalty logit_bias logprob_token_ids logprobs max_tokens min_p model n presence_penalty priority
        repetition_penalty request_id response_format return_token_ids return_tokens_as_token_ids seed stop
        structured_outputs temperature top_k top_p use_beam_search user watermarking
    """,
    ResponsesRequest: f"""{_TEXT}
        background chat_template_kwargs enable_response_messages include include_reasoning input instructions
        max_output_tokens max_tool_calls media_io_kwargs metadata mm_processor_kwargs parallel_tool_calls
        previous_input_messages previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention
        reasoning safety_identifier service_tier store text tool_choice tools top_logprobs truncation
    """,
    MessagesRequest: f"""{_CLAUDE}
        cache_salt ec_transfer_params kv_transfer_params max_tokens metadata mm_payload return_mm_kwargs stop_sequences
        stream temperature top_k top_p vllm_xargs watermarking
    """,
    Conversation: _CLAUDE,
    EmbeddingRequest: _VECTORS,
    PoolingRequest: f"{_VECTORS} task",
    ClassifyRequest: _INPUT,
    ScoreRequest: f"{_PAIRS} data_1 data_2 documents items queries text_1 text_2",
    RerankRequest: f"{_PAIRS} documents query top_n",
    TokenizeRequest: """
        add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message
        media_io_kwargs messages mm_processor_kwargs model prompt return_token_strs tools
    """,
    DetokenizeRequest: "model tokens",
    GenerateRequest: """
        cache_salt content_parts ec_transfer_params features kv_transfer_params model output_mode parse_context priority
        reasoning_ended reasoning_parser_kwargs request_id return_token_ids sampling_params stream stream_options
        token_ids token_offsets
    """,
    GenerativeScoringRequest: """
        add_special_tokens apply_softmax cache_salt item_first items label_token_ids model priority query request_id
    """,
    LoadRequest: "is_3d_lora_weight load_inplace lora_name lora_path",
    UnloadRequest: "lora_int_id lora_name",
    TranscriptionRequest: """
        frequency_penalty hotwords include_stop_str_in_output language length_penalty max_completion_tokens min_p model
        n presence_penalty prompt repetition_penalty response_format seed stream stream_continuous_usage_stats
        stream_include_usage temperature timestamp_granularities to_language top_k top_p use_beam_search vllm_xargs
        watermarking
    """,
}


@each_row("model", OF_VLLM, ids=[model.__name__ for model in OF_VLLM])
def test_no_field_of_vllm_is_taken_in_silence(model):
    """Each is declared, refused by its name, or named in the answer as one without effect."""
    assert not set(OF_VLLM[model].split()) - model.known_fields() - model.ignored


SAMPLES = {str: "\u2603", int: 3, float: 0.5, bool: True, list: [{}], dict: {"\u2603": [1]}}


def kinds_of(annotation: Any) -> set[type]:
    """JSON types that may be right for a field. What SAMPLES holds for list, dict and Literal never is."""
    if typing.get_origin(annotation) is typing.Annotated:
        return kinds_of(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (list, dict, typing.Literal):
        return set()
    parts = typing.get_args(annotation)
    return set().union(*map(kinds_of, parts)) if parts else {annotation} | ({int} if annotation is float else set())


@each_row("field", sorted(CASES))
async def test_a_value_of_another_type_is_refused(ask, field):
    right = kinds_of(CompletionRequest.model_fields[field].annotation)
    right |= {bool} if field == "logprobs" else set()  # true is 1
    wrong = [sample for kind, sample in SAMPLES.items() if kind not in right]
    assert len(wrong) >= 4
    for value in wrong:
        refused = (await ask({**BASE, "stream": field == "stream_options", field: value})).answer
        assert refused.status == 400 and refused.error["param"] == field, (value, refused.body)
        assert field in refused.error["message"]
