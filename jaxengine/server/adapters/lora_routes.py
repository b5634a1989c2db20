"""Routes from model names to adapters, chosen by weight: one adapter for each customer, or two that are compared."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from itertools import accumulate
from typing import Any, Self

from jaxengine.config.base.errors import ConfigError
from jaxengine.requests.params.options import SESSION
from jaxengine.scheduler.base.adapter_names import seen_as
from jaxengine.server.base.options import ServerConfig

# Key by which the request of the current task is routed, as `route_key` returns it.
ROUTE_KEY: ContextVar[str] = ContextVar("route_key", default="")

_FORM = 'JSON: {"name": [["adapter", weight], ...], ...}, with weights above 0, at most 1e12'
_NAME_LENGTH, _MOST_ROUTES, _MOST_WEIGHT = 256, 1 << 16, 1e12


def route_key(session: str, request_id: str) -> str:
    """Return the key by which a request is routed: "session SESSION" if it has a valid session id, else "request
    REQUEST_ID".

    session: value of the header X-Session-ID; "" without one.
    """
    return f"session {session}" if SESSION.fullmatch(session) else f"request {request_id}"


class LoraRoutes:
    """Routes from names to adapters.

    rows: for the name of each route, (its adapters, the cumulative sums of their weights).
    """

    def __init__(self, rows: Mapping[str, tuple[list[str], list[float]]]):
        self._rows = rows

    @classmethod
    def of(cls, config: ServerConfig, names: Iterable[str] = ()) -> Self:
        """Return the routes of the option lora_routes; none if it is None. names: the model's names.

        Raises ConfigError for a text that is not JSON of the option's form (1 to _MOST_ROUTES routes, names of 1 to 256
        characters, weights above 0 and at most 1e12), for two routes whose names are equal or look alike
        (adapter_names.seen_as), and for one whose name looks like one of `names`.
        """
        text = config.lora_routes
        if text is None:
            return cls({})
        try:  # as pairs, since of two equal names a dict would have only the last one
            read: Any = json.loads(text, object_pairs_hook=tuple)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, tuple) or not 1 <= len(read) <= _MOST_ROUTES:
            raise ConfigError("lora_routes", text[:200], _FORM)
        seen = {seen_as(name) for name in names}
        rows: dict[str, tuple[list[str], list[float]]] = {}
        for name, row in read:
            if not (1 <= len(name) <= _NAME_LENGTH and isinstance(row, list) and row and all(map(_is_arm, row))):
                raise ConfigError("lora_routes", json.dumps({name: row})[:200], _FORM)
            if seen_as(name) in seen:
                raise ConfigError("lora_routes", name[:200], "each name once, none of them the model's own")
            seen.add(seen_as(name))
            rows[name] = [each[0] for each in row], list(accumulate(float(each[1]) for each in row))
        return cls(rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the routes."""
        return tuple(self._rows)

    def pick(self, name: str, key: str) -> str:
        """Return the adapter to which a route leads for a key; `name` itself if it is not the name of a route.

        The adapter is drawn by a hash of name and key, in proportion to the weights, so the same key always gets the
        same one.
        """
        row = self._rows.get(name)
        if row is None:
            return name
        adapters, sums = row
        digest = hashlib.sha256(f"{name}\0{key}".encode()).digest()
        drawn = int.from_bytes(digest[:8], "big") / 2**64 * sums[-1]
        return adapters[min(bisect_right(sums, drawn), len(adapters) - 1)]


def _is_arm(value: Any) -> bool:
    """Whether a value is a list [adapter, weight]: a text of 1 to 256 characters, and a number above 0 and at most
    1e12.
    """
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
        return False
    weight = value[1]
    return 1 <= len(value[0]) <= _NAME_LENGTH and type(weight) in (int, float) and 0 < weight <= _MOST_WEIGHT
