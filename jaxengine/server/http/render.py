"""POST /v1/chat/completions/render, and the same of completions, messages, responses and Cohere's chat: the request as
/inference/v1/generate takes it.

Nothing is generated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.media.inputs import READY
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError, prompt_length_error
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.prompts import PromptEncoder
from jaxengine.server.http.answer.answers import ABSENT, Answer, answers
from jaxengine.server.http.answer.sse import encode_json, json_response
from jaxengine.server.http.chat.cohere_protocol import CohereChatRequest
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.chat.run import ChatRun, ChatServer
from jaxengine.server.http.completions.endpoint import CompletionRun
from jaxengine.server.http.completions.protocol import CompletionRequest
from jaxengine.server.http.generate import GenerateSampling
from jaxengine.server.http.messages.protocol import MessagesRequest
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.errors import renaming
from jaxengine.server.http.request.limits import JsonRoute, convert
from jaxengine.server.http.request.protocol import GenerationRequest
from jaxengine.server.http.responses.input import read_input
from jaxengine.server.http.responses.protocol import ResponsesRequest, as_response_error

# Fields of SamplingParams that /inference/v1/generate sets itself.
_ITS_OWN = frozenset(("detokenize", "output_kind"))
_DEFAULTS = SamplingParams()
_PLACES = "return_token_offsets"


class RenderedChatRequest(ChatRequest):
    """A conversation to render.

    Attributes:
      return_token_offsets: also return `token_offsets`, the places of the tokens in the rendered conversation.
    """

    refused = {name: neutral for name, neutral in ChatRequest.refused.items() if name != _PLACES}
    return_token_offsets: bool | None = None


class RenderedCompletionRequest(CompletionRequest):
    """Prompts to render.

    Attributes:
      return_token_offsets: also return `token_offsets`, the places of the tokens in the prompt.
    """

    refused = {name: neutral for name, neutral in CompletionRequest.refused.items() if name != _PLACES}
    return_token_offsets: bool | None = None


class Rendered(Answer):
    """A body for /inference/v1/generate, which is the answer to a request to render.

    Attributes:
      token_offsets: of each token, the numbers of its first character in the text and of the one after it; null if the
        tokens are not those of a text.
    """

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool
    stream_options: dict[str, Any] | None
    kv_transfer_params: dict[str, Any] | None
    return_token_ids: bool | None
    cache_salt: str | None
    priority: int
    token_offsets: list[tuple[int, int]] | None = ABSENT


def sampling_fields(params: SamplingParams, *, has_masks: bool) -> dict[str, Any]:
    """Return the fields of `params` that are not their defaults as JSON values, as GenerateSampling takes them. Raises
    RequestError for one that GenerateSampling does not have, with the name of the request's field.

    has_masks: whether the engine returns sampling masks unless a request says otherwise.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingParams):
        name, value = field.name, getattr(params, field.name)
        default = (None, False) if name == "return_sampling_mask" and not has_masks else (getattr(_DEFAULTS, name),)
        if name in _ITS_OWN or value in default:
            continue
        if name not in GenerateSampling.model_fields or name in GenerateSampling.refused:
            if name == "stop_after":
                raise _impossible("stop", "without stop_in_reasoning=true, as the model has a reasoning parser")
            raise _impossible(name)
        found[name] = _json(value)
    return found


