"""Chat completion requests: OpenAI's and vLLM's fields, and the rules between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.http.request.errors import as_request_error
from jaxengine.server.http.request.fields import JsonObject, TemplateVariables, TextsByName, at_most
from jaxengine.server.http.request.protocol import TEXT_REFUSED, ConversationRequest, RequestModel, TextRequest

MAX_MESSAGES = 10_000
MAX_TOOLS = 128
MAX_DOCUMENTS = 1000
MAX_NAME_CHARS = 256

Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True), at_most(MAX_MESSAGES)]

_FORWARDED = "prompt_token_ids"
# Fields that a ChatRequest and requests of other APIs have under the same name.
SHARED = ConversationRequest.model_fields.keys() - {"model", "request_id"}


class Function(RequestModel):
    """A function that the model may call. Other keys are passed to the chat template unchanged.

    Attributes:
      parameters: JSON schema of the arguments.
      strict: whether arguments must match the schema. They do if the call is forced (tool_choice "required" or a name)
        or the answer has a response_format. Keywords that no grammar can enforce are then refused with strict=true and
        ignored otherwise. In all other cases the model writes arguments freely.
      defer_loading: for the chat template, which may leave the function out until a search or a message adds it;
        default: the tool's.
    """

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(RequestModel):
    """A tool. Other keys are passed to the chat template unchanged. defer_loading: default of the function's."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: Function
    defer_loading: bool | None = None

    @model_validator(mode="after")
    def _pass_on(self) -> Self:
        """Return this tool, with its defer_loading set in the function if only the tool has one."""
        if self.defer_loading is not None and self.function.defer_loading is None:
            self.function.defer_loading = self.defer_loading
        return self


class FunctionName(RequestModel):
    """Name of a function."""

    name: str


class NamedTool(RequestModel):
    """Selects the function that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class Allowed(RequestModel):
    """Functions that may be called. mode: whether one of them must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True), at_most(MAX_TOOLS)]


