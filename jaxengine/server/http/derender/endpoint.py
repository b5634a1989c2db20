"""POST /v1/chat/completions/derender and /v1/completions/derender: what /inference/v1/generate answered, as OpenAI's
answers with texts, reasoning and tool calls.

They are the counterparts of the routes that end in /render, for routers in front of servers that only generate tokens.
A stream has no state here: the client sends all earlier tokens with each event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.params.options import RequestOptions
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.prompts import check_token_ids
from jaxengine.server.base.workers import Workers
from jaxengine.server.http.answer.answers import answers
from jaxengine.server.http.answer.sse import answer, json_response
from jaxengine.server.http.chat.answers import ChatCompletion
from jaxengine.server.http.chat.completion import ChatAnswer
from jaxengine.server.http.chat.protocol import ChatRequest, text_of
from jaxengine.server.http.chat.run import ChatServer
from jaxengine.server.http.completions.answers import Completion
from jaxengine.server.http.completions.endpoint import CompletionRun
from jaxengine.server.http.completions.protocol import CompletionRequest
from jaxengine.server.http.derender.protocol import (
    DerenderChat,
    DerenderCompletion,
    DerenderedChatChunk,
    DerenderedCompletionChunk,
    GivenAnswer,
    GivenChunk,
    GivenPiece,
    GivenUsage,
    StreamState,
    one_each,
    require,
)
from jaxengine.server.http.derender.recorded import RecordedEngine, Recording
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.errors import as_request_error
from jaxengine.server.http.request.limits import JsonRoute
from jaxengine.server.http.request.protocol import GenerationRequest, usage

# Fields of a request that need an engine.
_REFUSED = ("echo", "use_beam_search")
_OPTIONS = RequestOptions()


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes that end in /derender. Raises ConfigError for an unknown parser."""
    routes = APIRouter(tags=["render"], route_class=JsonRoute)
    server, names = ChatServer.open(engine, config), served_names(engine, config)
    workers = Workers()

    @routes.post("/v1/chat/completions/derender", response_class=Response)
    @answers(ChatCompletion | DerenderedChatChunk)
    async def derender_chat(body: DerenderChat, request: Request) -> Response:
        """Return the answer of /inference/v1/generate as a chat completion, or an event of its stream as a chunk.
        Raises RequestError for a body that cannot be read, ApiError (404) for an unknown model, OverloadedError,
        EngineDeadError.
        """
        require(body, "generate_response")
        model, _ = await choose_model(engine, body.model, names)
        ignored = _note_names(request, "chat_request", body.chat_request, ChatRequest)
        return await answer(request, _chat(server, body, model, workers, ignored))

    @routes.post("/v1/completions/derender", response_class=Response)
    @answers(Completion | DerenderedCompletionChunk)
    async def derender_completion(body: DerenderCompletion, request: Request) -> Response:
        """Return the answers of /inference/v1/generate, one for each prompt, as a completion, or an event of a stream
        as a chunk. Raises the errors of `derender_chat`.
        """
        require(body, "generate_responses")
        model, _ = await choose_model(engine, body.model, names)
        _note_names(request, "completion_request", body.completion_request, CompletionRequest)
        return await answer(request, _completion(engine, config, body, model, workers))

    return routes


def _note_names(
    request: Request, field: str, asked: Mapping[str, Any] | None, model: type[GenerationRequest]
) -> list[str]:
    """Add the fields of a nested request that its route does not know, and those that it ignores, to the names that the
    response's headers have, as "field.name". Return the list of those that are ignored, to which more may be added.

    field: the body's field with the nested request. asked: its fields; None for none. model: the route's request.
    """
    other = [name for name in asked or () if name not in model.known_fields()]
    request.state.unknown_fields += [f"{field}.{name}" for name in other if name not in model.ignored]
    ignored: list[str] = request.state.ignored_fields
    ignored += [f"{field}.{name}" for name in other if name in model.ignored and (asked or {})[name] is not None]
    return ignored