def _json(value: Any) -> Any:
    """Return a value of SamplingParams as JSON: a dataclass as an object of its fields that are not their defaults,
    keys as texts, sequences as lists.
    """
    if dataclasses.is_dataclass(value):
        fields = {each.name: (getattr(value, each.name), each.default) for each in dataclasses.fields(value)}
        return {name: _json(given) for name, (given, default) in fields.items() if given != default}
    if isinstance(value, Mapping):
        return {str(key): _json(each) for key, each in value.items()}
    return [_json(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _impossible(field: str, why: str = "") -> RequestError:
    """Return the error for a field of a request that /inference/v1/generate cannot serve. why: text after it."""
    return RequestError(f"{field} is not possible for /inference/v1/generate {why}".rstrip(), param=field)


def _shared(
    body: GenerationRequest, asked: GenerationRequest, model: str, params: SamplingParams, has_masks: bool
) -> dict[str, Any]:
    """Return the fields of a Rendered that are the same for all prompts of a request; max_tokens is only among the
    sampling parameters if it is not their default.

    asked: the request as it came, of which `body` is the equivalent. has_masks: see `sampling_fields`. Raises
    RequestError for echo and a beam search, and for fields that generate does not have.
    """
    for field in ("use_beam_search", "echo"):
        if getattr(body, field):
            raise _impossible(field)
    sampling = sampling_fields(params, has_masks=has_masks)
    extra = dict(sampling.pop("extra_args", None) or {})
    extra.pop("kv_transfer_params", None)
    return {
        "model": model,
        "sampling_params": sampling | ({"extra_args": extra} if extra else {}),
        "stream": bool(asked.stream),
        "stream_options": None if body.stream_options is None else body.stream_options.model_dump(),
        "kv_transfer_params": body.kv_transfer_params,
        "return_token_ids": body.return_token_ids,
        "cache_salt": asked.cache_salt,
        "priority": asked.priority or 0,  # vLLM takes no null
    }


def _rendered(
    shared: Mapping[str, Any], field: str, name: str, prompt: Mapping[str, Any], params: SamplingParams, longest: int
) -> dict[str, Any]:
    """Return the Rendered of one prompt. shared: result of `_shared`. field: the request's field with the prompt, for
    errors. name: id of the request. longest: max_model_len, up to which a request without max_tokens may generate.

    Raises RequestError for a prompt that is too long, and for media and embeddings.
    """
    if READY in prompt:
        raise _impossible(field, "with media or embeddings: it takes token ids")
    ids = list(prompt["prompt_token_ids"])
    room = longest - len(ids)
    if room < 1:
        raise prompt_length_error(field, len(ids), longest - 1, longest)
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    sampling = {**shared["sampling_params"], "max_tokens": most}
    return {"request_id": name, **shared, "token_ids": ids, "sampling_params": sampling}


async def _conversation(
    server: ChatServer, body: ChatRequest, asked: GenerationRequest, request: Request, prefix: str, field: str
) -> Response:
    """Return the tokens and sampling parameters of a conversation, and `token_offsets` if asked for. prefix: prefix of
    the request's id. Raises RequestError for a request that cannot be served or rendered, ApiError (404) for an unknown
    model, OverloadedError, EngineDeadError.

    asked: the request as it came, of which `body` is the equivalent. field: its field with the prompt, for errors.
    """
    engine, config = server.engine, server.config
    model, lora = await choose_model(engine, asked.model, served_names(engine, config))
    name, stream = asked.register(prefix, request), bool(asked.stream)
    run = ChatRun(server, body, name, asked.options(request, config, lora), is_stream=stream)
    await run.prepare()
    shared = _shared(body, asked, model, run.params, engine.inputs.config.return_sampling_mask)
    longest = engine.inputs.config.max_model_len
    found = _rendered(shared, field, name, run.prompt, run.params, longest)
    if isinstance(body, RenderedChatRequest) and body.return_token_offsets:
        found["token_offsets"] = await server.renderer.places(body, run.prompt)
    return json_response(found)


async def _add_places(body: RenderedCompletionRequest, rendered: list[dict[str, Any]], encoder: PromptEncoder) -> None:
    """Add token_offsets, None for token ids, to the Rendered of each prompt of `body`. Raises OverloadedError."""
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    for text, each in zip(texts or (), rendered, strict=False):
        special = body.add_special_tokens is not False
        ids, side = each["token_ids"], body.truncation_side
        is_text = isinstance(text, str)
        each["token_offsets"] = await encoder.places(text, ids, side, add_special_tokens=special) if is_text else None


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes that end in /render. Raises ConfigError for an unknown parser."""
    routes = APIRouter(tags=["render"], route_class=JsonRoute)
    server, encoder = ChatServer.open(engine, config), PromptEncoder(engine.inputs)
    names, longest = served_names(engine, config), engine.inputs.config.max_model_len

    @routes.post("/v1/chat/completions/render", response_class=Response)
    @answers(Rendered)
    async def render_chat(body: RenderedChatRequest, request: Request) -> Response:
        """Return the tokens and sampling parameters of a conversation. Raises the errors of `_conversation`."""
        return await _conversation(server, body, body, request, "chatcmpl", "messages")

    @routes.post("/v1/messages/render", response_class=Response)
    @answers(Rendered)
    async def render_message(body: MessagesRequest, request: Request) -> Response:
        """Return the tokens and sampling parameters of a conversation in Anthropic's form. Raises the errors of
        `_conversation`.
        """
        with renaming(body.as_asked):
            chat = await convert(request, body.chat_request)
            return await _conversation(server, chat, body, request, "msg", "messages")

    @routes.post("/cohere/v2/chat/render", response_class=Response)
    @answers(Rendered)
    async def render_cohere_chat(body: CohereChatRequest, request: Request) -> Response:
        """Return the tokens and sampling parameters of a conversation in Cohere's form. Raises the errors of
        `_conversation`.
        """
        with renaming(body.as_asked):
            asked = await convert(request, body.chat_request, limits_thinking=server.reasoning_format is not None)
            return await _conversation(server, asked, body, request, "chat", "messages")

    @routes.post("/v1/responses/render", response_class=Response)
    @answers(Rendered)
    async def render_response(body: ResponsesRequest, request: Request) -> Response:
        """Return the tokens and sampling parameters of a response's input. Raises the errors of `_conversation`, and
        RequestError for previous_response_id.
        """
        if body.previous_response_id is not None:
            raise RequestError("previous_response_id is not rendered; give all items", param="previous_response_id")
        with renaming(as_response_error):
            chat = body.chat_request(await convert(request, read_input, body.input))
            return await _conversation(server, chat, body, request, "resp", "input")

    @routes.post("/v1/completions/render", response_class=Response)
    @answers(list[Rendered])
    async def render_completions(body: RenderedCompletionRequest, request: Request) -> Response:
        """Return the tokens and sampling parameters of each prompt. Raises RequestError for a request that cannot be
        served or rendered, also for other fields whose copies, one for each prompt, are longer than max_request_bytes;
        ApiError (404) for an unknown model, OverloadedError, EngineDeadError.
        """
        model, lora = await choose_model(engine, body.model, names)
        name = body.register("cmpl", request)
        run = CompletionRun(engine, config, body, name, model, body.options(request, config, lora))
        await run.read_prompts(encoder)
        has_masks, number = engine.inputs.config.return_sampling_mask, len(run.prompts)
        shared = _shared(body, body, model, run.params, has_masks)
        if (size := number * len(encode_json(shared))) > config.max_request_bytes and number > 1:
            problem = f"prompt holds {number} prompts, for each of which the other fields are repeated: {size} bytes"
            raise RequestError(f"{problem}; allowed: {config.max_request_bytes} (max_request_bytes)", param="prompt")
        rendered = [
            _rendered(shared, "prompt", f"{name}-{at}" if number > 1 else name, prompt, run.params, longest)
            for at, prompt in enumerate(run.prompts)
        ]
        if body.return_token_offsets:
            await _add_places(body, rendered, encoder)
        return json_response(rendered)

    return routes
