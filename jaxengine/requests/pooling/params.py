"""vLLM's PoolingParams, and the computation of an answer from the model's vector.

Checks parameters, and applies the cut to fewer dimensions, normalisation and activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxengine.config.pooling_model import (
    EMBED,
    IDENTITY,
    NORMALIZE,
    SIGMOID,
    SOFTMAX,
    PoolingModel,
    check_dimensions,
)
from jaxengine.scheduler.errors import RequestError, show_value
from jaxengine.scheduler.token_params import TokenParams

# Least divisor, as in torch.nn.functional.normalize.
_LEAST_LENGTH = 1e-12
_SWITCHES = ("normalize", "use_activation", "softmax", "activation", "skip_reading_prefix_cache")


@dataclass(frozen=True)
class PoolingRecipe:
    """How a pooling model's answer is computed from a request's vector.

    Attributes:
      dimensions: number of leading dimensions to keep; None for all.
      activation: NORMALIZE, SOFTMAX, SIGMOID or IDENTITY.
    """

    dimensions: int | None
    activation: str

    def finish(self, vector: np.ndarray) -> np.ndarray:
        """Compute the answer f32[dimensions] (f32[N] if dimensions is None) from the model's vector f32[N]."""
        kept = vector[: self.dimensions].astype(np.float64)
        if self.activation == NORMALIZE:
            kept /= max(float(np.linalg.norm(kept)), _LEAST_LENGTH)
        elif self.activation == SOFTMAX:
            kept = np.exp(kept - kept.max())
            kept /= kept.sum()
        elif self.activation == SIGMOID:
            kept = np.exp(-np.logaddexp(0.0, -kept))
        else:
            assert self.activation == IDENTITY
        return kept.astype(np.float32)


@dataclass(kw_only=True)
class PoolingParams:
    """Parameters of a request to a pooling model. Checked when the request is prepared; None is the model's default.

    Attributes:
      truncate_prompt_tokens: number of prompt tokens to keep, its last ones; of an encoder its first ones, with the
        special token at the end. -1: max_model_len.
      dimensions: number of leading dimensions of an embedding, cut before normalisation; for models declared to be
        trained for it (Matryoshka).
      normalize: normalise an embedding to length 1; same as use_activation.
      use_activation: normalise an embedding, or turn scores into probabilities. softmax and activation are earlier
        names.
      task: "embed", "classify" or "score"; only the one that the model is for.
      prompt_name: name of a prompt in config_sentence_transformers.json to prepend to the text; "" for none.
      skip_reading_prefix_cache: compute every token of the prompt.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    task: str | None = None
    prompt_name: str | None = None
    skip_reading_prefix_cache: bool | None = None

    def recipe(self, model: PoolingModel) -> PoolingRecipe:
        """Return how the answer is computed. Raises RequestError for parameters that this model does not support."""
        for name in _SWITCHES:
            if getattr(self, name) not in (None, True, False):
                raise _refuse(name, getattr(self, name), "True, False or None")
        if self.task not in (None, model.task, "score"):
            raise _refuse("task", self.task, f"{model.task} or score: the task of this model")
        names = ("use_activation", *(("normalize",) if model.task == EMBED else ("softmax", "activation")))
        for name in ("normalize", "softmax", "activation"):
            if getattr(self, name) is not None and name not in names:
                raise _refuse(name, getattr(self, name), f"None with task {model.task}")
        said = {getattr(self, name) for name in names} - {None}
        if len(said) > 1:
            raise _refuse(names[1], getattr(self, names[1]), "the value of use_activation, or None")
        use_activation = said.pop() if said else model.use_activation
        dimensions = self.dimensions
        if dimensions is not None:
            if type(dimensions) is not int or dimensions < 1:
                raise _refuse("dimensions", dimensions, "a whole number of at least 1")
            check_dimensions(model, dimensions, lambda allowed: _refuse("dimensions", dimensions, allowed))
        return PoolingRecipe(dimensions or model.dimensions, model.activation if use_activation else IDENTITY)

    def prefix(self, model: PoolingModel) -> str:
        """Return the text to prepend to the input: of prompt_name, else of the model's default prompt; "" without one.

        Raises RequestError for a prompt_name that the model does not have.
        """
        sentence = model.sentence
        prompts = {} if sentence is None else sentence.prompts
        name = self.prompt_name
        if name is None and sentence is not None:
            name = sentence.default_prompt
        if not name:
            return ""
        if not isinstance(name, str) or name not in prompts:
            raise _refuse(
                "prompt_name", self.prompt_name, ", ".join(map(repr, prompts)) or "None: the model has no prompts"
            )
        return prompts[name]

    def cut(self, token_ids: list[int], longest: int, model: PoolingModel) -> list[int]:
        """Return the token ids that truncate_prompt_tokens keeps (see there), all for None. longest: max_model_len.

        Raises RequestError for a number that is not allowed.
        """
        keep = self.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if type(keep) is not int or not (keep == -1 or 1 <= keep <= longest):
            raise _refuse("truncate_prompt_tokens", keep, f"-1, or 1 to {longest} (max_model_len)")
        return model.cut(token_ids, longest if keep == -1 else keep)

    def token_params(self, model: PoolingModel) -> TokenParams:
        """Return the parameters that the engine's steps need."""
        reads_prompt = model.pooler.reads_all or self.skip_reading_prefix_cache is True
        return TokenParams(temperature=0.0, reads_prompt=reads_prompt)


def _refuse(name: str, value: Any, allowed: str) -> RequestError:
    return RequestError(f"{name} is {show_value(value)}; allowed: {allowed}", param=name, value=value)
