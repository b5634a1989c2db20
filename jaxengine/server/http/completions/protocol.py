"""Requests of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import SkipValidation, model_validator

from jaxengine.scheduler.errors import RequestError
from jaxengine.server.http.protocol import TEXT_REFUSED, TextRequest


class CompletionRequest(TextRequest):
    """Fields in addition to TextRequest's.

    Attributes:
      prompt: a text, a list of token ids, or a list of texts or of lists of token ids.
      max_tokens: None: the rest of the context; 0 only with echo, to score the prompt.
      echo: include the prompt before the output, and with logprobs its logprobs too.
      best_of: width of a beam search, at least n; without beam search it must equal n.
    """

    # An output is one text here, in which stop strings are looked for everywhere and reasoning is not told apart.
    refused = {
        **TEXT_REFUSED,
        "prompt_embeds": (),
        "suffix": ("",),
        "stop_in_reasoning": (True,),
        "thinking_token_budget": (-1,),
    }

    # Checked by read_prompts: pydantic would try the union's lists item by item.
    prompt: Annotated[str | list[str] | list[int] | list[list[int]], SkipValidation]
    max_tokens: int | None = 16
    logprobs: int | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        n, beams = self.n or 1, bool(self.use_beam_search)
        if self.best_of not in (None, n) and not (beams and self.best_of > n):
            raise RequestError(
                f"best_of is {self.best_of}, but it is not supported; allowed: to leave it out or n", param="best_of"
            )
        return self
