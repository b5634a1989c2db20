"""What a client of /v1/completions may send."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import SkipValidation, model_validator

from jaxengine.server.http.protocol import TEXT_REFUSED, TextRequest
from scheduler.errors import RequestError


class CompletionRequest(TextRequest):
    """The fields of TextRequest and these.

    Attributes:
      prompt: a text, a list of token ids, or a list of texts or of lists of token ids.
      max_tokens: None: as many as the context leaves; 0 only with echo, to have the prompt scored.
      echo: the prompt before the output, and with logprobs its logprobs too.
      best_of: beams of a beam search, n at least; without one, other than n it is not supported.
    """

    refused = {**TEXT_REFUSED, "prompt_embeds": (), "suffix": ("",)}

    # Checked by read_prompts: a union of lists would be tried, and fail, item by item.
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