async def _chat(server: ChatServer, body: DerenderChat, model: str, workers: Workers, ignored: list[str]) -> Response:
    """Return the response to a DerenderChat: a chat completion, or with `stream` the chunk of an event (`_streamed`).
    model: model name in it. workers: threads for slow parts. ignored: list to which the names of chat_request's fields
    that have no effect for this model are added. Raises RequestError, also without a chat_request where the server has
    parsers, OverloadedError.
    """
    given = body.generate_chunk or body.generate_response
    assert given is not None
    inputs, name = server.engine.inputs, given.request_id
    if body.chat_request is None and (server.tool_format or server.reasoning_format):
        raise RequestError("chat_request is missing; it is needed, as this server has parsers", param="chat_request")
    ids = given.prompt_token_ids if body.prompt_token_ids is None else body.prompt_token_ids
    field = "generate_chunk" if body.stream else "generate_response"
    recording = await workers.run(_recording, given, field, body.stream_state, ids, inputs, server.config.max_n)
    chat = ChatRequest.of(_chat_fields(body, given, ids, inputs.config.max_logprobs))
    recorded = dataclasses.replace(server, engine=RecordedEngine(server.engine, {name: recording}, workers))
    run = ChatAnswer(recorded, chat, name, model, _OPTIONS)
    without_effect: list[str] = []
    await run.prepare(without_effect)
    ignored += [f"chat_request.{each}" for each in without_effect]
    number = len(ids or ()) if body.prompt_tokens is None else body.prompt_tokens
    if isinstance(given, GivenChunk):
        return _streamed(given, await _last(run, recording), run.head, number, body.stream_state)
    found = await run.body()
    return json_response({**found, **_about(given), "usage": _usage(number, [given])})


async def _completion(
    engine: EngineClient, config: ServerConfig, body: DerenderCompletion, model: str, workers: Workers
) -> Response:
    """Return the response to a DerenderCompletion: a completion, or with `stream` the chunk of an event (`_streamed`).
    Without a completion_request all log-probabilities are listed; its n counts as at least the choices of an answer.
    model: model name in it. workers: threads for slow parts. Raises RequestError for no answers or more than
    max_prompts, for lists of another length, for fields that are invalid or need an engine, and as `_recording` does;
    OverloadedError.
    """
    given = [body.generate_chunk] if body.generate_chunk is not None else body.generate_responses or []
    if not given:
        raise RequestError("generate_responses is empty; at least one is needed", param="generate_responses")
    if len(given) > config.max_prompts:
        problem = f"generate_responses holds {len(given)} answers; allowed: 1 to {config.max_prompts} (max_prompts)"
        raise RequestError(problem, param="generate_responses")
    if body.stream:
        prompts, counts = [body.prompt_token_ids], [body.prompt_tokens]
    else:
        prompts = one_each("prompt_token_ids", body.prompt_token_ids, len(given))
        counts = one_each("prompt_tokens", body.prompt_tokens, len(given))
    if not all(each is None or (isinstance(each, int) and each >= 0) for each in counts):
        problem = f"prompt_tokens is {show_value(body.prompt_tokens)}; allowed: numbers from 0, and one with stream"
        raise RequestError(problem, param="prompt_tokens")
    prompts = [each.prompt_token_ids if ids is None else ids for ids, each in zip(prompts, given, strict=True)]
    inputs, name = engine.inputs, given[0].request_id
    asked = body.completion_request
    if asked is None:
        asked = _all_logprobs(given, inputs.config.max_logprobs, chat=False)
    _refuse(asked)
    fields = {**asked, "prompt": [0], "prompt_embeds": None, "stream": body.stream, "stream_options": None}
    try:
        completion = CompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise as_request_error(error) from None
    field = "generate_chunk" if body.stream else "generate_responses"
    recordings: dict[str, Recording] = {}
    for at, (each, ids) in enumerate(zip(given, prompts, strict=True)):
        recordings[name if len(given) == 1 else f"{name}-{at}"] = await workers.run(
            _recording, each, field, body.stream_state, ids, inputs, config.max_n
        )
    num_choices = max((choice.index + 1 for each in given for choice in each.choices), default=1)
    if not body.stream and (completion.n is None or 0 < completion.n < num_choices):
        completion.n = num_choices  # with a smaller one, choices of two prompts would have the same index
    recorded: Any = RecordedEngine(engine, recordings, workers)  # it pools nothing
    run = CompletionRun(recorded, config, completion, name, model, _OPTIONS)
    run.prompts = [{"prompt_token_ids": each.prompt_ids} for each in recordings.values()]
    number = sum(len(ids or ()) if count is None else count for count, ids in zip(counts, prompts, strict=True))
    first = given[0]
    if isinstance(first, GivenChunk):
        return _streamed(first, await _last(run, recordings[name]), run.head, number, body.stream_state)
    about = _about(first) if len(given) == 1 else {}
    about.pop("prompt_logprobs", None)  # a completion has them in its choices
    return json_response({**await run.answer(), **about, "usage": _usage(number, given)})


