"""Requests of /cohere/v2/chat with Cohere's fields, and their conversion to chat requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.chat.protocol import MAX_DOCUMENTS, MAX_NAME_CHARS, MAX_TOOLS, SHARED, ChatRequest, Messages
from jaxengine.server.http.request.errors import renamed, renaming
from jaxengine.server.http.request.fields import JsonObject, TemplateVariables, Texts, at_most
from jaxengine.server.http.request.protocol import REFUSED, ConversationRequest, RequestModel

# Field of the chat request -> field of this API.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking",
    "top_k": "k",
    "top_p": "p",
}
# Fields that become variables of the chat template.
VARIABLES = ("documents", "safety_mode", "citation_options")
_CHOICES = {"REQUIRED": "required", "NONE": "none"}
# Keys of messages and documents that are read; those of messages by role, in addition to the first ones.
_MESSAGE_KEYS = frozenset(("role", "content"))
_ROLE_KEYS = {"assistant": frozenset(("tool_plan", "tool_calls")), "tool": frozenset(("tool_call_id",))}
_DOCUMENT_KEYS = frozenset(("data", "id"))


class CohereFunction(RequestModel):
    """A function that the model may call. parameters: JSON schema of its arguments."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    parameters: JsonObject | None = None


class CohereTool(RequestModel):
    """A tool, which is a function."""

    type: Literal["function"] = "function"
    function: CohereFunction


