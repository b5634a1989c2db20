"""The fields of a request to /v1/responses, and the equivalent chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jaxengine.scheduler.errors import RequestError
from jaxengine.server.http.chat.protocol import MAX_NAME_CHARS, MAX_TOOLS, ChatRequest, Messages, renamed
from jaxengine.server.http.fields import JsonObject, TemplateVariables, TextsByName, at_most
from jaxengine.server.http.protocol import REFUSED, ClosedModel, ConversationRequest, RequestModel

# Values of `include`.
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
# Fields with the same name in a chat request.
_SAME = {*ConversationRequest.model_fields, "chat_template_kwargs", "mm_processor_kwargs", "parallel_tool_calls"} - {
    "model",
    "request_id",
}
# Field of the chat request -> its name here.
_NAMES = {
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
    "truncate_prompt_tokens": "truncation",
}


class ResponseFunction(RequestModel):
    """A function that the model may call; strict: as in chat_protocol.Function."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedFunction(RequestModel):
    type: Literal["function"] = "function"
    name: str


class Format(RequestModel):
    """The format of the text. schema: with json_schema; name, description and strict: as in protocol.JsonSchema."""

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
    refused = {"summary": (), "generate_summary": ()}

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesRequest(ConversationRequest):
    """OpenAI's fields, and vLLM's further sampling fields; None stands for the default.

    Attributes:
      input: a text, or items: messages, function calls, their outputs, reasoning. Messages and outputs may have parts
        input_image with an image_url, if the model takes pictures.
      instructions: the system message; not carried over to a response that continues this one.
      previous_response_id: a stored response that this one continues.
      store: keep the response in memory, so that it can be retrieved and continued; the default.
      background: answer at once, and generate afterwards.
      include: "message.output_text.logprobs", for top_logprobs of the text; "reasoning.encrypted_content", with which
        reasoning items can be sent back without their text (not secret: it is the text in base64).
      metadata: at most 16 texts, repeated in the response.
      truncation: "auto" drops the beginning of an input that is too long.
      mm_processor_kwargs: as in ChatRequest.
    """

    refused = {
        **REFUSED,
        "context_management": (),
        "conversation": (),
        "enable_response_messages": (False,),
        "max_tool_calls": (),
        "moderation": (),
        "previous_input_messages": (),
        "previous_response": (),
        "prompt": (),
        "stream_options": ({"include_obfuscation": False},),
    }

    input: str | Messages
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    include: Annotated[list[Includable], Field(fail_fast=True)] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[ResponseFunction], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[TextsByName, at_most(16)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.background and self.stream:
            raise RequestError("background cannot be combined with stream", param="background")
        if self.background and self.store is False:
            raise RequestError("background needs store", param="background")
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise RequestError(
                "top_logprobs is only allowed with 'message.output_text.logprobs' in include", param="top_logprobs"
            )
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def chat_request(self, messages: Sequence[dict[str, Any]]) -> ChatRequest:
        """Returns the equivalent chat request, with `messages`. Raises RequestError with this class's field names."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        fields |= {
            "messages": [{"role": "system", "content": self.instructions}, *messages]
            if self.instructions
            else [*messages],
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
            "tools": self._tools(),
            "tool_choice": self._tool_choice(),
            "response_format": self._response_format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }
        try:
            return ChatRequest.of(fields)
        except RequestError as error:
            raise as_response_error(error) from None

    def _tools(self) -> list[dict[str, Any]] | None:
        if not self.tools:
            return None
        return [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools
        ]

    def _tool_choice(self) -> Any:
        if isinstance(self.tool_choice, NamedFunction):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        # OpenAI's clients send "auto" with an empty list of tools.
        return None if self.tool_choice == "auto" and not self.tools else self.tool_choice

    def _response_format(self) -> dict[str, Any] | None:
        asked = None if self.text is None else self.text.format
        if asked is None or asked.type != "json_schema":
            return None if asked is None else {"type": asked.type}
        if asked.schema_ is None:
            raise RequestError("text.format has no schema", param="text")
        return {
            "type": "json_schema",
            "json_schema": {"name": asked.name, "schema": asked.schema_, "strict": asked.strict},
        }


def as_response_error(error: RequestError) -> RequestError:
    """Renames the field of a chat request's error to its name in ResponsesRequest."""
    return renamed(error, _NAMES[error.param]) if error.param in _NAMES else error
