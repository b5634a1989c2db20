"""Requests of /v1/messages with Anthropic's fields, and their conversion to chat requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.chat.protocol import MAX_TOOLS, SHARED, ChatRequest, Messages
from jaxengine.server.http.messages.input import left_out_blocks, read_messages
from jaxengine.server.http.messages.tools import (
    DefinedTool,
    MessagesTool,
    Tool,
    chat_tool,
    ignored_keys,
    tools_in_effect,
)
from jaxengine.server.http.request.errors import renamed, renaming
from jaxengine.server.http.request.fields import JsonObject, TemplateVariables, Texts, at_most
from jaxengine.server.http.request.kv_transfer import TransferParams
from jaxengine.server.http.request.protocol import HINTS, REFUSED, ClosedModel, ConversationRequest, RequestModel

# Type of tool_choice -> the chat request's tool_choice; then field of the chat request -> field of this API.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
}


class ToolChoice(RequestModel):
    """Whether the model calls a tool.

    Attributes:
      type: "any": some tool must be called; "tool": the one of `name`.
      name: the tool's name; only with type "tool".
      disable_parallel_tool_use: at most one call.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        """Return this object after checking it. Raises ValueError for type "tool" without a name, and for a name with
        another type.
        """
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name is needed with type 'tool', and only there")
        return self


class Thinking(RequestModel):
    """Whether the model should reason first.

    Attributes:
      type: "adaptive": as the model chooses.
      budget_tokens: limit of the reasoning, if that is enabled and the server separates it from the answer.
      display: without effect.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: str | None = None


class OutputFormat(RequestModel):
    """JSON schema of the text."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(ClosedModel):
    """Form of the output.

    Attributes:
      effort: reasoning_effort of a chat request.
      format: form of the text.
      task_budget: accepted, without effect.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: JsonObject | None = None


class Turns(ClosedModel):
    """An amount of turns; all of them is the only one allowed."""

    type: Literal["all"]


class ClearThinking(ClosedModel):
    """An edit that removes the thinking of earlier turns; keep: only where it removes none."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | Turns | None = None


class ContextManagement(ClosedModel):
    """Edits of a conversation that is too long. Those that change nothing are accepted, without effect."""

    edits: Annotated[list[ClearThinking], Field(fail_fast=True), at_most(16)] | None = None


