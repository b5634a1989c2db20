"""Fields of an answer about how its tokens were sampled: their raw and processed log-probabilities and the mass that
truncation kept (`return_sampling_mass`), and the tokens that could have been sampled (`return_sampling_mask`).
"""

from __future__ import annotations

from typing import Any

from jaxengine.requests.output.outputs import SAMPLING_FIELDS, CompletionOutput
from jaxengine.server.http.answer.answers import ABSENT, Answer
from jaxengine.server.http.answer.weight_spans import WeightVersions
from jaxengine.server.http.request.json_logprobs import json_logprob

# The fields of CompletionOutput without any of this.
NO_SAMPLING = dict.fromkeys((*SAMPLING_FIELDS, "sampling_mask"))


class SampledChoice(Answer):
    """Fields that every choice has if they were requested."""

    weight_versions: list[WeightVersions] = ABSENT
    logprobs_raw: list[float] = ABSENT
    logprobs_processed: list[float] = ABSENT
    sampling_log_mass: list[float] = ABSENT
    sampling_mask: list[list[int]] = ABSENT


def sampling_fields(output: CompletionOutput) -> dict[str, Any]:
    """Return the requested ones of these fields of a choice, {} for none: the numbers (SAMPLING_FIELDS) as lists with
    one for each token of the output, at least -9999.0, and `sampling_mask`, in vLLM's form, a list of token ids for
    each token.
    """
    found: dict[str, Any] = {}
    if output.sampling_log_mass is not None:
        found = {name: [*map(json_logprob, getattr(output, name).tolist())] for name in SAMPLING_FIELDS}
    return found if output.sampling_mask is None else {**found, "sampling_mask": output.sampling_mask.token_ids}
