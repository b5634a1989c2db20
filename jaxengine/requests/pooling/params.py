"""vLLM's PoolingParams, and the computation of an answer from the model's vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxengine.config.features.pooling_model import (
    EMBED,
    IDENTITY,
    NORMALIZE,
    RELU,
    SIGMOID,
    SOFTMAX,
    TOKEN_EMBED,
    PoolingModel,
    TokenTask,
    check_dimensions,
)
from jaxengine.scheduler.base.errors import invalid
from jaxengine.scheduler.base.token_params import TokenParams

# Least divisor, as in torch.nn.functional.normalize.
_LEAST_LENGTH = 1e-12
_SWITCHES = ("normalize", "use_activation", "softmax", "activation", "skip_reading_prefix_cache")


@dataclass(frozen=True)
class PoolingRecipe:
    """How a pooling model's answer is computed from a request's vector.

    Attributes:
      dimensions: number of leading dimensions to keep; None for all.
      activation: NORMALIZE, SOFTMAX, SIGMOID, RELU or IDENTITY.
      tokens: the task, if it is one about tokens; None for a task about prompts.
    """

    dimensions: int | None
    activation: str
    tokens: TokenTask | None = None

    def finish(self, vectors: np.ndarray) -> np.ndarray:
        """Compute the answer f32[..., dimensions], or f32[..., N] if dimensions is None, from the model's vectors
        f32[..., N]: the first dimensions, with the activation over the last axis computed in float64.
        """
        kept = vectors[..., : self.dimensions].astype(np.float64)
        if self.activation == NORMALIZE:
            kept /= np.maximum(np.linalg.norm(kept, axis=-1, keepdims=True), _LEAST_LENGTH)
        elif self.activation == SOFTMAX:
            kept = np.exp(kept - kept.max(axis=-1, keepdims=True))
            kept /= kept.sum(axis=-1, keepdims=True)
        elif self.activation == SIGMOID:
            kept = np.exp(-np.logaddexp(0.0, -kept))
        elif self.activation == RELU:
            kept = np.maximum(kept, 0.0)
        else:
            assert self.activation == IDENTITY
        return kept.astype(np.float32)

    def finish_tokens(self, rows: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
        """Compute the answer f32[n, dimensions] from the task's columns of the model's rows f32[tokens, N] for a
        prompt's token_ids; n excludes a first or last special token that the task leaves out. For a recipe with
        `tokens` only.
        """
        assert self.tokens is not None
        first, end = self.tokens.columns
        begin, last = self.tokens.left_out
        skipped = int(begin is not None and token_ids[:1] == [begin])
        stop = len(token_ids) - int(last is not None and token_ids[-1:] == [last])
        return self.finish(rows[skipped:stop, first:end])


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
      task: "embed" or "classify", a vector of the prompt; "token_embed" or "token_classify", one of each token; "score"
        for what pairs of texts are scored by. The model must have it; None for its first one.
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
        """Return how the answer is computed. Fields that are None take the model's defaults, the task "score" is the
        model's own, and without activation the recipe has IDENTITY. Only the tasks embed and token_embed have
        dimensions.

        Raises RequestError for a task that the model lacks, for a switch that is neither a bool nor None or that
        belongs to other tasks, for switches that contradict each other, and for dimensions that the task or the model
        does not allow.
        """
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool | None):  # 1 equals True, but is not
                raise invalid(name, getattr(self, name), "True, False or None")
        if self.task not in (None, *model.tasks, "score"):
            raise invalid("task", self.task, f"{', '.join(model.tasks)} or score: the tasks of this model")
        task = model.task if self.task in (None, "score") else self.task
        embeds = task in (EMBED, TOKEN_EMBED)
        names = ("use_activation", *(("normalize",) if embeds else ("softmax", "activation")))
        for name in ("normalize", "softmax", "activation"):
            if getattr(self, name) is not None and name not in names:
                raise invalid(name, getattr(self, name), f"None with task {task}")
        said = {getattr(self, name) for name in names} - {None}
        if len(said) > 1:
            raise invalid(names[1], getattr(self, names[1]), "the value of use_activation, or None")
        use_activation = said.pop() if said else model.use_activation
        dimensions = self.dimensions
        if dimensions is not None:
            if type(dimensions) is not int or dimensions < 1:
                raise invalid("dimensions", dimensions, "a whole number of at least 1")
            if not embeds:
                raise invalid("dimensions", dimensions, f"None with task {task}")
            check_dimensions(model, dimensions, lambda allowed: invalid("dimensions", dimensions, allowed))
        tokens = model.tokens.get(str(task))
        activation = model.activation if tokens is None else tokens.activation
        dimensions = (dimensions or model.dimensions) if embeds else None
        return PoolingRecipe(dimensions, activation if use_activation else IDENTITY, tokens)

    def prefix(self, model: PoolingModel) -> str:
        """Return the text to prepend to the input: the prompt called prompt_name, else the model's default prompt; ""
        without one. Raises RequestError for a prompt_name that the model does not have.
        """
        sentence = model.sentence
        prompts = {} if sentence is None else sentence.prompts
        name = self.prompt_name
        if name is None and sentence is not None:
            name = sentence.default_prompt
        if not name:
            return ""
        if not isinstance(name, str) or name not in prompts:
            raise invalid(
                "prompt_name", self.prompt_name, ", ".join(map(repr, prompts)) or "None: the model has no prompts"
            )
        return prompts[name]

    def num_kept(self, longest: int) -> int | None:
        """Return the number of a prompt's tokens that truncate_prompt_tokens keeps; None without it. longest:
        max_model_len, the meaning of -1. Raises RequestError for other numbers than -1 and 1 to `longest`.
        """
        keep = self.truncate_prompt_tokens
        if keep is not None and (type(keep) is not int or not (keep == -1 or 1 <= keep <= longest)):
            raise invalid("truncate_prompt_tokens", keep, f"-1, or 1 to {longest} (max_model_len)")
        return longest if keep == -1 else keep

    def token_params(self, model: PoolingModel, recipe: PoolingRecipe) -> TokenParams:
        """Return the parameters that the engine's steps need. recipe: result of the method `recipe`. The prefix cache
        is not read for a task about tokens, a pooler that reads all tokens, and skip_reading_prefix_cache.
        """
        tokens = recipe.tokens is not None
        reads_prompt = tokens or model.pooler.reads_all or self.skip_reading_prefix_cache is True
        return TokenParams(temperature=0.0, reads_prompt=reads_prompt, token_results=tokens)
