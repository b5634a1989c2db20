"""Images and videos: encodes them, and sets M-RoPE position deltas, before the forward passes that need them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxengine.engine.extension import LoopExtension
from jaxengine.engine.stats.metric_types import Counter, Gauge
from jaxengine.scheduler.base.media import Media
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledStep
from jaxengine.scheduler.extensions.pictures import NAME


@dataclass
class MediaStats:
    """Counts of images and videos (items).

    Attributes:
      num_queries, num_hits: items looked up in the cache of processed media, and those found.
      num_calls, num_items, num_patches: calls of the vision tower's program, items encoded, and patches with padding.
      encode_seconds: host time to assemble and dispatch those calls.
      socket_bytes, shared_bytes: bytes of pixels from other processes, in messages and in shared memory.
    """

    num_queries: int = 0
    num_hits: int = 0
    num_calls: int = 0
    num_items: int = 0
    num_patches: int = 0
    encode_seconds: float = 0.0
    socket_bytes: int = 0
    shared_bytes: int = 0

    def count(self, media: Media | None) -> None:
        """Count the items of a queued request that were looked up in the cache of processed media, and those found
        there. media: None for a request without media.
        """
        for item in () if media is None else media.items:
            self.num_queries += item.cached is not None
            self.num_hits += item.cached is True


class Pictures(LoopExtension):
    """Loop extension for requests with images and videos.

    Attributes:
      name: name of the capability.
      stats: counts of items, encoder calls and bytes.
    """

    name: ClassVar[str] = NAME

    def __init__(self, cache: Any = None):
        """Set all counts to 0. cache: cache of processed media (jaxengine.requests.media.cache.MediaCache); None for
        none.
        """
        self.stats = MediaStats()
        self._cache = cache

    def prepare(self, request: Request) -> None:
        """Replace the request's media by the same with sounds cut into windows, for a model with a tower that encodes
        windows.
        """
        for tower in self.loop.runner.extension(NAME).towers:
            if request.media is not None and tower.hears:
                request.media = request.media.in_windows(tower.window, tower.merge)

    def queued(self, requests: Sequence[Request]) -> None:
        """Count the items of the caller's request once, not for each of its sequences."""
        self.stats.count(requests[0].media)

    def before_forward(self, step: ScheduledStep) -> None:
        """Dispatch and count the vision tower's calls for items that the step's tokens reach, and send the M-RoPE
        position deltas of requests that are new in their slots. The step's forward pass must be dispatched next.
        """
        encoder = self.loop.runner.extension(NAME)
        admitted = [request for batch in step.batches for request in batch.admitted]
        if admitted and encoder.uses_mrope:
            numbers = [self.loop.rows.number(request) for request in admitted]
            deltas = [0 if request.media is None else request.media.rope_delta for request in admitted]
            encoder.set_rope_deltas(numbers, deltas)
        self._encode(step)

    def _encode(self, step: ScheduledStep) -> None:
        """Dispatch the tower's calls for the items of a step, and add them to the stats; nothing for a step without
        items.
        """
        if any(self.name in batch.sections for batch in step.batches):
            stats, encodes = self.stats, [batch.sections.get(self.name, []) for batch in step.batches]
            start, items = time.monotonic(), [each.item for own in encodes for each in own]
            self.loop.runner.extension(self.name).encode(encodes)
            stats.num_calls += any(item.num_patches for item in items)
            stats.num_items += sum(item.num_patches > 0 for item in items)
            stats.num_patches += sum(item.num_patches for item in items)
            stats.encode_seconds += time.monotonic() - start

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {"reset_mm_cache": self._reset_cache, "mm_cache": self._describe_cache}

    def metrics(self) -> Iterator[Counter | Gauge]:
        """Yield counters of items, cache hits, encoder calls and bytes, and gauges of embeddings in the pool."""
        stats, rows = self.stats, self.loop.scheduler.extension(self.name).rows
        yield Counter("vllm:mm_cache_queries", stats.num_queries)
        yield Counter("vllm:mm_cache_hits", stats.num_hits)
        for way, value in (("socket", stats.socket_bytes), ("shared_memory", stats.shared_bytes)):
            yield Counter("jaxengine:mm_ipc_bytes", value, {"way": way})
        for name, value in {
            "cache_queries": sum(each.num_queries for each in rows),
            "cache_hits": sum(each.num_hits for each in rows),
            "calls": stats.num_calls,
            "items": stats.num_items,
            "patches": stats.num_patches,
            "host_seconds": stats.encode_seconds,
        }.items():
            yield Counter(f"jaxengine:encoder_{name}", value)
        yield Gauge("jaxengine:encoder_cache_embeddings", sum(each.num_rows for each in rows))
        yield Gauge("jaxengine:encoder_cache_embeddings_kept", sum(each.num_kept for each in rows))
        yield Gauge("jaxengine:encoder_cache_embeddings_used", sum(each.num_used for each in rows))

    def status(self) -> dict[str, Any]:
        """Return numbers as JSON values under "pictures".

        "calls", "items" and "patches" count the tower's work since the start, "queries" and "hits" lookups of
        embeddings by all replicas. "embeddings" is the capacity of their pools, "embeddings_kept" how many are stored,
        and "embeddings_used" how many of these running requests need.
        """
        stats, rows = self.stats, self.loop.scheduler.extension(self.name).rows
        pictures = {
            "calls": stats.num_calls,
            "items": stats.num_items,
            "patches": stats.num_patches,
            "queries": sum(each.num_queries for each in rows),
            "hits": sum(each.num_hits for each in rows),
            "embeddings": sum(each.num_rows for each in rows),
            "embeddings_kept": sum(each.num_kept for each in rows),
            "embeddings_used": sum(each.num_used for each in rows),
        }
        return {"pictures": pictures}

    def _reset_cache(self) -> bool:
        """Clear the cache of processed media, and drop the embeddings that no running request needs. Returns True."""
        if self._cache is not None:
            self._cache.clear()
        self.loop.scheduler.extension(self.name).reset_cache()
        return True

    def _describe_cache(self) -> dict[str, Any]:
        """Return which processes have the cache of processed media (EncoderOptions.mm_cache_placement), and
        "engine_bytes", its bytes in this process.

        The placement is that of an engine without API processes; a server's engine process has its own utility of this
        name.
        """
        size = 0 if self._cache is None else self._cache.num_bytes
        return {**self.loop.runner.config.mm_cache_placement(0), "engine_bytes": size}
