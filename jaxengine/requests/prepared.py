"""A request as it has been prepared for an engine: checked, tokenised, nothing queued yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np

from jaxengine.requests.pooling_params import PoolingRecipe
from jaxengine.requests.sampling_params import SamplingParams
from scheduler.errors import RequestError, show_value
from scheduler.request import Request

_MAX_SALT = 1024


class TextPrompt(TypedDict):
    """A prompt as text.

    cache_salt: requests share cached prefixes only within one salt. multi_modal_data: by modality, "image" or "video",
    one decoded item or a list of them, for which the prompt has placeholders, in this order; mm_processor_kwargs: what
    the model's processor is told of them.
    """

    prompt: str
    cache_salt: NotRequired[str | None]
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]


class TokensPrompt(TypedDict):
    """A prompt as token ids, each of the model's vocabulary. prompt: its text, if known, for the output only."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]
    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]


PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data", "mm_processor_kwargs")

Prompt = str | Sequence[int] | np.ndarray | TextPrompt | TokensPrompt | Mapping[str, Any]


def verify_salt(salt: Any) -> None:
    """RequestError unless it is a prompt's cache_salt, or None."""
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= _MAX_SALT):
        problem = f"cache_salt is {show_value(salt)}; allowed is a string of 1 to {_MAX_SALT} characters"
        raise RequestError(problem, param="cache_salt", value=salt)


def is_token_ids(value: Any) -> bool:
    """Whether a value is one prompt as token ids: integers in a list, or numpy's in one dimension."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and np.issubdtype(value.dtype, np.integer)
    return isinstance(value, (list, tuple, range)) and len(value) > 0 and isinstance(value[0], (int, np.integer))


@dataclass(frozen=True)
class PreparedRequest:
    """A checked request that changed nothing yet. params: how its answer is made; a recipe where it is pooled."""

    request_id: str
    prompt: str | None
    params: SamplingParams | PoolingRecipe
    requests: list[Request]
