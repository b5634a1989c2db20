"""What a step of the engine brought, as the engine tells it to whoever makes text of it: arrays, not a loop over rows.

Also what crosses from the engine's process to those that speak with clients. Knows no device and no text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxengine.scheduler.batch import TokenRows, TokenScores
from jaxengine.scheduler.errors import RequestError
from jaxengine.scheduler.request import Request


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
      found: requests whose text may end them and that have new rows in `Request.found`.
      first_tokens: requests whose first token came.
      finished: requests that ended, deadlines included.
      refused: requests that are over before they began, and the error that their callers are to get: their grammars
        cannot be used. The caller of a request with several outputs gets one of the errors and no output.
    """

    emitted: list[TokenRows] = field(default_factory=list)
    prompt_scores: list[PromptScores] = field(default_factory=list)
    found: list[Request] = field(default_factory=list)
    first_tokens: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    refused: list[tuple[Request, RequestError]] = field(default_factory=list)
