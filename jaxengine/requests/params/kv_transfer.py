"""Checks of vLLM's kv_transfer_params, which sidecars pass from a prefilling engine's answer to a decoding engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from jaxengine.config.kv.kv_transfer import MAX_PORT, is_host
from jaxengine.scheduler.base.errors import RequestError, invalid, show_value
from jaxengine.scheduler.base.kv_transfer import KVTransferParams

NAME = "kv_transfer_params"
_ID = re.compile(r"[A-Za-z0-9._:@-]{1,256}")
_MAX_GROUPS, _MAX_COLUMNS = 64, 1 << 20


def _is_id(value: Any) -> bool:
    """Return whether a value is an id of 1 to 256 letters, digits and . _ : @ -."""
    return isinstance(value, str) and bool(_ID.fullmatch(value))


def _are_columns(value: Any) -> bool:
    """Return whether a value is a list of lists (or tuples) of integers, one for each of at most _MAX_GROUPS cache
    groups. The integers of a list increase, from 0 at least to _MAX_COLUMNS - 1 at most.
    """
    return (
        isinstance(value, list | tuple)
        and len(value) <= _MAX_GROUPS
        and all(isinstance(each, list | tuple) and len(each) <= _MAX_COLUMNS for each in value)
        and all(type(column) is int and 0 <= column < _MAX_COLUMNS for each in value for column in each)
        and all(before < after for each in value for before, after in pairwise(each))
    )


def _is_whole(low: int, high: int) -> Callable[[Any], bool]:
    """Return a predicate: whether a value is an int (no bool) from `low` to `high`, both included."""
    return lambda value: type(value) is int and low <= value <= high


# Field -> (predicate of allowed values, their description). None is always allowed.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "do_remote_decode": (lambda value: type(value) is bool, "true or false"),
    "do_remote_prefill": (lambda value: type(value) is bool, "true or false"),
    "remote_engine_id": (_is_id, "the id of an engine"),
    "remote_request_id": (_is_id, "the id of a request"),
    "remote_block_ids": (_are_columns, "increasing integers for each cache group, as the prefilling engine gave them"),
    "remote_host": (is_host, "the name or address of a host"),
    "remote_port": (_is_whole(1, MAX_PORT), f"an integer from 1 to {MAX_PORT}"),
    "tp_size": (_is_whole(1, 1 << 20), "an integer from 1"),
}
_NEEDED = ("remote_engine_id", "remote_request_id", "remote_block_ids")


def read_kv_transfer(value: Any) -> KVTransferParams | None:
    """Return a request's kv_transfer_params as a record; None if they request neither remote decode nor remote prefill.

    Raises RequestError, which names the field, for an unknown field, a value that is not allowed, do_remote_prefill
    together with do_remote_decode or without the ids and blocks that it needs, and for do_remote_prefill with only one
    of host and port. A field that is None counts as absent.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise invalid(NAME, value, "an object")
    given = {}
    for name, one in value.items():
        if name not in _FIELDS:
            allowed = ", ".join(_FIELDS)
            problem = f"{NAME} has {show_value(name)}; allowed: {allowed}"
            raise RequestError(problem, param=NAME, value=name)
        is_allowed, allowed = _FIELDS[name]
        if one is None:
            continue
        if not is_allowed(one):
            raise invalid(f"{NAME}.{name}", one, allowed)
        given[name] = tuple(map(tuple, one)) if name == "remote_block_ids" else one
    found = KVTransferParams(**given)
    if found.do_remote_prefill and found.do_remote_decode:
        raise invalid(f"{NAME}.do_remote_decode", True, "false with do_remote_prefill")
    for name in _NEEDED if found.do_remote_prefill else ():
        if given.get(name) is None:
            raise invalid(f"{NAME}.{name}", None, f"{_FIELDS[name][1]}, with do_remote_prefill")
    if found.do_remote_prefill and (found.remote_host is None) != (found.remote_port is None):
        raise invalid(f"{NAME}.remote_port", found.remote_port, "given where remote_host is, and only there")
    return found if found.do_remote_prefill or found.do_remote_decode else None
