"""Results of a step in the form in which the engine passes them to text processing: arrays, without a loop over rows.

These types also cross from the engine's process to the API processes. They contain token ids, no text or device arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import TokenRows, TokenScores


@dataclass(frozen=True)
class PromptScores:
    """Logprobs of consecutive tokens of a request's prompt.

    Attributes:
      request: the request whose prompt is scored.
      first: index in the prompt of the first scored token.
      scores: logprobs of the tokens from there on, one row each.
    """

    request: Request
    first: int
    scores: TokenScores


class Found(NamedTuple):
    """Rows that a capability returns for a request, such as activations or routed experts.

    Attributes:
      request: the request that gets them.
      name: field of CompletionOutput to which they are added.
      rows: [n, ...], one row for each of the next n tokens of the request, prompt tokens first.
    """

    request: Request
    name: str
    rows: np.ndarray


@dataclass
class EngineOutput:
    """Results of one call of `Engine.step`.

    Attributes:
      emitted: new tokens of requests that stream every step, with their logprobs if requested.
      prompt_scores: logprobs of prompts.
      found: rows that capabilities return to requests.
      first_tokens: requests that got their first token.
      finished: requests that ended, including those past their deadline.
      refused: (request, error) of requests that ended before they began, because their grammar cannot be used. The
        caller of a request with several outputs gets one of the errors and no output.
    """

    emitted: list[TokenRows] = field(default_factory=list)
    prompt_scores: list[PromptScores] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    first_tokens: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    refused: list[tuple[Request, RequestError]] = field(default_factory=list)
