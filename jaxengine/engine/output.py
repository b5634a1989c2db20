"""What a step of the engine brought, as the engine tells it to whoever makes text of it: arrays, not a loop over rows.

Also what crosses from the engine's process to those that speak with clients. Knows no device and no text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scheduler.errors import RequestError
from scheduler.request import Request


class TokenScores(NamedTuple):
    """Logprobs of n tokens.

    Attributes:
      logprobs: f32[n].
      ranks: i32[n], 1 is best.
      top_ids, top_logprobs: i32[n, k], f32[n, k], best first.
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


_NONE = np.empty(0, np.int64)


class EmittedTokens(NamedTuple):
    """One token of each of n requests that follow every step.

    Attributes:
      tags: i32[n] or i64[n], the requests' own.
      token_ids: i32[n]; a negative one is no token, its request ends with an error.
      scored: i64[m], the indexes of those whose logprobs were asked for; scores are theirs, None without any.
    """

    tags: np.ndarray
    token_ids: np.ndarray
    scored: np.ndarray = _NONE
    scores: TokenScores | None = None


@dataclass(frozen=True)
class PromptScores:
    """Logprobs of a stretch of a prompt: the first is of prompt token `first`."""

    request: Request
    first: int
    scores: TokenScores


@dataclass
class EngineOutput:
    """What one call of `Engine.step` brought.

    Attributes:
      emitted: tokens of requests that follow every step, with their logprobs where asked for.
      prompt_scores: logprobs of prompts.
      first_tokens: requests whose first token came.
      finished: requests that ended, deadlines included.
      refused: requests that are over before they began, and the error that their callers are to get: their grammars
        cannot be used. The caller of a request with several outputs gets one of the errors and no output.
    """

    emitted: list[EmittedTokens] = field(default_factory=list)
    prompt_scores: list[PromptScores] = field(default_factory=list)
    first_tokens: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    refused: list[tuple[Request, RequestError]] = field(default_factory=list)