async def _last(run: ChatAnswer | CompletionRun, recording: Recording) -> list[dict[str, Any]]:
    """Return the chunks of a recording's last piece; [] for one without pieces. Raises RequestError."""
    chunks = [each async for each in run.chunks()] if recording.pieces else []
    return chunks[len(recording.pieces) - 1] if chunks else []  # a list with token counts may follow


def _recording(
    given: GivenAnswer | GivenChunk,
    field: str,
    state: StreamState | None,
    ids: Any,
    inputs: InputProcessor,
    max_n: int,
) -> Recording:
    """Return what the engine has generated: the choices of an answer; or those of an event, after the earlier tokens in
    `state` as a piece of their own, and no piece for an event without choices. Slow for many log-probabilities: call it
    on a thread.

    field: name of the field that has `given`, for errors. ids: token ids of the prompt, or None. max_n: largest number
    of choices. Raises RequestError for ids that are none of the model's, for more tokens than its context has, for too
    many choices, for indices that are too large or that two choices have, and for an event with several choices.
    """
    pieces: list[Sequence[GivenPiece]] = [given.choices] if given.choices else []
    earlier = [] if state is None else state.output_token_ids
    prompt_ids = [] if ids is None else ids
    if not isinstance(prompt_ids, list) or not all(type(each) is int for each in prompt_ids):
        problem = f"prompt_token_ids must be a list of token ids, got {show_value(prompt_ids)}"
        raise RequestError(problem, param="prompt_token_ids")
    if isinstance(given, GivenChunk):
        if len(given.choices) > 1:
            raise RequestError(f"{field} has {len(given.choices)} choices; allowed: 1 at most", param=field)
        if pieces and earlier:
            pieces.insert(0, [GivenPiece(index=given.choices[0].index, token_ids=earlier)])
    elif not pieces:
        raise RequestError(f"{field} has no choices; at least one is needed", param=field)
    if len(given.choices) > max_n:
        raise RequestError(f"{field} has {len(given.choices)} choices; allowed: {max_n} (max_n)", param=field)
    indices = [choice.index for choice in given.choices]
    if len(set(indices)) < len(indices) or max(indices, default=0) >= max_n:
        problem = f"{field} has choices with the indices {show_value(indices)}; allowed: 0 to {max_n - 1}, each once"
        raise RequestError(problem, param=field)
    most, size = inputs.config.max_model_len, inputs.model_config.vocab_size
    for choice in given.choices:
        number = len(prompt_ids) + len(earlier) + len(choice.token_ids or ())
        if number > most:
            raise RequestError(
                f"{field} and its prompt have {number} tokens; allowed: {most} (max_model_len)", param=field
            )
        check_token_ids(field, choice.token_ids or [], size)
        for position in choice.positions(field) or ():
            check_token_ids(field, list(position), size)
    check_token_ids("prompt_token_ids", prompt_ids, size)
    check_token_ids("stream_state", earlier, size)
    return Recording(pieces, prompt_ids, getattr(given, "kv_transfer_params", None))


