"""Answers have vLLM's keys, null where there is nothing to say: clients read them as attributes, or by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import ErrorDetail, Usage
from jaxengine.server.http.app import create_app
from jaxengine.server.http.chat.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatMessage,
)
from jaxengine.server.http.completions.answers import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
)
from jaxengine.server.http.models import ModelCard
from jaxengine.server.http.pooling.answers import (
    Classified,
    Document,
    Embedding,
    Listed,
    Pooled,
    Ranked,
    Ranking,
    Scored,
)
from jaxengine.server.http.responses.answers import ResponseAnswer
from jaxengine.server.http.tokenize import DetokenizeAnswer, TokenizeAnswer
from tests.jaxengine.server.asgi_client import post
from tests.jaxengine.server.openai_client import openai_client
from tests.jaxengine.server.scripted_engine import ScriptedEngine
from tests.tables import each_row

_BODY = (
    "id object created model choices usage service_tier system_fingerprint kv_transfer_params ec_transfer_params "
    "metrics"
)
_LISTED = "id object created model data usage"
# Type -> the keys that vLLM's answer of this kind always has, also where they are null.
KEYS: dict[Any, str] = {
    ChatMessage: "role content refusal annotations audio function_call reasoning reasoning_content",
    ChatChoice: "index message logprobs finish_reason stop_reason token_ids routed_experts",
    ChatCompletion: f"{_BODY} prompt_logprobs prompt_token_ids prompt_text",
    ChatChunkChoice: "index delta logprobs finish_reason",
    ChatCompletionChunk: "id object created model choices",
    CompletionChoice: (
        "index text logprobs finish_reason stop_reason token_ids prompt_logprobs prompt_token_ids routed_experts"
    ),
    Completion: _BODY,
    CompletionChunkChoice: "index text logprobs finish_reason stop_reason token_ids prompt_token_ids",
    CompletionChunk: "id object created model choices",
    Usage: "prompt_tokens total_tokens completion_tokens prompt_tokens_details",
    Listed[Embedding]: _LISTED,
    Embedding: "index object embedding",
    Pooled: "index object data",
    Classified: "index label probs num_classes",
    Scored: "index object score",
    Ranking: "id model results usage",
    Ranked: "index relevance_score",  # and the document, unless the request leaves it out
    Document: "text multi_modal",
    ModelCard: "id object created owned_by root parent max_model_len permission",
    TokenizeAnswer: "count max_model_len tokens token_strs",
    DetokenizeAnswer: "prompt",
    ErrorDetail: "message type param code",
    ResponseAnswer: (
        "id created_at incomplete_details instructions metadata model object output parallel_tool_calls temperature "
        "tool_choice tools top_p background max_output_tokens max_tool_calls previous_response_id prompt reasoning "
        "service_tier status text top_logprobs truncation usage user input_messages output_messages presence_penalty "
        "frequency_penalty"
    ),
}
# Those that vLLM does not have.
MORE = {ResponseAnswer: {"error", "store", "completed_at", "prompt_cache_key", "safety_identifier"}}


@each_row("kind", KEYS)
def test_answers_have_vllms_keys(kind: type[BaseModel]):
    """tests of the document hold what endpoints write to these types."""
    always = {name for name, field in kind.model_fields.items() if field.is_required()}
    assert always - MORE.get(kind, set()) == set(KEYS[kind].split())


@pytest.fixture
def apps(chat_engine):
    config = ServerConfig(served_model_name="tiny", reasoning_parser="qwen3")
    return [create_app(ScriptedEngine(chat_engine, text), config) for text in ("Yes.", "<think>Hm.</think>Yes.")]


HI = [{"role": "user", "content": "Hi"}]


async def test_a_client_reads_reasoning_where_there_is_none(apps):
    for app, reasoning in zip(apps, (None, "Hm."), strict=True):
        answer = await openai_client(app).chat.completions.create(model="tiny", messages=HI)
        message: Any = answer.choices[0].message
        assert (message.reasoning, message.reasoning_content, message.content) == (reasoning, reasoning, "Yes.")
        assert message.tool_calls is None and "tool_calls" not in message.model_fields_set


async def test_keys_of_a_stream_are_there_where_they_have_a_value(apps):
    """Clients append whatever a delta's key has, and look for content only where there is no reasoning."""
    answer = await post(apps[1], "/v1/chat/completions", messages=HI, stream=True)
    deltas = [event["choices"][0]["delta"] for event in answer.events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(value for delta in deltas[1:] for value in delta.values())
    assert {"reasoning": "Hm.", "reasoning_content": "Hm."}.items() <= _joined(deltas).items()
    first, second = answer.events[:2]
    assert (first["prompt_token_ids"], first["prompt_text"]) == (None, None) and "prompt_text" not in second


def _joined(deltas):
    return {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "reasoning_content")}
