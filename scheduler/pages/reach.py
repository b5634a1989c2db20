"""Prefixes whose pages are only partly in the pool: how long they are together with what is stored elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxengine.scheduler.pages.groups import PageTables, gapless, page_key


class Reach(NamedTuple):
    """Longest prefix that is available in the pool and the store together.

    Attributes:
      num_columns: columns of the prefix.
      pages: keys of the pages that it needs, in order of their columns.
      missing: keys of those pages that the pool lacks; then the key of the state, if it is needed and no snapshot has
        it.
    """

    num_columns: int
    pages: list[bytes]
    missing: list[bytes]


def state_key(digest: bytes) -> bytes:
    """Return the key of the recurrent state after the page with this digest; it differs from all keys of pages."""
    return digest + b"state"


def reach(tables: PageTables, digests: Sequence[bytes], is_stored: Callable[[bytes], bool]) -> Reach:
    """Return the longest prefix of a digest chain that every cache group can serve with the pages and snapshots of
    `tables` and what is stored elsewhere. With snapshots, the state at its end must be available, too.

    digests: digests of the chain's pages, in order. is_stored: whether a key (`page_key`, `state_key`) is stored
    elsewhere.
    """
    pool, states = tables.pool, tables.snapshots

    def is_known(key: bytes) -> bool:
        return pool.find(key) is not None or is_stored(key)

    run = len(digests)
    for group in tables.whole:
        run = next((at for at in range(run) if not is_known(page_key(digests[at], group))), run)
    counts = [gapless([is_known(page_key(digest, group)) for digest in digests[:run]]) for group, _ in tables.windowed]

    def needed(window: int) -> int:
        return run - tables.behind(run * tables.page_size, window)

    while run and (
        (states is not None and not (states.has(digests[run - 1]) or is_stored(state_key(digests[run - 1]))))
        or any(count[run] < needed(window) for count, (_, window) in zip(counts, tables.windowed, strict=True))
    ):
        run -= 1
    first = dict.fromkeys(tables.whole, 0) | {group: run - needed(window) for group, window in tables.windowed}
    keys = [page_key(digests[at], group) for at in range(run) for group in first if at >= first[group]]
    missing = [key for key in keys if pool.find(key) is None]
    if run and states is not None and not states.has(digests[run - 1]):
        missing.append(state_key(digests[run - 1]))
    return Reach(run, keys, missing)
