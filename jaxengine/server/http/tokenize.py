"""POST /tokenize and /detokenize, and GET /tokenizer_info if enabled, with vLLM's fields."""

from __future__ import annotations

from typing import Annotated, Any, Self

from fastapi import APIRouter, Response
from pydantic import Field, model_validator

from jaxengine.api.engine_client import EngineClient
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.prompts import PromptEncoder, check_detokenize
from jaxengine.server.http.answer.answers import Answer, answers
from jaxengine.server.http.answer.sse import json_response
from jaxengine.server.http.chat.prompt import ChatRenderer
from jaxengine.server.http.chat.protocol import MAX_TOOLS, ChatRequest, Messages, Tool
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.fields import TemplateVariables, TokenIds, at_most
from jaxengine.server.http.request.limits import JsonRoute
from jaxengine.server.http.request.protocol import RequestModel

# Fields of TokenizeRequest that need messages.
_WITH_MESSAGES = (
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
)


class TokenizeRequest(RequestModel):
    """Either `prompt`, or `messages` with arguments of the chat template.

    Attributes:
      add_special_tokens: add the model's begin and end tokens; None adds them to a prompt, not to a rendered
        conversation.
      return_token_strs: also return the vocabulary's own spelling of the tokens.
    """

    refused = {"media_io_kwargs": ({},)}

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Return this request after checking it. Raises RequestError unless either a prompt or messages are given, and
        for fields that need messages.
        """
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if self.messages is None:
            for name in _WITH_MESSAGES:
                if getattr(self, name) is not None:
                    raise RequestError(f"{name} is only allowed with messages", param=name)
        return self


class DetokenizeRequest(RequestModel):
    """Token ids to decode. tokens: ids of the vocabulary."""

    model: str | None = None
    tokens: TokenIds


class TokenizeAnswer(Answer):
    """Token ids. token_strs: the vocabulary's own spelling, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeAnswer(Answer):
    prompt: str


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes /tokenize and /detokenize and, with enable_tokenizer_info_endpoint, /tokenizer_info."""
    routes = APIRouter(tags=["tokenize"], route_class=JsonRoute)
    inputs = engine.inputs
    encoder = PromptEncoder(inputs)
    renderer = ChatRenderer(engine, config)
    names = served_names(engine, config)

    @routes.post("/tokenize", response_class=Response)
    @answers(TokenizeAnswer)
    async def tokenize(body: TokenizeRequest) -> Response:
        """Return the token ids of a text, or of a conversation by the chat template, as `tokens`, with their `count`,
        `max_model_len` and, if requested, `token_strs`, else None. Raises RequestError for a text or conversation that
        cannot be used, ApiError (404) for an unknown model, OverloadedError, EngineDeadError.
        """
        await choose_model(engine, body.model, names)
        if body.prompt is None:
            chat = {name: getattr(body, name) for name in ("messages", "add_special_tokens", *_WITH_MESSAGES)}
            ids = await renderer.token_ids(ChatRequest.of(chat))
        else:
            (ids,) = await encoder.encode([body.prompt], add_special_tokens=body.add_special_tokens is not False)
        strings = await encoder.strings(ids) if body.return_token_strs else None
        sizes = {"count": len(ids), "max_model_len": inputs.config.max_model_len}
        return json_response({**sizes, "tokens": ids, "token_strs": strings})

    @routes.post("/detokenize")
    @answers(DetokenizeAnswer)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Return, as `prompt`, the text of token ids, special tokens included. Raises RequestError for more than
        MAX_DETOKENIZE ids, for ids outside the vocabulary and without a tokenizer; ApiError (404) for an unknown model;
        OverloadedError, EngineDeadError.
        """
        await choose_model(engine, body.model, names)
        check_detokenize("tokens", body.tokens, inputs)
        decode = inputs.require_tokenizer().decode
        return {"prompt": await encoder.run(lambda: decode(body.tokens, False))}

    if config.enable_tokenizer_info_endpoint:

        @routes.get("/tokenizer_info")
        async def tokenizer_info() -> dict[str, Any]:
            """Return special tokens and chat template, for clients that render prompts themselves. Raises RequestError
            without a tokenizer.
            """
            about = inputs.require_tokenizer().describe()
            return {**about, "chat_template": inputs.config.chat_template or about["chat_template"]}

    return routes
