"""The fields of a request to /v1/responses, and the equivalent chat request."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self, get_args

from fastapi import Request
from pydantic import Field, model_validator

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.chat.protocol import MAX_TOOLS, SHARED, ChatRequest, Messages
from jaxengine.server.http.request.errors import renamed, renaming
from jaxengine.server.http.request.fields import JsonObject, TemplateVariables, TextsByName, TokenIds, at_most
from jaxengine.server.http.request.protocol import HINTS, REFUSED, ClosedModel, ConversationRequest, RequestModel
from jaxengine.server.http.responses.tools import (
    AllowedTools,
    Callables,
    ChosenOther,
    ChosenTool,
    ResponseTool,
    flat_name,
    read_additional_tools,
)

Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.action.sources",
    "web_search_call.results",
]
# Values of `include`; those about calls that this server never makes have no effect.
LOGPROBS, ENCRYPTED, *_NEVER_MADE = get_args(Includable)
Summary = Literal["none", "auto", "concise", "detailed"]
Repeated = Annotated[str, Field(max_length=1024)]
# Fields that a chat request has under the same name.
_SAME = {
    *("chat_template_kwargs", "include_reasoning", "mm_processor_kwargs", "parallel_tool_calls"),
    *("spaces_between_special_tokens", "stop_token_ids"),
    *SHARED,
}
# Field of the chat request -> field of this API.
_NAMES = {
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
    "truncate_prompt_tokens": "truncation",
}


class Format(RequestModel):
    """The format of the text.

    Attributes:
      schema_: JSON schema; only with type json_schema.
      name, description, strict: as in protocol.JsonSchema.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(ClosedModel):
    """Text options. verbosity: accepted, without effect."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(ClosedModel):
    """How the model reasons. summary, generate_summary, context and mode: accepted, without effect; the answer has the
    reasoning itself, and the model's template decides what it sees of earlier reasoning.
    """

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard", "pro"] | None = None


class ResponseStreamOptions(ClosedModel):
    """Options of a stream. reasoning_summary_delivery: accepted, without effect, as there are no summaries."""

    refused = {"include_obfuscation": (False,)}

    include_obfuscation: bool | None = None
    reasoning_summary_delivery: str | None = None


class ResponsesRequest(ConversationRequest):
    """OpenAI's fields, and vLLM's further sampling fields; None stands for the default.

    Attributes:
      input: a text, or items: messages, calls, their outputs, reasoning, additional tools, and references to items of
        stored responses. Messages and outputs may have parts input_image with an image_url, if the model takes
        pictures.
      instructions: the system message; not carried over to a response that continues this one.
      previous_response_id: a stored response that this one continues.
      store: keep the response in memory, so that it can be retrieved and continued; the default.
      background: answer at once, and generate afterwards; with stream, generate on if the client leaves.
      include: "message.output_text.logprobs", for top_logprobs of the text; "reasoning.encrypted_content", with which
        reasoning items can be sent back without their text (not secret: it is the text in base64). Parts of calls
        that this server never makes have no effect.
      include_reasoning: False: leave reasoning out of the output, and with a reasoning parser all log-probabilities and
        output_messages.
      tools: functions, custom tools, and namespaces of both. Other tools of OpenAI are left out of the prompt, and are
        refused if tool_choice forces them.
      tool_choice: as in ChatRequest; tools that are left out are not called, also if it allows them.
      metadata: at most 16 texts, repeated in the response, as are prompt_cache_key and safety_identifier, which have no
        other effect.
      truncation: "auto" drops the beginning of an input that is too long.
      mm_processor_kwargs: as in ChatRequest.
      enable_response_messages: add the text and the token ids of the prompt and of the output, as input_messages and
        output_messages.
    """

    ignored = HINTS | {"client_metadata", "prompt_cache_options"}
    refused = {
        **REFUSED,
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "media_io_kwargs": ({},),
        "moderation": (),
        "previous_input_messages": (),
        "previous_response": (),
        "prompt": (),
    }

    input: str | Messages
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    stream_options: ResponseStreamOptions | None = None
    stop_token_ids: TokenIds | None = None
    spaces_between_special_tokens: bool | None = None
    include: Annotated[list[Includable], Field(fail_fast=True)] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools | ChosenOther | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_key: Repeated | None = None
    safety_identifier: Repeated | None = None
    metadata: Annotated[TextsByName, at_most(16)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: TemplateVariables | None = None
    enable_response_messages: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Return this request after checking it. Raises RequestError for background without store, and for top_logprobs
        that `include` does not select.
        """
        if self.background and self.store is False:
            raise RequestError("background can only be used when `store` is true", param="background")
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError(
                "top_logprobs is only allowed with 'message.output_text.logprobs' in include", param="top_logprobs"
            )
        return self

    def register(self, prefix: str, request: Request) -> str:
        """Do as NamedRequest.register, but return the given request_id as it is, or else a unique id in OpenAI's form:
        `prefix`, "resp", an underscore and hexadecimal digits.
        """
        super().register(prefix, request)
        return self.request_id or f"{prefix}_{secrets.token_hex(16)}"

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the text are requested."""
        return LOGPROBS in (self.include or ())

    @cached_property
    def callables(self) -> Callables:
        """Tools that the model may call, those of input items included. Raises RequestError for invalid tools."""
        items = () if isinstance(self.input, str) else self.input
        return Callables.of((*(self.tools or ()), *read_additional_tools(items)))

    @property
    def ignored_parts(self) -> Iterator[str]:
        """Iterator over the names of fields that are only repeated in the response, and of parts of fields that are
        accepted without effect, such as "text.verbosity". Raises RequestError for tools that `callables` refuses.
        """
        yield from (name for name in ("prompt_cache_key", "safety_identifier") if getattr(self, name) is not None)
        if self.text is not None and self.text.verbosity is not None:
            yield "text.verbosity"
        hints = ("summary", "generate_summary", "context", "mode")
        yield from (f"reasoning.{name}" for name in hints if getattr(self.reasoning, name, None) is not None)
        if self.stream_options is not None and self.stream_options.reasoning_summary_delivery is not None:
            yield "stream_options.reasoning_summary_delivery"
        yield from (f"include.{name}" for name in _NEVER_MADE if name in (self.include or ()))
        yield from (f"tools.{kind}" for kind in dict.fromkeys(self.callables.left_out))

    def chat_request(self, messages: Sequence[dict[str, Any]]) -> ChatRequest:
        """Return the equivalent chat request. Its messages are the instructions, if given, as a system message, then
        `messages`. Raises RequestError with this class's field names.
        """
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        fields |= {
            "messages": [{"role": "system", "content": self.instructions}, *messages]
            if self.instructions
            else [*messages],
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
            "tools": self.callables.functions or None,
            "tool_choice": self._tool_choice(),
            "response_format": self._response_format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }
        with renaming(as_response_error):
            return ChatRequest.of(fields, self.callables.text_forms)

    def _tool_choice(self) -> Any:
        """Return the tool_choice of the chat request: None for the default and for "auto" without functions, "none" if
        only tools that this server cannot run are allowed. Raises RequestError if it forces such a tool.
        """
        choice, left_out = self.tool_choice, self.callables.left_out
        if isinstance(choice, AllowedTools):
            tools = [_named(tool) for tool in choice.tools if isinstance(tool, ChosenTool)]
            if not tools and choice.mode == "required":
                text = "tool_choice allows no tool that this server can run; allowed: functions and custom tools"
                raise RequestError(text, param="tool_choice")
            return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": tools}} if tools else "none"
        if isinstance(choice, ChosenOther):
            problem = f"tool_choice forces {show_value(choice.type)}, a tool that this server cannot run"
            raise RequestError(f"{problem}; allowed: functions and custom tools", param="tool_choice")
        if isinstance(choice, ChosenTool):
            return _named(choice)
        if choice == "required" and left_out and not self.callables.functions:
            problem = f"tool_choice is 'required', but this server can run none of the tools ({', '.join(left_out)})"
            raise RequestError(f"{problem}; allowed: functions and custom tools", param="tool_choice")
        # OpenAI's clients send "auto" with an empty list of tools.
        return None if choice == "auto" and not self.callables.functions else choice

    def _response_format(self) -> dict[str, Any] | None:
        """Return the response_format of the chat request; None if the request has no format. Raises RequestError for
        json_schema without a schema.
        """
        asked = None if self.text is None else self.text.format
        if asked is None or asked.type != "json_schema":
            return None if asked is None else {"type": asked.type}
        if asked.schema_ is None:
            raise RequestError("text.format has no schema", param="text")
        return {
            "type": "json_schema",
            "json_schema": {"name": asked.name, "schema": asked.schema_, "strict": asked.strict},
        }


def _named(tool: ChosenTool) -> dict[str, Any]:
    """Return a tool as the tool_choice of a chat request names it."""
    return {"type": "function", "function": {"name": flat_name(tool.name, tool.namespace)}}


def as_response_error(error: RequestError) -> RequestError:
    """Return an error of a chat request with ResponsesRequest's name of the field; the error itself if its name is the
    same.
    """
    return renamed(error, _NAMES[error.param]) if error.param in _NAMES else error
