"""A conversation in progress: the request to the engine, and the parsing of its outputs.

Shared by chat completions, responses, messages and Cohere's chat.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxengine.api.engine_client import EngineClient
from jaxengine.parsers.message import MessageParser
from jaxengine.parsers.registry import ReasoningFormat, ToolFormat, reasoning_format, suffix_of, tool_format
from jaxengine.parsers.scan.events import ArgumentsDelta, Event, ReasoningDelta, ToolCallStart
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.media.inputs import READY
from jaxengine.requests.output.outputs import CompletionOutput, RequestOutput
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.structured.params import StructuredOutputsParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.beam_search import beam_search
from jaxengine.server.base.captured import check_captured
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.chat.prompt import ChatRenderer
from jaxengine.server.http.chat.protocol import ChatRequest, text_of
from jaxengine.server.http.chat.tool_choice import tool_use
from jaxengine.server.http.request.errors import renamed, renaming

# Function that counts an output which a parser of tool calls has read to its end; takes vLLM's mode and outcome.
COUNT_PARSED: ContextVar[Callable[[str, str], None] | None] = ContextVar("COUNT_PARSED", default=None)
_LONG_TEXT = 20_000  # characters of one output that take some 40 milliseconds to parse


@dataclass(frozen=True)
class ChatServer:
    """Objects that all conversations of a server share.

    Attributes:
      engine: engine of the server.
      config: options of the server, in which no parser is "auto".
      renderer: renders conversations to prompts.
      tool_format, reasoning_format: formats of the model; None if the server has no parser for it.
    """

    engine: EngineClient
    config: ServerConfig
    renderer: ChatRenderer
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None

    @classmethod
    def open(cls, engine: EngineClient, config: ServerConfig) -> ChatServer:
        """Return the objects that a server's chat routes share. Raises ConfigError for an unknown parser, and for a
        reasoning parser that the engine has instead of the server.
        """
        engine.inputs.config.structured_outputs_config.check_for_server()
        tokenizer = engine.inputs.tokenizer
        suffix = "" if tokenizer is None else suffix_of(tokenizer.added_words)
        formats = tool_format(config.tool_call_parser, suffix), reasoning_format(config.reasoning_parser, suffix)
        return cls(engine, config, ChatRenderer(engine, config), *formats)


class Piece(NamedTuple):
    """New part of one of a request's outputs, with the parser's events for it."""

    output: CompletionOutput
    events: list[Event]


class ChatRun:
    """Conversation request in progress.

    Attributes:
      body: the request.
      params: the engine's sampling parameters.
      prompt: text and token ids; empty before `prepare`.
      num_completion_tokens, num_reasoning_tokens, num_cached_tokens: numbers of tokens so far.
      num_created_cache_tokens: the prompt's tokens whose pages this request added to the prefix cache, whole pages that
        were not found there; 0 before the first output, and without prefix caching.
      num_media_tokens: of the prompt's tokens, those that stand for images, videos and sounds, by modality; empty
        before `prepare`.
    """

    def __init__(self, server: ChatServer, body: ChatRequest, name: str, options: RequestOptions, *, is_stream: bool):
        """Create the sampling parameters and parsers of a request; nothing runs before `pieces`.

        name: the request's id in the engine. options: its scheduling options. is_stream: whether the answer is counted
        as streamed among parsed outputs. Raises RequestError, with the field names of `body`, for fields that this
        model or server cannot serve.
        """
        self._server = server
        self._name = name
        self._options = options
        self.body = body
        tokenizer = server.engine.inputs.require_tokenizer()
        switches = server.engine.inputs.config.structured_outputs_config.chosen
        self._reasoning, auto = server.reasoning_format, server.config.enable_auto_tool_choice
        self._tools = tool_use(body, auto, server.tool_format, self._reasoning, tokenizer, switches)
        self._check_budget()
        with renaming(self._as_asked):
            self.params = self._sampling_params()
            if self._shows_special_tokens and body.skip_special_tokens is None:
                self.params = self.params.clone_with(skip_special_tokens=False)
            self._beams = body.beam_params(server.engine.inputs, self.params)
        self.prompt: dict[str, Any] = {}
        self._parsers: dict[int, MessageParser] = {}
        self._reasoning_texts: dict[int, list[str]] = {}
        self._count_parsed, self._calling, self._is_stream = COUNT_PARSED.get(), set[int](), is_stream
        self.num_completion_tokens = 0
        self.num_cached_tokens = self.num_created_cache_tokens = 0
        self.num_media_tokens: Mapping[str, int] = {}
        self.num_reasoning_tokens = 0

    @property
    def has_reasoning(self) -> bool:
        """Whether the server separates reasoning from content."""
        return self._reasoning is not None

    @property
    def hides_tokens(self) -> bool:
        """Whether the answer has neither token ids nor log-probabilities, which would tell the reasoning that the
        request leaves out (include_reasoning=False).
        """
        return self.has_reasoning and self.body.include_reasoning is False

    @property
    def ignored(self) -> list[str]:
        """Names of the request's fields that have no effect for this model."""
        return self._server.renderer.ignored(self.body)

    @property
    def most_prompt_tokens(self) -> int:
        """Upper bound of the prompt's number of tokens, after `prepare`: the exact number or, with images or videos,
        max_model_len.
        """
        known = READY not in self.prompt
        return len(self.prompt["prompt_token_ids"]) if known else self._server.engine.inputs.config.max_model_len

    async def prepare(self) -> None:
        """Render the conversation, set `prompt`, and with a reasoning parser change `params` so that grammars and,
        unless stop_in_reasoning is set, stop strings apply only after the reasoning, whose limit is added.

        Raises RequestError for a conversation that cannot be rendered, for media with a beam search, and for
        activations beyond the server's limit; OverloadedError.
        """
        self.prompt = await self._server.renderer.prompt(self.body)
        if self._beams is not None and READY in self.prompt:
            problem = "use_beam_search is only allowed without images, videos and sounds"
            raise RequestError(problem, param="use_beam_search")
        if (media := self.prompt.get(READY)) is not None:
            self.num_media_tokens = media.num_tokens
        check_captured(self._server.engine.inputs, self._server.config, self.params, [self.most_prompt_tokens])
        self._read_around_reasoning()

    def _check_budget(self) -> None:
        """Raise RequestError for a thinking_token_budget that could have no effect, because no parser separates
        reasoning or a forced call's grammar includes it. None and -1, which set no limit, always pass.
        """
        budget = self.body.thinking_token_budget
        if budget in (None, -1):
            return
        allowed = None
        if self._reasoning is None:
            allowed = "needs a server with --reasoning-parser of the model's format"
        elif self._tools.is_whole:
            allowed = "is not possible with a tool call that is forced in the model's own format"
        if allowed is not None:
            raise RequestError(f"thinking_token_budget {allowed}", param="thinking_token_budget", value=budget)

    def _read_around_reasoning(self) -> None:
        """Change `params`, which needs `prompt`, so that the output's grammar and stop strings apply only after the
        reasoning, and add the limit of the reasoning. With stop_in_reasoning stop strings apply to the reasoning too,
        and a grammar that covers a whole forced call applies from the beginning. Does nothing without a reasoning
        parser. Raises RequestError for a limit that is not allowed.
        """
        if self._reasoning is None:
            return
        prompt, continued = self.prompt["prompt"], self._continued
        if self.params.stop and not self.body.stop_in_reasoning:
            after = self._reasoning.answers_after(prompt, continued, calls=self._tools.calls is not None)
            self.params = self.params.clone_with(stop_after=after)
        structure = self.params.structured_outputs
        if isinstance(structure, StructuredOutputsParams) and not self._tools.is_whole:
            if structure.reasoning_end is None:
                structure = replace(structure, **self._reasoning.waits_for(prompt, continued))
                self.params = self.params.clone_with(structured_outputs=structure)
            if structure.reasoning_end is None:  # there is no reasoning to limit
                return
        budget = self.body.thinking_token_budget
        if budget is not None and (words := self._reasoning.limited_by(prompt, continued)) is not None:
            self.params = self.params.clone_with(thinking_token_budget=budget, thinking_words=words)

    async def pieces(self) -> AsyncGenerator[tuple[RequestOutput, list[Piece]], None]:
        """Run the request and yield the engine's outputs, each with one Piece for each of `output.outputs`, whose
        events are those that the request wants. Call it after `prepare`. Updates the counts of tokens.

        Raises the errors of EngineClient.stream; a RequestError names the request's field.
        """
        engine = self._server.engine
        if self._beams is not None:
            outputs = beam_search(engine, self.prompt, self._beams, self._name, self._options)
        else:
            outputs = engine.stream(self.prompt, self.params, self._name, self._options)
        async with contextlib.aclosing(outputs):  # pyright: ignore[reportArgumentType]
            with renaming(self._as_asked):
                async for output in outputs:
                    self.num_cached_tokens = output.num_cached_tokens or 0
                    self.num_created_cache_tokens = _created_cache_tokens(engine.inputs, output)
                    long = sum(len(each.text) for each in output.outputs) > _LONG_TEXT
                    pieces = await asyncio.to_thread(self._read, output) if long else self._read(output)
                    self._count_ended(output)
                    yield output, pieces

    def _read(self, output: RequestOutput) -> list[Piece]:
        """Return a Piece for each completion of an output; update the counts of tokens."""
        return [Piece(each, self._parse(each)) for each in output.outputs]

    def _parse(self, output: CompletionOutput) -> list[Event]:
        """Parse the new part of one completion; return those of its events that the request wants. Updates the counts
        of tokens.
        """
        self.num_completion_tokens += len(output.token_ids)
        parser = self._parsers.get(output.index)
        if parser is None:
            parser = self._parsers[output.index] = self._open_parser()
        events = parser.feed(output.text)
        if output.finish_reason is not None:
            events += parser.finish()
        thoughts = self._reasoning_texts.setdefault(output.index, [])
        thoughts += [event.text for event in events if isinstance(event, ReasoningDelta)]
        if output.finish_reason is not None and thoughts:
            self._count_reasoning("".join(thoughts))
        if any(isinstance(event, ToolCallStart) for event in events):
            self._calling.add(output.index)
        return [event for event in events if self._is_wanted(event)]

    def _count_ended(self, output: RequestOutput) -> None:
        """Count the completions of an output that have ended, with and without tool calls, by COUNT_PARSED. Does
        nothing if tool calls are not parsed.
        """
        if self._tools.open is None or self._count_parsed is None:
            return
        for each in output.outputs:
            if each.finish_reason is not None:
                outcome = "tool_call" if each.index in self._calling else "no_tool_call"
                self._count_parsed("streaming" if self._is_stream else "non_streaming", outcome)

    def _open_parser(self) -> MessageParser:
        """Return a new parser for one completion, in the state in which the prompt ends."""
        reasoning = None
        if self._reasoning is not None:
            reasoning = self._reasoning.open(self.prompt["prompt"], self._continued, calls=self._tools.calls)
        defaults = self._server.config.default_chat_template_kwargs or {}
        is_never_empty = {**defaults, **(self.body.chat_template_kwargs or {})}.get("force_nonempty_content") is True
        return MessageParser(reasoning, None if self._tools.open is None else self._tools.open(), is_never_empty)

    @property
    def _continued(self) -> str:
        """Text of the last message, if the model continues it; "" otherwise."""
        return text_of(self.body.messages[-1].get("content")) if self.body.continues else ""

    def _is_wanted(self, event: Event) -> bool:
        """Whether the request wants an event. Reasoning is unwanted with include_reasoning=False, and calls after the
        first with parallel_tool_calls=False.
        """
        if isinstance(event, ReasoningDelta):
            return self.body.include_reasoning is not False
        if isinstance(event, ToolCallStart | ArgumentsDelta):
            return event.index == 0 or self.body.parallel_tool_calls is not False
        return True

    def _count_reasoning(self, text: str) -> None:
        """Add the number of tokens in a completion's reasoning to num_reasoning_tokens, which is kept at or below
        num_completion_tokens.
        """
        tokenizer = self._server.engine.inputs.require_tokenizer()
        counted = self.num_reasoning_tokens + len(tokenizer.encode(text, add_special_tokens=False))
        # The text may be tokenized differently from how it was sampled.
        self.num_reasoning_tokens = min(counted, self.num_completion_tokens)

    def _as_asked(self, error: RequestError) -> RequestError:
        """Return an error about structured_outputs with the name of the request's field from which these follow; return
        other errors unchanged.
        """
        if error.param != "structured_outputs" or self.body.structured_outputs is not None:
            return error
        return renamed(error, "response_format" if self._tools.structure is None else self._tools.asked_by)

    @property
    def _shows_special_tokens(self) -> bool:
        """Whether texts must include special tokens, because the model marks calls or reasoning with them."""
        return self._tools.special_tokens or (self._reasoning is not None and self._reasoning.special_tokens)

    @property
    def _stop_token_ids(self) -> list[int]:
        """Token ids with which the model's formats of calls and reasoning end an output. Words that are not single
        tokens are left out. [] with ignore_eos.
        """
        if self.body.ignore_eos:
            return []
        words = {*self._tools.stop_words, *(() if self._reasoning is None else self._reasoning.stop_words)}
        tokenizer = self._server.engine.inputs.require_tokenizer()
        found = [tokenizer.backend.token_to_id(word) for word in sorted(words)]
        return [token_id for token_id in found if token_id is not None]

    def _sampling_params(self) -> SamplingParams:
        """Return the engine's sampling parameters, with `_stop_token_ids` and without the limit of the reasoning, which
        `prepare` adds. Without a limit of tokens the model's default counts, if it has one; a whole answer with echo
        and logprobs also has prompt_logprobs. Raises RequestError for a token limit above max_model_len, for
        top_logprobs above max_logprobs or of -1 (all) unless that is -1 too, and for other values that are not allowed.
        """
        body, inputs = self.body, self._server.engine.inputs
        name, most = body.most_tokens
        if most is not None and most > inputs.config.max_model_len:
            raise RequestError(
                f"{name} is {most}; allowed: at most max_model_len ({inputs.config.max_model_len})", param=name
            )
        asked, limit = body.top_logprobs or 0, inputs.config.max_logprobs
        if limit != -1 and not 0 <= asked <= limit:
            raise RequestError(f"top_logprobs is {asked}; allowed: 0 to {limit}", param="top_logprobs")
        changes: dict[str, Any] = {
            "thinking_token_budget": None,  # set once the prompt is rendered
            "max_tokens": most or inputs.generation_defaults.get("max_tokens"),
            "logprobs": asked if body.logprobs else None,
        }
        if self.hides_tokens:
            changes |= {"return_sampling_mass": False, "return_sampling_mask": False}
        if body.echo and body.logprobs and body.prompt_logprobs is None and not body.stream:
            changes["prompt_logprobs"] = asked
        if self._tools.structure is not None:
            changes["structured_outputs"] = self._tools.structure
        if stops := self._stop_token_ids:
            changes["stop_token_ids"] = [*(body.stop_token_ids or ()), *stops]
        return body.sampling_params(inputs, self._server.config, **changes)


def _created_cache_tokens(inputs: InputProcessor, output: RequestOutput) -> int:
    """Return how many tokens of an output's prompt were added to the prefix cache: see `num_created_cache_tokens`."""
    config = inputs.config
    if not config.enable_prefix_caching:
        return 0
    given = len(output.prompt_token_ids)
    return max(0, given - given % config.block_size - (output.num_cached_tokens or 0))
