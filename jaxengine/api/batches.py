"""Prompts and parameters of one call of the offline API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxengine.requests.prepared import Prompt, is_token_ids
from jaxengine.requests.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.errors import RequestError


def as_batch(prompts: Prompt | Sequence[Prompt]) -> Any:
    """Returns several prompts as they are, and a single one as a list of one. Raises RequestError for anything else."""
    batch: Any = [prompts] if isinstance(prompts, (str, Mapping)) or is_token_ids(prompts) else prompts
    if not isinstance(batch, (Sequence, np.ndarray)):
        raise RequestError(
            f"prompts must be a string, a list of token ids, a dict, or a list of them, got {type(prompts).__name__}",
            param="prompts",
            value=prompts,
        )
    return batch


def params_for(count: int, params: Any) -> list[SamplingParams]:
    """Returns copies of sampling parameters that ask for one output at the end: one for each of `count` prompts.

    params: one for all, or one for each. Raises RequestError for anything else.
    """
    if isinstance(params, SamplingParams):
        params = [params] * count
    if not isinstance(params, Sequence) or len(params) != count:
        raise RequestError(
            f"sampling_params must be one SamplingParams or one for each of the {count} prompts",
            param="sampling_params",
            value=params,
        )
    final = RequestOutputKind.FINAL_ONLY
    return [each.clone_with(output_kind=final) if isinstance(each, SamplingParams) else each for each in params]