class AllowedTools(RequestModel):
    """Selects functions that may be called, while the prompt has them all, so that its prefix stays the same."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class Thinking(RequestModel):
    """Whether the model should reason before it answers, a field of several APIs."""

    type: Literal["enabled", "disabled"]


class ChatRequest(TextRequest, ConversationRequest):
    """Fields in addition to those of its bases; None is the default.

    Attributes:
      messages: dicts with role and content; content is a text, or a list of parts: text, image_url and video_url with
        addresses (data:, https:) if the model takes pictures. Other keys are passed to the template.
      logprobs: whether to return log-probabilities; top_logprobs: number of likeliest tokens to include.
      max_completion_tokens: limit of the answer; default max_tokens, or else the rest of the context.
      tools: functions that the model may call, 1 to 128. tool_choice: default "auto" with tools, "none" without. Calls
        of functions that it does not allow are text, as JSON.
      response_format: form of the answer; if the model may call tools, the answer has this form or consists of calls.
      parallel_tool_calls: False: at most one call.
      reasoning_effort: template variable of that name; unless `thinking` is given, "none" disables reasoning.
      thinking: template variables thinking and enable_thinking. Both fields have no effect for a template that uses
        none of these variables.
      include_reasoning: False: leave reasoning out of the answer, and with a reasoning parser the token ids and
        log-probabilities of all of it.
      echo: begin the answer with the last message, if it has the answer's role.
      add_generation_prompt: let the template begin an answer; default: unless continue_final_message.
      continue_final_message: let the model continue the last message.
      documents: template variable of that name.
      chat_template: template that replaces the model's, if the server allows it.
      chat_template_kwargs: further variables of the template, if the server allows them.
      mm_processor_kwargs: options of the model's media processor, overriding the server's.
      return_prompt_text: also return the rendered conversation.
      kv_transfer_params: may also have `prompt_token_ids`, see `forwarded`.
    """

    refused = {
        **TEXT_REFUSED,
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "media_io_kwargs": ({},),
        "modalities": (["text"],),
        "web_search_options": (),
    }

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking: bool | Thinking | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Annotated[list[TextsByName], Field(fail_fast=True), at_most(MAX_DOCUMENTS)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: TemplateVariables | None = None
    return_prompt_text: bool | None = None
    _forwarded: Any = PrivateAttr(default=None)
    _text_forms: Mapping[str, Mapping[str, str]] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, fields: dict[str, Any], text_forms: Mapping[str, Mapping[str, str]] | None = None) -> ChatRequest:
        """Return a chat request with `fields`, by their names in this class.

        text_forms: value of the request's property `text_forms`; None for an empty one. Raises RequestError for a value
        that is not allowed, also for too many messages.
        """
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise as_request_error(error) from None
        body._text_forms = text_forms or {}
        return body

    @model_validator(mode="after")
    def _take_forwarded(self) -> Self:
        """Return this request with prompt_token_ids taken out of kv_transfer_params, whose rest is for the engine."""
        if self.kv_transfer_params is not None and _FORWARDED in self.kv_transfer_params:
            rest = dict(self.kv_transfer_params)
            self._forwarded, self.kv_transfer_params = rest.pop(_FORWARDED), rest or None
        return self

    @property
    def forwarded(self) -> Any:
        """Token ids of the prompt, unchecked, which a router has from another engine's answer: prompt_token_ids of
        kv_transfer_params. None for none, and with `echo`, which needs the messages.
        """
        return None if self.echo else self._forwarded

    @property
    def text_forms(self) -> Mapping[str, Mapping[str, str]]:
        """Grammars of tools that take a single text (parsers.tools.forced.TEXT), by the tool's name: {"grammar": ...}
        in Lark's notation, or {"regex": ...}.
        """
        return self._text_forms

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        """Return this request. Raises RequestError for no messages, top_logprobs without logprobs or below -1, a token
        limit below 1, continue_final_message with add_generation_prompt, and tools that `_check_tools` refuses.
        """
        if not self.messages:
            raise RequestError(f"messages is empty; allowed: 1 to {MAX_MESSAGES}", param="messages")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs is only allowed with logprobs=true", param="top_logprobs")
        if self.top_logprobs is not None and self.top_logprobs < -1:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}; allowed: -1 and integers from 0", param="top_logprobs"
            )
        for name in ("max_completion_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} is {value}; allowed: integers from 1", param=name, value=value)
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message cannot be combined with add_generation_prompt", param="continue_final_message"
            )
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        """Raise RequestError for a tool_choice that does not fit the tools, for an empty list of tools, two functions
        of the same name, and structured_outputs together with a call that tool_choice forces.
        """
        if self.tools is not None and not self.tools:
            text = f"tools is empty; allowed: 1 to {MAX_TOOLS}, or to omit the field"
            raise RequestError(text, param="tools")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise RequestError("tools has two functions with the same name", param="tools")
        if self.choice == "none":
            return
        if not names:
            raise RequestError("tool_choice is only allowed with tools", param="tool_choice")
        if not set(self._chosen) <= set(names):
            raise RequestError("tool_choice names a function that is not among tools", param="tool_choice")
        if self.structured_outputs is not None and self.choice != "auto":
            text = "structured_outputs is only allowed without tools, or with tool_choice 'auto' or 'none'"
            raise RequestError(text, param="structured_outputs")

    @property
    def choice(self) -> Literal["none", "auto", "required"] | NamedTool:
        """The request's tool_choice, its mode if it allows some functions, or, if it is None, "auto" with tools and
        "none" without.
        """
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice or ("auto" if self.tools else "none")

    @property
    def _chosen(self) -> list[str]:
        """Names of the functions that tool_choice names."""
        match self.tool_choice:
            case NamedTool(function=function):
                return [function.name]
            case AllowedTools(allowed_tools=allowed):
                return [tool.function.name for tool in allowed.tools]
        return []

    @property
    def callable_functions(self) -> list[Function]:
        """The functions of `tools` that tool_choice lets the model call, in the order of `tools`."""
        functions, chosen = [tool.function for tool in self.tools or ()], self._chosen
        return [each for each in functions if each.name in chosen] if chosen else functions

    @property
    def thinks(self) -> bool | None:
        """Whether the model should reason first: as `thinking` says or, without it, whether reasoning_effort is other
        than "none". None if neither is given.
        """
        if self.thinking is not None:
            return self.thinking if isinstance(self.thinking, bool) else self.thinking.type == "enabled"
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"

    @property
    def num_listed(self) -> int | None:
        """Number of likeliest tokens in each position's top_logprobs, -1 for all that the engine returns; None without
        logprobs. With logprob_token_ids the engine returns these and the sampled token.
        """
        if not self.logprobs:
            return None
        return -1 if self.logprob_token_ids else self.top_logprobs or 0

    @property
    def continues(self) -> bool:
        """Whether the model continues the last message."""
        return bool(self.continue_final_message)

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """(name of the field that limits the answer, the limit in tokens or None): max_completion_tokens if it is
        given, else max_tokens.
        """
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


def text_of(content: Any) -> str:
    """Return the text of a message's content: the content itself, or the text parts of a list (texts, and `text` of
    dicts), joined by line breaks. "" for other content.
    """
    if isinstance(content, str):
        return content
    listed = content if isinstance(content, list) else ()
    parts = [part.get("text") if isinstance(part, dict) else part for part in listed]
    return "\n".join(part for part in parts if isinstance(part, str))
