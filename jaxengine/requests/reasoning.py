"""Structured outputs of models that reason: grammars that begin after the reasoning, by a reasoning parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxengine.config.engine_config import ConfigError, ResolvedConfig
from jaxengine.parsers.reasoning_rows import REASONING_PARSERS
from jaxengine.parsers.registry import reasoning_format, suffix_of
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.structured.params import StructuredOutputsParams
from jaxengine.tokens.tokenizer import Tokenizer

# A format looks at 1000 characters at most (jaxengine.parsers.reasoning.think), and a token that is a byte is a quarter
# of one. A prompt may have a million tokens.
_TAIL_TOKENS = 4000


def check_reasoning(config: ResolvedConfig) -> None:
    """Raise ConfigError if structured_outputs_config.reasoning_parser is none of the reasoning parsers' names."""
    if (name := config.structured_outputs_config.reasoning_parser) not in REASONING_PARSERS:
        raise ConfigError("structured_outputs_config.reasoning_parser", name, ", ".join(REASONING_PARSERS))


def after_reasoning(
    params: SamplingParams, name: str, text: str | None, token_ids: Sequence[int], tokenizer: Tokenizer
) -> SamplingParams:
    """Return parameters whose structured outputs apply only after the reasoning of an output. Parameters without
    structured outputs, or that say themselves where the reasoning ends, are returned unchanged, and so are those of a
    prompt that has closed the reasoning, and all with the parser "auto".

    name: name of the reasoning parser. text, token_ids: the prompt, whose end says whether the output begins inside of
    reasoning; if the text is None, the last _TAIL_TOKENS ids are decoded. Raises ConfigError for an unknown name.
    """
    asked = params.structured_outputs
    if not isinstance(asked, StructuredOutputsParams) or asked.reasoning_end is not None:
        return params
    if (row := reasoning_format(name, suffix_of(tokenizer.added_words))) is None:
        return params
    if text is None:
        text = tokenizer.decode(list(token_ids[-_TAIL_TOKENS:]), skip_special_tokens=False)
    return params.clone_with(structured_outputs=replace(asked, **row.waits_for(text)))