class Conversation(RequestModel):
    """The fields that /v1/messages/count_tokens and /v1/messages share.

    Attributes:
      messages: messages of roles user, assistant and system; content is a text or a list of blocks: text, image,
        thinking, tool_use, tool_result. If the last message is the assistant's, the model continues it.
      system: the system message, a text or a list of text blocks.
      tools: functions. Tools that Anthropic defines are left out of the prompt, and are refused if tool_choice forces
        them. Blocks tool_addition and tool_removal of messages of role system change them.
      context_management: edits that change nothing are accepted, all others refused.
    """

    ignored = HINTS | {"betas", "cache_control", "speed"}
    refused = {"container": (), "inference_geo": (), "mcp_servers": ([],)}

    model: str | None = None
    messages: Messages
    system: str | Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(1000)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: TemplateVariables | None = None

    def chat_request(self) -> ChatRequest:
        """Return the equivalent chat completion request. Raises RequestError with this API's field names, also if it
        would have too many messages: `system` and each tool result are messages of their own there.
        """
        with renaming(self.as_asked):
            return ChatRequest.of(self._chat_fields())

    def as_asked(self, error: RequestError) -> RequestError:
        """Return an error of the chat request with the name of this request's field; the error itself if its name is
        the same.
        """
        return renamed(error, _NAMES[error.param]) if error.param in _NAMES else error

    def _chat_fields(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat request, by name. If the last message is the assistant's, the model
        continues it, but not if a system message follows of which nothing is left. Tools that this server cannot run
        are left out, and so is thinking of type "adaptive". Thinking of type "disabled" is the effort "none", as some
        templates have a variable for efforts alone. Raises RequestError for messages, blocks or a tool_choice that are
        not allowed.
        """
        messages, choice, output = read_messages(self.system, self.messages), self.tool_choice, self.output_config
        tools = tools_in_effect(self.tools or (), self.messages)
        functions = [tool for tool in tools if isinstance(tool, MessagesTool)]
        fields: dict[str, Any] = {"messages": messages, "tools": [chat_tool(tool) for tool in functions] or None}
        fields["chat_template_kwargs"] = self.chat_template_kwargs
        if messages and messages[-1]["role"] == self.messages[-1]["role"] == "assistant":
            fields["continue_final_message"] = True
        if choice is not None:
            _check_choice(choice, tools)
            named = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
            if choice.type == "auto" and not functions:
                fields["tool_choice"] = None
            fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        if self.thinking is not None and self.thinking.type == "enabled":
            fields["thinking"] = True
        if output is not None:
            fields["reasoning_effort"] = output.effort
            if output.format is not None:
                schema = {"name": "output", "schema": output.format.schema_}
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.disables_thinking:
            fields["reasoning_effort"] = "none"
        return fields

    @property
    def disables_thinking(self) -> bool:
        """Whether the model shall not reason, whatever effort the request has."""
        return self.thinking is not None and self.thinking.type == "disabled"

    @property
    def asked_budget(self) -> int | None:
        """Number of reasoning tokens that `thinking` allows; None if it sets no limit."""
        return None if self.thinking is None else self.thinking.budget_tokens

    @property
    def ignored_parts(self) -> Iterator[str]:
        """Iterator over the names of what is accepted without effect: fields, parts such as "thinking.display",
        "tools.TYPE" for tools that Anthropic defines, and parts of messages.
        """
        parts = {
            "context_management": self.context_management,
            "thinking.display": self.thinking and self.thinking.display,
            "output_config.task_budget": self.output_config and self.output_config.task_budget,
        }
        yield from (name for name, value in parts.items() if value is not None)
        if self.disables_thinking and self.output_config is not None and self.output_config.effort is not None:
            yield "output_config.effort"
        tools = self.tools or ()
        yield from (f"tools.{kind}" for kind in dict.fromkeys(t.type for t in tools if isinstance(t, DefinedTool)))
        if any(tool.cache_control is not None for tool in tools):
            yield "tools.cache_control"
        yield from left_out_blocks(self.system, self.messages)
        yield from ignored_keys(self.messages)


class MessagesRequest(Conversation, ConversationRequest):
    """Anthropic's fields, and vLLM's further sampling fields; None is the default.

    Attributes:
      max_tokens: limit of the answer; required.
      stop_sequences: texts that end the answer; same as stop.
      kv_transfer_params: as in a chat request.
    """

    refused = {name: neutral for name, neutral in REFUSED.items() if name != "kv_transfer_params"}
    refused |= Conversation.refused
    ignored = Conversation.ignored

    max_tokens: int
    stop_sequences: Texts | None = None
    kv_transfer_params: TransferParams | None = None

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        """Return this request. Raises RequestError for stop with stop_sequences, and for two limits of reasoning."""
        if self.stop_sequences is not None and self.stop is not None:
            raise RequestError("stop_sequences and stop are the same; give one", param="stop_sequences")
        if self.asked_budget is not None and self.thinking_token_budget is not None:
            problem = "thinking.budget_tokens and thinking_token_budget are the same; give one"
            raise RequestError(problem, param="thinking")
        return self

    def _chat_fields(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat request, by name, sampling fields included. Raises RequestError for
        messages, blocks or a tool_choice that are not allowed.
        """
        fields = {name: getattr(self, name) for name in (*SHARED, "kv_transfer_params")}
        if self.stop_sequences is not None:
            fields["stop"] = self.stop_sequences
        return {**fields, **super()._chat_fields(), "max_completion_tokens": self.max_tokens}

    def as_asked(self, error: RequestError) -> RequestError:
        if error.param == "thinking_token_budget" and self.thinking_token_budget is None:
            return renamed(error, "thinking")
        if error.param == "stop" and self.stop_sequences is not None:
            return renamed(error, "stop_sequences")
        return super().as_asked(error)


def _check_choice(choice: ToolChoice, tools: Sequence[Any]) -> None:
    """Raise RequestError if tool_choice forces a call and only tools that are left out could be called. choice: the
    request's tool_choice. tools: result of `tools_in_effect`.
    """
    left_out: list[DefinedTool] = [tool for tool in tools if isinstance(tool, DefinedTool)]
    functions = {tool.name for tool in tools if isinstance(tool, MessagesTool)}
    is_left_out = choice.name not in functions and any(tool.name == choice.name for tool in left_out)
    named = choice.type == "tool" and is_left_out
    if named or (choice.type == "any" and left_out and not functions):
        kinds = show_value(choice.name) if named else ", ".join(tool.type for tool in left_out)
        problem = f"tool_choice forces {kinds}, which this server cannot run"
        raise RequestError(f"{problem}; allowed: tools with an input_schema", param="tool_choice")
