"""Requests of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, SkipValidation, model_validator

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.request.protocol import TEXT_REFUSED, TextRequest


class CompletionRequest(TextRequest):
    """Fields in addition to TextRequest's.

    Attributes:
      prompt: a text, a list of token ids, or a list of texts or of lists of token ids. None with prompt_embeds.
      prompt_embeds: prompts of embeddings in front of those of `prompt`: base64 of a file of each, .npy, safetensors or
        what torch.save writes (jaxengine.requests.media.prompt_embeds).
      max_tokens: None: the rest of the context; 0 only with echo, to score the prompt.
      echo: include the prompt before the output, and with logprobs its logprobs too.
      logprobs: true is 1, as in vLLM; the Tinker server of SkyRL sends it.
      best_of: width of a beam search, at least n; without beam search it must equal n.
    """

    # An output is one text here: stop strings apply to all of it, and reasoning is not separated.
    refused = {
        **TEXT_REFUSED,
        "suffix": ("",),
        "stop_in_reasoning": (True,),
        "thinking_token_budget": (-1,),
    }

    # Checked by read_prompts and below: pydantic would try the union's lists item by item.
    prompt: Annotated[str | list[str] | list[int] | list[list[int]] | None, SkipValidation] = None
    prompt_embeds: Annotated[str | list[str] | None, SkipValidation] = None
    max_tokens: int | None = 16
    logprobs: Annotated[int | None, BeforeValidator(lambda given: 1 if given is True else given)] = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        """Return this request after checking it. Raises RequestError without a prompt, for an invalid form of
        prompt_embeds, for logprob_token_ids without output, and for a best_of other than n, except a larger one with a
        beam search.
        """
        if self.prompt_embeds is not None:
            self._check_embedded()
        elif self.prompt is None:
            raise RequestError("prompt is missing; give it, or prompt_embeds", param="prompt")
        if self.max_tokens == 0 and self.logprob_token_ids:
            problem = "logprob_token_ids is only allowed with a max_tokens above 0, as they are of the output"
            raise RequestError(problem, param="logprob_token_ids")
        n, beams = self.n or 1, bool(self.use_beam_search)
        if self.best_of not in (None, n) and not (beams and self.best_of > n):
            raise RequestError(
                f"best_of is {self.best_of}, but it is not supported; allowed: to leave it out or n", param="best_of"
            )
        return self

    def _check_embedded(self) -> None:
        """Raise RequestError if prompt_embeds is neither a text nor a list of texts, and for fields that need a
        prompt's token ids, which embeddings do not have.
        """
        each = [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds
        if not isinstance(each, list) or not each or set(map(type, each)) != {str}:
            problem = f"prompt_embeds must be base64 of a file, or a list of such, got {show_value(self.prompt_embeds)}"
            raise RequestError(problem, param="prompt_embeds")
        for name in ("echo", "truncate_prompt_tokens", "use_beam_search", "return_token_ids"):
            if value := getattr(self, name):
                problem = f"{name} is {value}; allowed with prompt_embeds: to leave it out, as the prompt has no tokens"
                raise RequestError(problem, param=name, value=value)

    @property
    def embedded(self) -> list[str]:
        """Prompts of embeddings, each base64 of a file; [] without any."""
        return [self.prompt_embeds] if isinstance(self.prompt_embeds, str) else self.prompt_embeds or []