class CohereFormat(RequestModel):
    """Form of the text. json_schema: with type "json_object" only; None or {} for any object."""

    type: Literal["text", "json_object"]
    json_schema: JsonObject | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Return this form. Raises RequestError for a schema with type "text", which would have no effect."""
        if self.json_schema is not None and self.type == "text":
            problem = "response_format.json_schema is only allowed with the type json_object"
            raise RequestError(problem, param="response_format", value=self.type)
        return self


class CohereThinking(RequestModel):
    """Whether the model should reason first. token_budget: limit of the reasoning, if that is enabled and the server
    separates it from the answer.
    """

    type: Literal["enabled", "disabled"]
    token_budget: Annotated[int, Field(ge=1)] | None = None


class CohereChatRequest(ConversationRequest):
    """Cohere's fields, and vLLM's further sampling fields; None is the default.

    Attributes:
      messages: messages of roles user, assistant, system (or developer) and tool; content is a text or a list of
        blocks: text; image_url of the user; thinking of the assistant; document of a tool.
      tools: functions that the model may call. strict_tools: as strict of a chat request's functions.
      tool_choice: "REQUIRED" or "NONE"; None: the model chooses.
      documents: texts, or objects with `data` and `id`; a variable of the chat template, each with both.
      citation_options, safety_mode: variables of the chat template, the latter in lower case.
      logprobs: whether to return the log-probability of each token.
      stop_sequences: texts that end the answer. k, p: top_k and top_p.
      kv_transfer_params: as in a chat request.
    """

    refused = {name: neutral for name, neutral in REFUSED.items() if name != "kv_transfer_params"}

    messages: Messages
    tools: Annotated[list[CohereTool], Field(fail_fast=True), at_most(MAX_TOOLS)] | None = None
    strict_tools: bool | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: Annotated[list[str | JsonObject], Field(fail_fast=True), at_most(MAX_DOCUMENTS)] | None = None
    citation_options: JsonObject | None = None
    response_format: CohereFormat | None = None
    safety_mode: str | None = None
    max_tokens: int | None = None
    stop_sequences: Texts | None = None
    k: int | None = None
    p: float | None = None
    logprobs: bool | None = None
    thinking: CohereThinking | None = None
    chat_template_kwargs: TemplateVariables | None = None
    kv_transfer_params: JsonObject | None = None

    def chat_request(self, *, limits_thinking: bool = False) -> ChatRequest:
        """Return the equivalent chat completion request. limits_thinking: whether thinking.token_budget limits the
        reasoning where that is enabled; without a reasoning parser it cannot. Raises RequestError with this API's field
        names, also for two names of one field.
        """
        fields = {name: getattr(self, name) for name in SHARED}
        for name, own in (("stop", "stop_sequences"), ("top_k", "k"), ("top_p", "p")):
            if (value := getattr(self, own)) is not None:
                if fields[name] is not None:
                    raise RequestError(f"{own} and {name} are the same; give one", param=own)
                fields[name] = value
        fields |= {"messages": list(_chat_messages(self.messages)), "max_completion_tokens": self.max_tokens}
        fields |= {"logprobs": self.logprobs, "return_token_ids": self.logprobs or None}
        fields |= {"tools": self._chat_tools(), "tool_choice": _CHOICES.get(self.tool_choice or "")}
        fields |= {"kv_transfer_params": self.kv_transfer_params, "response_format": self._chat_format()}
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        if self.thinking is not None:
            fields["thinking"] = self.thinking.type == "enabled"
            if (budget := self.thinking.token_budget) is not None and self.thinking_token_budget is not None:
                problem = "thinking.token_budget and thinking_token_budget are the same; give one"
                raise RequestError(problem, param="thinking")
            if limits_thinking and fields["thinking"] and budget is not None:
                fields["thinking_token_budget"] = budget
        variables = {**self.variables, **(self.chat_template_kwargs or {})}
        with renaming(self.as_asked):
            return ChatRequest.of({**fields, "chat_template_kwargs": variables or None})

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template by name, those of VARIABLES that the request has. Raises RequestError for a
        document without `data`.
        """
        documents = [_document(*each) for each in enumerate(self.documents)] if self.documents else None
        mode = None if self.safety_mode is None else self.safety_mode.lower()
        found = dict(zip(VARIABLES, (documents, mode, self.citation_options), strict=True))
        return {name: value for name, value in found.items() if value is not None}

    def ignored_parts(self, template: str, *, limits_thinking: bool) -> Iterator[str]:
        """Yield the names of what has no effect: variables that the text of the chat template does not use, a budget of
        the reasoning that is disabled or without `limits_thinking` (see `chat_request`), and once each "messages.KEY"
        and "documents.KEY" for further keys of messages, such as citations of earlier answers, and of documents.
        """
        yield from (name for name in self.variables if name not in template)
        if (asked := self.thinking) is not None and asked.token_budget is not None:
            if not limits_thinking or asked.type == "disabled":
                yield "thinking.token_budget"
        found: dict[str, None] = {}
        for message in self.messages:
            other = message.keys() - _MESSAGE_KEYS - _ROLE_KEYS.get(str(message.get("role")), frozenset())
            found |= dict.fromkeys(f"messages.{key}" for key in sorted(other) if message[key] is not None)
        for document in self.documents or ():
            other = () if isinstance(document, str) else document.keys() - _DOCUMENT_KEYS
            found |= dict.fromkeys(f"documents.{key}" for key in sorted(other))
        yield from found

    def as_asked(self, error: RequestError) -> RequestError:
        """Return an error of the chat request with the name of this request's field; the error itself if its name is
        the same.
        """
        name = _NAMES.get(error.param or "")
        if error.param == "chat_template_kwargs" and self.chat_template_kwargs is None:
            name = next((each for each in VARIABLES if getattr(self, each) is not None), None)
        # The request may have given the chat request's own name.
        given = error.param in SHARED and getattr(self, str(error.param)) is not None
        return error if name is None or given else renamed(error, name)

    def _chat_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools in the form of a chat request, strict if strict_tools is true; None for none."""
        if not self.tools:
            return None
        strict = {"strict": True} if self.strict_tools else {}
        functions = [tool.function.model_dump(exclude_none=True) for tool in self.tools]
        return [{"type": "function", "function": {**function, **strict}} for function in functions]

    def _chat_format(self) -> dict[str, Any] | None:
        """Return response_format in the form of a chat request, any object without a schema; None for a text."""
        asked = self.response_format
        if asked is None or asked.type == "text":
            return None
        if not asked.json_schema:
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": asked.json_schema}}


def _document(number: int, document: Any) -> dict[str, Any]:
    """Return a document of a request with its id, "doc_" and its number by default, and its data, which for a text are
    {"text": ...}. Raises RequestError for data that are neither an object nor a text.
    """
    data, name = (document, None) if isinstance(document, str) else (document.get("data"), document.get("id"))
    if not isinstance(data, (str, Mapping)) or not isinstance(name, str | None):
        problem = f"documents[{number}] is {show_value(document)}; allowed: a text, or an object with data and id"
        raise RequestError(problem, param="documents")
    return {"id": name or f"doc_{number}", "data": {"text": data} if isinstance(data, str) else data}


def _chat_messages(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a request's messages in the form of a chat request. The plan of an assistant's message becomes its
    reasoning, after its thinking. Raises RequestError for another role, and for a content that the role may not have.
    """
    for number, message in enumerate(messages):
        where, role = f"messages[{number}]", message.get("role")
        if role in ("system", "developer"):
            yield {"role": "system", "content": "".join(_texts(message, where, ("text",))["text"])}
        elif role == "user":
            yield {"role": "user", "content": _user_content(message, where)}
        elif role == "assistant":
            yield _assistant(message, where)
        elif role == "tool":
            if not isinstance(call := message.get("tool_call_id"), str):
                raise _refused(f"{where}.tool_call_id is missing or not a text")
            yield {"role": "tool", "tool_call_id": call, "content": _tool_content(message, where)}
        else:
            allowed = "user, assistant, system, developer, tool"
            raise _refused(f"{where}.role is {show_value(role)}; allowed: {allowed}")


