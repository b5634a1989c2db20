"""The field kv_transfer_params, which routers pass from the answer of a prefilling engine to a decoding one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from jaxengine.requests.params.extra_args import ALIGNMENT
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.http.request.fields import MAX_OPTIONS, JsonObject, at_most


def _of_processors(value: Any) -> Any:
    """Return the value unchanged. Raises ValueError for an object with kv_transfer_params or alignment."""
    if isinstance(value, dict) and "kv_transfer_params" in value:
        raise ValueError("kv_transfer_params is a field of the request")
    if isinstance(value, dict) and ALIGNMENT in value:
        raise ValueError("answers over HTTP have no alignment: /v1/audio/transcriptions gives the times of words")
    return value


# Parameters of logits processors. Other entries of SamplingParams.extra_args are separate fields of HTTP requests.
ExtraArgs = Annotated[JsonObject, at_most(MAX_OPTIONS), BeforeValidator(_of_processors)]
TransferParams = Annotated[JsonObject, at_most(MAX_OPTIONS)]


def with_kv_transfer(
    extra_args: Mapping[str, Any] | None, kv_transfer_params: Mapping[str, Any] | None, stream: bool
) -> Mapping[str, Any] | None:
    """Return a copy of extra_args with kv_transfer_params as an entry, where vLLM has it too; extra_args itself if
    kv_transfer_params is None.

    stream: whether the answer is a stream. Raises RequestError for a stream with do_remote_decode, whose answer would
    have to contain kv_transfer_params.
    """
    if kv_transfer_params is None:
        return extra_args
    if stream and kv_transfer_params.get("do_remote_decode"):
        problem = "kv_transfer_params.do_remote_decode is not available with stream=true"
        raise RequestError(problem, param="kv_transfer_params")
    return {**(extra_args or {}), "kv_transfer_params": kv_transfer_params}
