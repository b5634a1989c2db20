"""Reader of a request's extra_args: parameters of the engine's logits processors, pages of other engines, and the
alignment of a prompt with its sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.requests.params.kv_transfer import NAME, read_kv_transfer
from jaxengine.scheduler.base.errors import RequestError, refuse
from jaxengine.scheduler.base.logits_processor import LogitsProcessor, read_extra_args

ALIGNMENT = "alignment"
_INT32_MAX = 2**31 - 1


def extra_fields(
    extra_args: Mapping[str, Any] | None, processors: Sequence[type[LogitsProcessor]], n: int
) -> dict[str, Any]:
    """Return the fields of TokenParams that a request's extra_args determine: kv_transfer, processors, uses_counts and
    alignment.

    processors: the engine's logits processors. n: number of outputs of the request. Raises RequestError for arguments
    that no processor has, for invalid kv_transfer_params or alignment, and for do_remote_decode with n above 1.
    """
    others = dict(extra_args or {})
    kv_transfer = read_kv_transfer(others.pop(NAME, None))
    if kv_transfer is not None and kv_transfer.do_remote_decode and n > 1:
        raise RequestError(f"n is {n}; allowed: 1 with {NAME}.do_remote_decode", param="n", value=n)
    alignment = _read_alignment(others.pop(ALIGNMENT, None))
    own = read_extra_args(others, processors)
    uses_counts = any(processors[number].uses_counts for number in own)
    return {"kv_transfer": kv_transfer, "processors": own, "uses_counts": uses_counts, ALIGNMENT: alignment}


def _read_alignment(value: Any) -> tuple[int, int] | None:
    """Return (first prompt token, number of positions) of an alignment; None for None. Raises RequestError unless it is
    a pair of int32, the first >= 0 and the second >= 1.
    """
    if value is None:
        return None
    whole = isinstance(value, list | tuple) and len(value) == 2 and all(type(each) is int for each in value)
    if not whole or not 0 <= value[0] <= _INT32_MAX or not 1 <= value[1] <= _INT32_MAX:
        allowed = "[first prompt token >= 0, positions of the sound >= 1]"
        raise refuse(ALIGNMENT, value, allowed)
    return value[0], value[1]
