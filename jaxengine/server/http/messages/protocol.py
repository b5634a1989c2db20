"""Requests of /v1/messages with Anthropic's fields, and their conversion to chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jaxengine.scheduler.errors import RequestError
from jaxengine.server.http.chat.protocol import MAX_NAME_CHARS, MAX_TOOLS, ChatRequest, Messages, renamed
from jaxengine.server.http.fields import JsonObject, TemplateVariables, Texts, at_most
from jaxengine.server.http.messages.input import read_messages
from jaxengine.server.http.protocol import HINTS, REFUSED, ClosedModel, ConversationRequest, RequestModel

# Fields with the same name in a chat request.
_SAME = {*ConversationRequest.model_fields, "chat_template_kwargs"} - {"model", "request_id"}
# Field of the chat request -> its name here.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
}


class MessagesTool(RequestModel):
    """A function that the model may call; strict as in chat.protocol.Function. Tools run by the server are refused."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None


class ToolChoice(RequestModel):
    """any: some tool must be called; tool: the one named."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name is needed with type 'tool', and only there")
        return self


class Thinking(RequestModel):
    """Whether the model should reason first; adaptive: as it chooses. budget_tokens and display have no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(ClosedModel):
    """effort: reasoning_effort of a chat request. format: form of the text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Conversation(RequestModel):
    """The fields that /v1/messages/count_tokens and /v1/messages share.

    Attributes:
      messages: of roles user, assistant and system; content is a text or a list of blocks: text, image, thinking,
        tool_use, tool_result. If the last message is the assistant's, the model continues it.
      system: the system message, a text or a list of text blocks.
    """

    ignored = HINTS | {"cache_control"}
    refused = {
        "container": (),
        "context_management": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    model: str | None = None
    messages: Messages
    system: str | Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(1000)] | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat_request(self) -> ChatRequest:
        """Converts to a chat completion request. Raises RequestError with this API's field names."""
        try:
            return ChatRequest.of(self._chat_fields())
        except RequestError as error:
            raise as_messages_error(error) from None

    def _chat_fields(self) -> dict[str, Any]:
        messages, choice, output = read_messages(self.system, self.messages), self.tool_choice, self.output_config
        fields: dict[str, Any] = {
            "messages": messages,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
        }
        if messages and messages[-1]["role"] == "assistant":
            fields["continue_final_message"] = True
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = named if choice.type == "tool" else choice.type.replace("any", "required")
            fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        if self.thinking is not None and self.thinking.type != "adaptive":
            fields["thinking"] = self.thinking.type == "enabled"
        if output is not None:
            fields["reasoning_effort"] = output.effort
            if output.format is not None:
                schema = {"name": "output", "schema": output.format.schema_}
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    @property
    def ignored_parts(self) -> list[str]:
        """Parts of fields that are accepted but have no effect."""
        budget = self.thinking is not None and self.thinking.budget_tokens is not None
        return ["thinking.budget_tokens"] if budget else []


class MessagesRequest(Conversation, ConversationRequest):
    """Anthropic's fields, and vLLM's further sampling fields; None is the default.

    Attributes:
      max_tokens: limit of the answer; required.
      stop_sequences: texts that end the answer; same as stop.
    """

    refused = {**REFUSED, **Conversation.refused}
    ignored = Conversation.ignored

    max_tokens: int
    stop_sequences: Texts | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        if self.stop_sequences is not None and self.stop is not None:
            raise RequestError("stop_sequences and stop are the same; give one", param="stop_sequences")
        return self

    def _chat_fields(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in _SAME}
        if self.stop_sequences is not None:
            fields["stop"] = self.stop_sequences
        return {**fields, **super()._chat_fields(), "max_completion_tokens": self.max_tokens}

    def as_asked(self, error: RequestError) -> RequestError:
        """The error of the chat request, with this request's field name."""
        if error.param == "stop" and self.stop_sequences is not None:
            return renamed(error, "stop_sequences")
        return as_messages_error(error)


def as_messages_error(error: RequestError) -> RequestError:
    """The error of a chat request, with MessagesRequest's field name."""
    return renamed(error, _NAMES[error.param]) if error.param in _NAMES else error


def _chat_tool(tool: MessagesTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}