def _chat_fields(
    body: DerenderChat, given: GivenAnswer | GivenChunk, ids: list[int] | None, max_logprobs: int
) -> dict[str, Any]:
    """Return the fields of the ChatRequest that a DerenderChat stands for. Known token ids of the prompt replace its
    messages, of which only the last one's text stays. Without chat_request all log-probabilities of the answer are
    listed, max_logprobs at most (-1: no limit). Raises RequestError for fields that need an engine.
    """
    asked = body.chat_request
    fields = {"messages": []} | (_all_logprobs([given], max_logprobs, chat=True) if asked is None else asked)
    _refuse(fields)
    fields |= {"stream": body.stream, "stream_options": None}
    if ids or asked is None:
        listed = fields["messages"] if isinstance(fields["messages"], list) else []
        last = listed[-1] if listed and isinstance(listed[-1], dict) else {}
        fields["messages"] = [{"role": last.get("role", "user"), "content": text_of(last.get("content"))}]
        # Without a conversation the prompt does not matter, but there has to be one.
        fields["kv_transfer_params"] = {"prompt_token_ids": ids or [0]}
    else:
        fields["kv_transfer_params"] = None
    return fields


def _all_logprobs(given: Sequence[GivenAnswer | GivenChunk], max_logprobs: int, *, chat: bool) -> dict[str, Any]:
    """Return fields of a request, a ChatRequest or a CompletionRequest, that lists all log-probabilities that the
    answers have, but max_logprobs at most (-1: no limit); {} if they have none.
    """
    listed = [each.logprobs.content or [] for one in given for each in one.choices if each.logprobs is not None]
    most = max((len(position.top_logprobs) for each in listed for position in each), default=0)
    if not listed:
        return {}
    most = most if max_logprobs == -1 else min(most, max_logprobs)
    return {"logprobs": True, "top_logprobs": most} if chat else {"logprobs": most}


def _refuse(fields: Mapping[str, Any]) -> None:
    """Raise RequestError if a request has echo or use_beam_search, which need more than the tokens of its answer."""
    for name in _REFUSED:
        if fields.get(name):
            raise RequestError(f"{name} is not possible for an answer of /inference/v1/generate", param=name)


def _about(given: GivenAnswer) -> dict[str, Any]:
    """Return an answer's prompt_logprobs, kv_transfer_params and metrics by name, without those that are None."""
    names = ("prompt_logprobs", "kv_transfer_params", "metrics")
    return {name: value for name in names if (value := getattr(given, name)) is not None}


def _usage(num_prompt_tokens: int, given: Sequence[GivenAnswer | GivenChunk]) -> dict[str, Any]:
    """Return the usage object of complete answers, whose tokens are counted; none is counted as cached."""
    number = sum(len(choice.token_ids or ()) for each in given for choice in each.choices)
    return usage(num_prompt_tokens, number, 0)


def _streamed(
    given: GivenChunk, chunks: Sequence[dict[str, Any]], head: dict[str, Any], number: int, state: StreamState | None
) -> Response:
    """Return the response for an event: one chunk with all that is new, and the next state. chunks: chunks of the event
    by OpenAI's rules. head: fields of every chunk. number: prompt tokens for the usage; 0 for the event's own count.
    state: the earlier state; None for the first event.
    """
    merged: dict[str, Any] = {**head, "choices": []}
    for chunk in chunks:
        merged |= {name: value for name, value in chunk.items() if name != "choices"}
        for choice in chunk["choices"]:
            merged["choices"] = [_joined(merged["choices"][0], choice) if merged["choices"] else choice]
    if given.usage is not None:
        counts: GivenUsage = given.usage
        merged["usage"] = usage(number or counts.prompt_tokens, counts.completion_tokens or 0, 0)
    if given.metrics is not None:
        merged["metrics"] = given.metrics
    earlier = [] if state is None else state.output_token_ids
    added = [token_id for choice in given.choices for token_id in choice.token_ids or ()]
    return json_response({"chunk": merged, "stream_state": {"output_token_ids": [*earlier, *added]}})


def _joined(choice: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return one choice of a chunk with the contents of two, which follow each other: texts and lists of calls are
    joined, other fields are the later one's unless they are None or empty there.
    """
    joined = choice | {name: value for name, value in later.items() if value is not None and value != []}
    if "delta" in choice:
        delta = dict(choice["delta"])
        for name, value in later["delta"].items():
            delta[name] = delta[name] + value if name != "role" and name in delta else value
        joined["delta"] = delta
    return joined
