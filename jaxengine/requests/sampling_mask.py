"""Choice of the requests that get sampling masks, and the rules of these requests."""

from __future__ import annotations

from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError, refuse

# Largest top_k of a request with sampling masks: bounds what is kept and sent for each of its tokens.
MAX_TOP_K = 2048


def decide_sampling_mask(params: SamplingParams, has_option: bool) -> None:
    """Set return_sampling_mask of `params`, in place, to whether the request gets sampling masks.

    has_option: whether the engine was started with return_sampling_mask; it decides where the request says None. Raises
    RequestError for True without the option, and for masks, as in vLLM, at temperature 0 and unless top_k is 1 to
    MAX_TOP_K.
    """
    if params.return_sampling_mask and not has_option:
        problem = "return_sampling_mask: the engine was started without return_sampling_mask"
        raise RequestError(problem, param="return_sampling_mask")
    params.return_sampling_mask = has_option and params.return_sampling_mask is not False
    if not params.return_sampling_mask:
        return
    otherwise = "with sampling masks (return_sampling_mask=False leaves them out)"
    if params.is_greedy:
        raise refuse("temperature", params.temperature, f"above 0 {otherwise}")
    if not 0 < params.top_k <= MAX_TOP_K:
        raise refuse("top_k", params.top_k, f"1 to {MAX_TOP_K} {otherwise}")
