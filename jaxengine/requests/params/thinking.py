"""Limit on an output's reasoning, in tokens, and the words that separate the reasoning from the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxengine.requests.structured.params import words_of
from jaxengine.scheduler.base.errors import RequestError, refuse
from jaxengine.scheduler.base.token_params import FREE, Grammar, ThinkingBudget

MAX_CHARS = 256


@dataclass(frozen=True, kw_only=True)
class ThinkingWords:
    """The words around reasoning, named as in StructuredOutputsParams.

    Attributes:
      reasoning_end: text that ends the reasoning, or a list of alternatives, each a text or a list of consecutive
        texts. Stored as tuples of tuples.
      reasoning_begin: text that begins the reasoning, for models that may omit it; None if every output begins with
        reasoning.
      closing: text that is written when the budget is used up, which ends the reasoning; None for the first alternative
        of reasoning_end.

    Raises:
      RequestError: a value of another form or longer than `words_of` allows; a reasoning_begin or closing that does
        not have 1 to 256 characters.
    """

    reasoning_end: str | Sequence[str | Sequence[str]]
    reasoning_begin: str | None = None
    closing: str | None = None

    def __post_init__(self) -> None:
        ends = words_of("thinking_words", "reasoning_end", self.reasoning_end)
        object.__setattr__(self, "reasoning_end", ends)
        if self.closing is None:
            object.__setattr__(self, "closing", "".join(ends[0]))
        for name in ("reasoning_begin", "closing"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and 1 <= len(value) <= MAX_CHARS):
                raise refuse(f"thinking_words.{name}", value, f"a text of 1 to {MAX_CHARS} characters, or None")


def thinking_words(name: str, value: Any) -> ThinkingWords:
    """Return a ThinkingWords for a value of SamplingParams.thinking_words: a ThinkingWords or a dict of its fields.
    Raises RequestError for other values. name: the field's name, for the error.
    """
    if isinstance(value, ThinkingWords):
        return value
    known = {field.name for field in fields(ThinkingWords)}
    if not isinstance(value, Mapping) or "reasoning_end" not in value or set(value) - known:
        raise refuse(name, value, "None or a dict with reasoning_end and optionally reasoning_begin and closing")
    return ThinkingWords(**value)


def limited(
    grammar: Grammar | None, num_tokens: int, words: ThinkingWords, encode: Callable[[str], Sequence[int]]
) -> Grammar:
    """Return a copy of the grammar with a limit on the reasoning before the answer; for None a FREE grammar, which only
    limits the reasoning.

    grammar: grammar of the answer; None for an answer of any form. num_tokens: the limit. words: texts around
    reasoning. encode: returns the token ids of a text, () if the model cannot write it; the FREE grammar has no
    reasoning if that is so of reasoning_begin. Raises RequestError for a grammar that begins without reasoning, on
    which the limit has no effect, and for a closing text that the model cannot write.
    """
    closing = tuple(encode(str(words.closing)))
    if not closing:
        raise refuse("thinking_words.closing", words.closing, "a text of this model's tokens")
    if grammar is None:
        begin = () if words.reasoning_begin is None else tuple(encode(words.reasoning_begin))
        # A model that cannot write the opening word does not reason.
        ends = words.reasoning_end if begin or words.reasoning_begin is None else ()
        grammar = Grammar(kind=FREE, text="", reasoning_end=ends, reasoning_begin=begin)  # pyright: ignore[reportArgumentType]  # stored as tuples
    elif not grammar.reasoning_end:
        problem = "thinking_token_budget has no effect, because structured_outputs constrains the whole output"
        raise RequestError(f"{problem}; give structured_outputs.reasoning_end", param="thinking_token_budget")
    budget = ThinkingBudget(num_tokens=num_tokens, ends=words.reasoning_end, closing=closing)  # pyright: ignore[reportArgumentType]
    return replace(grammar, budget=budget)
