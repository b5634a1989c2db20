"""Rendering of conversations to token ids, off the event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxengine.api.engine_client import EngineClient
from jaxengine.config.base.errors import ConfigError
from jaxengine.requests.run_in_thread import with_media
from jaxengine.scheduler.base.errors import RequestError, prompt_length_error, show_value
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.prompts import PromptEncoder, read_prompts
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.tokens.chat_template import OWN_NAMES

_NUM_THREADS = 4
# Variables that switch reasoning. Not keys and attributes of these names, which parts of messages have.
_THINKING = re.compile(r"(?<!['\".])\b(?:reasoning_effort|enable_thinking|thinking)\b")


class ChatRenderer:
    """Renderer of conversations to prompts, with its own threads for chat templates. Raises ConfigError for names in
    default_chat_template_kwargs that templates use otherwise.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig):
        self._inputs = engine.inputs
        self._config = config
        if wrong := sorted(OWN_NAMES.intersection(config.default_chat_template_kwargs or ())):
            problem = f"default_chat_template_kwargs has {wrong[0]!r}, a name that is reserved"
            raise ConfigError.because("default_chat_template_kwargs", problem, "leave it out")
        self._encoder = PromptEncoder(engine.inputs)
        # Separate threads: templates that take seconds must not delay tokenization.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="chat template")

    async def prompt(self, body: ChatRequest) -> dict[str, Any]:
        """Render a conversation; return the prompt that EngineClient.stream takes: text, token ids, cache salt, images
        and videos.

        Token ids are truncated if the request has truncate_prompt_tokens; the text of messages is not. Forwarded token
        ids replace messages without media. Raises RequestError for a conversation that cannot be rendered, that has no
        tokens or more than max_model_len - 1, whose images cannot be used, or that would be truncated although it has
        images or videos, and for forwarded ids that are none of the model's; OverloadedError if too many templates,
        texts or images wait.
        """
        messages, parts = self._inputs.media_reader.collect(body.messages)
        if body.forwarded is None or parts:
            text, whole = await self._encode(body, messages)
        else:
            text, whole = await self._decode(body)
        ids = self._cut(body, whole)
        self._verify_tokens(ids)
        if parts and len(ids) < len(whole):
            problem = "messages with images or videos are too long, and cannot be cut short"
            raise RequestError(problem, param="truncate_prompt_tokens")
        prompt: dict[str, Any] = {"prompt": text, "prompt_token_ids": ids, "cache_salt": body.cache_salt}
        prompt = await with_media(self._inputs, prompt, parts, body.mm_processor_kwargs)
        self._verify_tokens(prompt["prompt_token_ids"])  # now with the placeholders of images
        return prompt

    async def places(self, body: ChatRequest, prompt: dict[str, Any]) -> list[tuple[int, int]] | None:
        """Return PromptEncoder.places of the tokens in the text of `prompt`, the result of the method `prompt` for this
        request; None where that returns None. Raises OverloadedError if too many texts wait.
        """
        text, ids, special = prompt["prompt"], prompt["prompt_token_ids"], bool(body.add_special_tokens)
        return await self._encoder.places(text, ids, body.truncation_side, add_special_tokens=special)

    async def token_ids(self, body: ChatRequest) -> list[int]:
        """Return the token ids of a conversation, with the placeholders of its images. They are not truncated and may
        exceed the model's context. Raises RequestError for a conversation that cannot be rendered or whose images
        cannot be used, OverloadedError if too many templates, texts or images wait.
        """
        messages, parts = self._inputs.media_reader.collect(body.messages)
        text, ids = await self._encode(body, messages)
        prompt = {"prompt": text, "prompt_token_ids": ids}
        return (await with_media(self._inputs, prompt, parts, body.mm_processor_kwargs))["prompt_token_ids"]

    def _cut(self, body: ChatRequest, token_ids: list[int]) -> list[int]:
        """Return a conversation's token ids, truncated as the request says."""
        return self._encoder.cut(token_ids, body.truncate_prompt_tokens, body.truncation_side, body.most_tokens[1])

    def _verify_tokens(self, token_ids: Sequence[int], param: str = "messages") -> None:
        """Raise RequestError, with `param` as its field, if there are no tokens, or max_model_len of them or more."""
        longest = self._inputs.config.max_model_len
        if not 1 <= len(token_ids) < longest:
            raise prompt_length_error(param, len(token_ids), longest - 1, longest)

    async def _encode(self, body: ChatRequest, messages: Sequence[dict[str, Any]]) -> tuple[str, list[int]]:
        """Return the text of a conversation, rendered on a thread, and its token ids.

        The ids have special tokens only with body.add_special_tokens. messages: messages of `body`, with their media
        collected. Raises RequestError, also for a message (before it is rendered) or text that cannot fit into
        max_model_len, and OverloadedError.
        """
        # Checked before the template copies them.
        self._encoder.verify_length(max(map(_num_chars, messages), default=0), "messages")
        text = await asyncio.get_running_loop().run_in_executor(self._threads, self._render, body, messages)
        special = bool(body.add_special_tokens)
        (ids,) = await self._encoder.encode([text], add_special_tokens=special, param="messages")
        return text, ids

    async def _decode(self, body: ChatRequest) -> tuple[str, list[int]]:
        """Return the text of the forwarded token ids, with special tokens, and the ids, both truncated. Raises
        RequestError unless they are a list of ids of the model, and for max_model_len or more that are left.
        """
        longest = self._inputs.config.max_model_len if body.truncate_prompt_tokens is None else None
        given, param = body.forwarded, "kv_transfer_params.prompt_token_ids"
        if not isinstance(given, list) or not given or isinstance(given[0], (str, list)):
            raise RequestError(f"{param} is {show_value(given)}; allowed: a list of token ids", param=param)
        read_prompts(given, 1, self._inputs, longest, param=param)
        ids, decode = self._cut(body, given), self._inputs.require_tokenizer().decode
        # Decoding blocks all other requests, and a body may hold a thousand times the ids of a prompt.
        self._verify_tokens(ids, param)
        return await self._encoder.run(lambda: decode(ids, skip_special_tokens=False)), ids

    def _render(self, body: ChatRequest, messages: Sequence[dict[str, Any]]) -> str:
        """Return the text of a conversation, rendered with the chat template and its tools, unless the server leaves
        these out for tool_choice "none"; the last message is continued or, by default, a generation prompt added.
        Raises RequestError for fields that the server does not allow, and for messages that the template refuses;
        OverloadedError if too many templates are being rendered.
        """
        config = self._config
        if body.chat_template is not None and not config.trust_request_chat_template:
            raise RequestError(
                "chat_template is only allowed where the server has --trust-request-chat-template",
                param="chat_template",
            )
        if body.chat_template_kwargs and not config.chat_template_kwargs_allowed:
            raise RequestError("chat_template_kwargs are not allowed by this server", param="chat_template_kwargs")
        tokenizer = self._inputs.require_tokenizer()
        template = body.chat_template or self._inputs.config.chat_template
        has_tools = body.tools and not (body.choice == "none" and config.exclude_tools_when_tool_choice_none)
        return tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=not body.continues and body.add_generation_prompt is not False,
            continue_final_message=body.continues,
            tools=[tool.model_dump(exclude_unset=True) for tool in body.tools or ()] if has_tools else None,
            chat_template=template,
            chat_template_kwargs=self._variables(body, self.template(body)),
            placeholder=self._inputs.media_reader.placeholder,
        )

    def ignored(self, body: ChatRequest) -> list[str]:
        """Return the names of fields, of reasoning_effort and thinking, that the request sets although the chat
        template uses no variable for them.
        """
        known = {*_THINKING.findall(self.template(body))}
        names = {"reasoning_effort": known, "thinking": known - {"reasoning_effort"}}
        return [name for name, variables in names.items() if getattr(body, name) is not None and not variables]

    def template(self, body: ChatRequest) -> str:
        """Return the text that is searched for the variables of a request's template: its own template, else the
        engine's option, else the tokenizer's. Raises RequestError if the last is needed and there is no tokenizer.
        """
        template = body.chat_template or self._inputs.config.chat_template
        return str(template or self._inputs.require_tokenizer().chat_template)

    def _variables(self, body: ChatRequest, template: str) -> dict[str, Any]:
        """Return the template's variables: chat_template_kwargs, then the request's reasoning fields under each name
        that `template` uses and chat_template_kwargs does not set, and the documents. They replace those of the
        server's default_chat_template_kwargs.

        Raises RequestError for documents if `template` does not use them.
        """
        given = dict(body.chat_template_kwargs or {})
        for name in {*_THINKING.findall(template)}:
            value = body.reasoning_effort if name == "reasoning_effort" else body.thinks
            if value is not None:
                given.setdefault(name, value)
        if body.documents and "documents" not in template:
            raise RequestError("documents are not used by this model's chat template", param="documents")
        if body.documents is not None:
            given["documents"] = body.documents
        return {**(self._config.default_chat_template_kwargs or {}), **given}


def _num_chars(message: dict[str, Any]) -> int:
    """Return the length of a message's content in characters; 0 if the content is not a text."""
    content = message.get("content")
    return len(content) if isinstance(content, str) else 0
