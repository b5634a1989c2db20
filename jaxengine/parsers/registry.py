"""The parsers by vLLM's names for them. A new one is a file and a row here."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jaxengine.config.engine_config import ConfigError
from jaxengine.parsers import tool_hermes, tool_llama3, tool_mistral, tool_pythonic
from jaxengine.parsers.call_grammar import CallGrammar
from jaxengine.parsers.events import OutputParser
from jaxengine.parsers.reasoning_think import ThinkParser, begins_inside


def call_ids() -> Iterator[str]:
    """New ids of tool calls, for ever."""
    while True:
        yield f"chatcmpl-tool-{uuid.uuid4().hex}"


def short_call_ids() -> Iterator[str]:
    """As Mistral's chat templates ask for: nine letters and digits."""
    while True:
        yield "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
      grammar: rules for them, `calls` above the others; raises ValueError for functions that the format cannot call.
      special_tokens: it marks them with special tokens, which text must then show.
    """

    parser: Callable[[Iterable[str]], OutputParser]
    grammar: Callable[[CallGrammar], Iterator[str]]
    ids: Callable[[], Iterator[str]] = call_ids
    special_tokens: bool = False

    def open(self) -> OutputParser:
        """A parser for one output."""
        return self.parser(self.ids())


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model writes its reasoning.

    Attributes:
      begin, end: the words around it.
      always: an output begins with it, whether or not prompt or output hold the opening word.
    """

    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False
    special_tokens: bool = False

    def open(self, prompt: str, continued: str = "") -> OutputParser:
        """A parser for one output that follows `prompt`; `continued`: the part of an answer that it goes on with."""
        inside = begins_inside(prompt, continued, self.begin, self.end, self.always)
        return ThinkParser(self.begin, self.end, inside)


TOOL_PARSERS = {
    "hermes": ToolFormat(tool_hermes.HermesToolParser, tool_hermes.grammar),
    "llama3_json": ToolFormat(tool_llama3.Llama3ToolParser, tool_llama3.grammar, special_tokens=True),
    "llama4_json": ToolFormat(tool_llama3.Llama3ToolParser, tool_llama3.grammar, special_tokens=True),
    "mistral": ToolFormat(
        tool_mistral.MistralToolParser, tool_mistral.grammar, ids=short_call_ids, special_tokens=True
    ),
    "pythonic": ToolFormat(tool_pythonic.PythonicToolParser, tool_pythonic.grammar),
}

REASONING_PARSERS = {
    "deepseek_r1": ReasoningFormat(always=True),
    "qwen3": ReasoningFormat(),
    "glm45": ReasoningFormat(),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", special_tokens=True),
}


def tool_format(name: str | None) -> ToolFormat | None:
    """Of the tool parser called so. Raises ConfigError for a name that is not known."""
    if name is None:
        return None
    if name not in TOOL_PARSERS:
        raise ConfigError("tool_call_parser", name, ", ".join(TOOL_PARSERS))
    return TOOL_PARSERS[name]


def reasoning_format(name: str | None) -> ReasoningFormat | None:
    """Of the reasoning parser called so. Raises ConfigError for a name that is not known."""
    if name is None:
        return None
    if name not in REASONING_PARSERS:
        raise ConfigError("reasoning_parser", name, ", ".join(REASONING_PARSERS))
    return REASONING_PARSERS[name]
