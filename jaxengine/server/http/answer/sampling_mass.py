"""Sampling mass of an answer's tokens: their raw and processed log-probabilities and what truncation kept, for the
field `return_sampling_mass`.
"""

from __future__ import annotations

from typing import Any

from jaxengine.requests.output.outputs import SAMPLING_FIELDS, CompletionOutput
from jaxengine.server.http.request.json_logprobs import json_logprob


def sampling_fields(output: CompletionOutput) -> dict[str, Any]:
    """Return the sampling-mass fields (SAMPLING_FIELDS) of a choice, each a list with a number for each token of the
    output, at least -9999.0; {} if none were requested.
    """
    if output.sampling_log_mass is None:
        return {}
    return {name: [*map(json_logprob, getattr(output, name).tolist())] for name in SAMPLING_FIELDS}
