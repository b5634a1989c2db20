"""Limits of sampling parameters, and the kinds of output. Imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum

# vLLM's own limit of `n`; the server sets a lower one.
MAX_N = 16384
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_TOKENS = 1024
# Limit of all bad words together: more characters than that many tokens have.
MAX_BAD_WORDS_CHARS = 32 * MAX_BAD_WORDS_TOKENS
MAX_STOP_CHARS = 16384
# Entries of a list of token ids; no vocabulary is larger.
MAX_TOKEN_IDS = 2**20
MAX_EXTRA_ARGS = 256
GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 0.01
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
# Fields that vLLM's SamplingParams had, and what to use.
_INSTEAD = {
    "best_of": "n",
    "guided_decoding": "structured_outputs",
    "truncate_prompt_tokens": "tokenization_kwargs of LLM.generate",
    "use_beam_search": "LLM.beam_search",
}


class RequestOutputKind(Enum):
    """Content of each RequestOutput of a stream: CUMULATIVE, everything so far; DELTA, what is new since the last one;
    FINAL_ONLY, one output, at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def no_field(name: str, fields: Iterable[str]) -> str:
    """Return an error's text: there is no field `name`, and what to use instead, which may be one of `fields`."""
    near = difflib.get_close_matches(name, fields, 1)
    use = f"; use {_INSTEAD[name]}" if name in _INSTEAD else f"; it has {near[0]!r}" if near else ""
    return f"SamplingParams has no field {name!r}{use}"
