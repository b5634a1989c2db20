"""Limit that the operator sets for the number of generated tokens of a server's requests."""

from __future__ import annotations

from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.params.sampling_params import SamplingParams


def limited(params: SamplingParams, inputs: InputProcessor) -> SamplingParams:
    """Return the parameters with max_tokens lowered to the operator's limit, which also replaces None; the parameters
    themselves if they keep to it or there is none. As in vLLM, the limit is max_new_tokens of
    override_generation_config, or of the file in the folder that generation_config names; that of the model's own file
    is only a default. Raises RequestError if min_tokens is above the limit.
    """
    if (most := inputs.generation_defaults.get("max_tokens")) is None:
        return params
    config = inputs.config
    is_default = config.generation_config in ("auto", "vllm")
    if is_default and "max_new_tokens" not in (config.override_generation_config or {}):
        return params
    return params if (params.max_tokens or most + 1) <= most else params.clone_with(max_tokens=most)
