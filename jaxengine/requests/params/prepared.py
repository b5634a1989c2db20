"""PreparedRequest (checked and tokenized, not queued yet), and the forms of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np

from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.pooling.params import PoolingRecipe
from jaxengine.scheduler.base.errors import invalid
from jaxengine.scheduler.base.request import Request

_MAX_SALT = 1024


class TextPrompt(TypedDict):
    """A prompt as text.

    cache_salt: cached prefixes are only shared among requests with the same salt. multi_modal_data: by modality,
      "image" or "video", one decoded item or a list, for which the prompt has placeholders in this order;
      mm_processor_kwargs: options of the model's media processor.
    """

    prompt: str
    cache_salt: NotRequired[str | None]
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]


class TokensPrompt(TypedDict):
    """A prompt as token ids of the model's vocabulary.

    prompt: its text, if known, only for the output. Other keys: see TextPrompt.
    """

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings, the inputs of the first layer: an array [n, hidden_size], or a file of one or its base64.
    Needs enable_prompt_embeds. cache_salt: see TextPrompt.
    """

    prompt_embeds: Any
    cache_salt: NotRequired[str | None]


PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "multi_modal_data", "mm_processor_kwargs")

Prompt = str | Sequence[int] | np.ndarray | TextPrompt | TokensPrompt | EmbedsPrompt | Mapping[str, Any]


def verify_salt(salt: Any) -> None:
    """Raise RequestError unless the value is a string of 1 to 1024 characters or None."""
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= _MAX_SALT):
        raise invalid("cache_salt", salt, f"a string of 1 to {_MAX_SALT} characters")


def is_token_ids(value: Any) -> bool:
    """Return whether a value is a single prompt as token ids: a list, tuple or range whose first item is an integer, or
    a one-dimensional integer array. True for an empty array, False for an empty list.
    """
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and np.issubdtype(value.dtype, np.integer)
    return isinstance(value, (list, tuple, range)) and len(value) > 0 and isinstance(value[0], (int, np.integer))


@dataclass(frozen=True)
class PreparedRequest:
    """Checked and tokenized request that the engine has not queued.

    Attributes:
      request_id: as given or chosen.
      prompt: the text; None if it was given as token ids.
      params: the caller's, or a recipe for a pooling model.
      requests: the engine's requests, one for each of n outputs.
    """

    request_id: str
    prompt: str | None
    params: SamplingParams | PoolingRecipe
    requests: list[Request]
