"""Reader of a request's extra_args: parameters of the engine's logits processors, sequences of tokens that must not be
repeated, pages of other engines, and the alignment of a prompt with its sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.requests.params.kv_transfer import NAME, read_kv_transfer
from jaxengine.scheduler.base.errors import RequestError, refuse
from jaxengine.scheduler.base.logits_processor import Column, LogitsProcessor, read_extra_args

ALIGNMENT = "alignment"
# Names of vLLM's NGramPerReqLogitsProcessor, with which it serves DeepSeek-OCR.
_SIZE, _WINDOW, _EXEMPT = _NO_REPEAT = "ngram_size", "window_size", "whitelist_token_ids"
_SIZES, _WINDOWS, _MAX_EXEMPT = Column(0, low=1, high=256), Column(0, low=1, high=4096), 1024
_INT32_MAX = 2**31 - 1


def extra_fields(
    extra_args: Mapping[str, Any] | None, processors: Sequence[type[LogitsProcessor]], n: int
) -> dict[str, Any]:
    """Return the fields of TokenParams that a request's extra_args determine: kv_transfer, processors, uses_counts,
    no_repeat and alignment.

    processors: the engine's logits processors. n: number of outputs of the request. Raises RequestError for arguments
    that no processor has, for invalid kv_transfer_params, ngram_size or alignment, and for do_remote_decode with n
    above 1. If a processor has a column that is called as one for no_repeat, this is left to it.
    """
    others = dict(extra_args or {})
    kv_transfer = read_kv_transfer(others.pop(NAME, None))
    if kv_transfer is not None and kv_transfer.do_remote_decode and n > 1:
        raise RequestError(f"n is {n}; allowed: 1 with {NAME}.do_remote_decode", param="n", value=n)
    alignment = _read_alignment(others.pop(ALIGNMENT, None))
    taken = {name for each in processors for name in each.columns}
    names = _NO_REPEAT if taken.isdisjoint(_NO_REPEAT) else ()
    no_repeat = _read_no_repeat({name: others.pop(name, None) for name in names})
    own = read_extra_args(others, processors, names)
    counts = any(processors[number].uses_counts for number in own)
    fields = {"kv_transfer": kv_transfer, "processors": own, "uses_counts": counts}
    return {**fields, "no_repeat": no_repeat, ALIGNMENT: alignment}


def _read_no_repeat(given: Mapping[str, Any]) -> tuple[int, int, tuple[int, ...]] | None:
    """Return TokenParams.no_repeat: (ngram_size, window_size, whitelist_token_ids); None without ngram_size.
    given: values of _NO_REPEAT, None for the default: 100 and (). Raises RequestError unless ngram_size is 1 to 256,
    window_size that at least and 4096 at most, and the list at most 1024 int32 >= 0; and for these two without
    ngram_size.
    """
    if given.get(_SIZE) is None:
        if name := next((name for name, value in given.items() if value is not None), None):
            raise refuse(f"extra_args.{name}", given[name], f"left out without {_SIZE}")
        return None
    size = int(_SIZES.read(f"extra_args.{_SIZE}", given[_SIZE]))
    window = int(_WINDOWS.read(f"extra_args.{_WINDOW}", 100 if given[_WINDOW] is None else given[_WINDOW]))
    if window < size:
        raise refuse(f"extra_args.{_WINDOW}", window, f"at least {_SIZE} ({size})")
    exempt = () if given[_EXEMPT] is None else given[_EXEMPT]
    listed = isinstance(exempt, list | tuple | set | frozenset | range) and len(exempt) <= _MAX_EXEMPT
    if not listed or not all(type(each) is int and 0 <= each <= _INT32_MAX for each in exempt):
        raise refuse(f"extra_args.{_EXEMPT}", exempt, f"a list of at most {_MAX_EXEMPT} token ids, 0 to {_INT32_MAX}")
    return size, window, tuple(exempt)


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