def _blocks(message: dict[str, Any], where: str, allowed: Sequence[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (type, block, path) for each block of a message's content; a text is one of type "text". where: path of the
    message, for errors. Raises RequestError for a block whose type is not in `allowed`.
    """
    content = message.get("content")
    if not isinstance(content, list):
        if not isinstance(content, str):
            raise _refused(f"{where}.content is {show_value(content)}; allowed: a text, or a list of blocks")
        content = [{"type": "text", "text": content}]
    for at, block in enumerate(content):
        kind, place = block.get("type") if isinstance(block, dict) else None, f"{where}.content[{at}]"
        if not isinstance(kind, str) or kind not in allowed:
            raise _refused(f"{place}.type is {show_value(kind)}; allowed: {', '.join(allowed)}")
        yield kind, block, place


def _texts(message: dict[str, Any], where: str, allowed: Sequence[str]) -> dict[str, list[str]]:
    """Return the texts of a message's blocks by type, all types of `allowed`; a block has its text in the field that is
    named as its type. Arguments and errors are those of `_blocks`; also raises RequestError for a block without a text.
    """
    found: dict[str, list[str]] = {kind: [] for kind in allowed}
    for kind, block, place in _blocks(message, where, allowed):
        if not isinstance(text := block.get(kind), str):
            raise _refused(f"{place}.{kind} is missing or not a text")
        found[kind].append(text)
    return found


def _user_content(message: dict[str, Any], where: str) -> str | list[dict[str, Any]]:
    """Return the content of a user's message: a text as it is, blocks as parts of a chat request, whose texts and
    images are not checked here. Raises RequestError for other blocks.
    """
    blocks = _blocks(message, where, ("text", "image_url"))
    parts = [{"type": kind, kind: block.get(kind)} for kind, block, _ in blocks]
    return message["content"] if isinstance(message["content"], str) else parts


def _tool_content(message: dict[str, Any], where: str) -> str:
    """Return the result of a tool, a line for each block; a document is JSON. Raises RequestError for other blocks."""
    lines = []
    for kind, block, place in _blocks(message, where, ("text", "document")):
        value = block.get(kind)
        if not isinstance(value, str if kind == "text" else dict):
            raise _refused(f"{place}.{kind} is missing or not {'a text' if kind == 'text' else 'an object'}")
        lines.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return "\n".join(lines)


def _assistant(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an assistant's message in the form of a chat request, with reasoning and tool_calls only if it has any.
    Raises RequestError for blocks other than text and thinking, and for a call without a text as id or name.
    """
    has_content = message.get("content") is not None
    texts = _texts(message, where, ("text", "thinking")) if has_content else {"text": [], "thinking": []}
    plan, calls = message.get("tool_plan"), message.get("tool_calls") or []
    if not isinstance(plan, str | None) or not isinstance(calls, list):
        raise _refused(f"{where}.tool_plan must be a text, and tool_calls a list")
    reasoning = "".join((*texts["thinking"], plan or ""))
    said: dict[str, Any] = {"role": "assistant", "content": "".join(texts["text"]) if texts["text"] else None}
    if reasoning:
        said["reasoning"] = reasoning
    for at, call in enumerate(calls):
        function: Any = call.get("function") if isinstance(call, dict) else None
        given: list[Any] = [None]
        if isinstance(function, dict):
            given = [call.get("id"), function.get("name"), function.get("arguments") or "{}"]
        if not all(isinstance(one, str) for one in given):
            raise _refused(f"{where}.tool_calls[{at}] must have an id, and a function with a name and arguments, texts")
        made = {"name": given[1], "arguments": given[2]}
        said.setdefault("tool_calls", []).append({"id": given[0], "type": "function", "function": made})
    return said


def _refused(message: str) -> RequestError:
    """Return a RequestError about the field `messages`."""
    return RequestError(message, param="messages")
