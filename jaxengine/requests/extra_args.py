"""Reader of a request's extra_args: parameters of the engine's logits processors, and pages of other engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.requests.kv_transfer import NAME, read_kv_transfer
from jaxengine.scheduler.errors import RequestError
from jaxengine.scheduler.logits_processor import LogitsProcessor, read_extra_args


def extra_fields(
    extra_args: Mapping[str, Any] | None, processors: Sequence[type[LogitsProcessor]], n: int
) -> dict[str, Any]:
    """Return the fields of TokenParams that a request's extra_args give.

    processors: of the engine. n: outputs of the request. Raises RequestError for what the processors do not have, and
    for kv_transfer_params that are not allowed.
    """
    others = dict(extra_args or {})
    kv_transfer = read_kv_transfer(others.pop(NAME, None))
    if kv_transfer is not None and kv_transfer.do_remote_decode and n > 1:
        raise RequestError(f"n is {n}; allowed is 1 with {NAME}.do_remote_decode", param="n", value=n)
    own = read_extra_args(others, processors)
    uses_counts = any(processors[number].uses_counts for number in own)
    return {"kv_transfer": kv_transfer, "processors": own, "uses_counts": uses_counts}
