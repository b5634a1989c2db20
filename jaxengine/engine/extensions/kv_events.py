"""Events of pages in vLLM's form: MessagePack over ZeroMQ, numbered, with replay of earlier batches.

A batch is [seconds, events, replica], an event a map with its type. Digests are shortened to 64 bits, as vLLM's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.kv.kv_events import KVEventsConfig, address_of_replica
from jaxengine.engine.extension import Events, Loop, LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.engine.stats.metric_types import Counter, Metric
from jaxengine.scheduler.batches.batch import StepResult
from jaxengine.scheduler.extensions.kv_events import NAME, Cleared, Removed, Stored
from jaxengine.scheduler.pages.groups import short_digest

logger = logging.getLogger(__name__)

_MEDIUM = "GPU"  # vLLM's name for the memory of devices
_NUMBER_BYTES = 8
# Number of the empty batch that ends a replay.
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
# Time that a replay waits for a router that does not read.
_REPLAY_WAIT_MS = 1000
# Period at which an idle engine publishes events of calls such as reset_prefix_cache.
_REST_SECONDS = 0.1


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Event, in vLLM's form and field order, of pages that were filled and can be found.

    Attributes:
      block_hashes: short digests of consecutive pages of one sequence.
      parent_block_hash: short digest of the page before the first; None if they begin a sequence.
      token_ids: token ids of all these pages.
      block_size: tokens of a page.
      lora_id: always None.
      medium: memory that has the pages.
      lora_name: adapter that computed them; None without one.
      extra_keys: what the digest of each page depends on besides tokens and adapter; None for nothing.
      group_idx: cache group.
      kv_cache_spec_kind: "full_attention", or "sliding_window" with `kv_cache_spec_sliding_window` tokens.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Event of pages that can no longer be found; the fields have the same meaning as in BlockStored."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """Event of a reset after which no earlier page can be found."""


class Publisher:
    """Publisher of one replica's batches of events, over ZeroMQ.

    Attributes:
      number: number of the next batch.
    """

    def __init__(self, config: KVEventsConfig, rank: int):
        """Open the sockets of replica `rank` and, with a replay_endpoint, start the thread that serves replays.

        Raises ConfigError for an address that cannot be used.
        """
        self.number = 0
        self._rank, self._topic = rank, config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._is_closing = False
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(config.hwm)
        self._open(self._socket, "endpoint", config.endpoint)
        self._thread: threading.Thread | None = None
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            # Room for one whole replay for each router; instead of dropping more than that, sending waits and raises.
            self._replay.set_hwm(config.buffer_steps + 1)
            self._replay.set(zmq.ROUTER_MANDATORY, 1)
            self._replay.set(zmq.SNDTIMEO, _REPLAY_WAIT_MS)
            self._open(self._replay, "replay_endpoint", config.replay_endpoint, binds=True)
            self._thread = threading.Thread(target=self._answer, name="kv-events", daemon=True)
            self._thread.start()

    def publish(self, events: Sequence[Any]) -> None:
        """Send a numbered batch of events to all subscribers, and keep the last buffer_steps batches for replay. Never
        waits: a subscriber that is more than hwm batches behind does not get the batch.
        """
        payload = self._encode((time.time(), events, self._rank))
        number = self.number.to_bytes(_NUMBER_BYTES, "big")
        self._kept.append((self.number, payload))
        self.number += 1
        self._socket.send_multipart((self._topic, number, payload))

    def shutdown(self) -> None:
        """End the thread and close the sockets, after waiting at most a second for batches that are being sent."""
        self._is_closing = True
        if self._thread is not None:
            self._thread.join()
            self._replay.close(0)
        self._socket.close(1000)
        self._context.term()

    def _open(self, socket: zmq.Socket[bytes], name: str, address: str, *, binds: bool = False) -> None:
        """Bind or connect a socket to `address`, with the port or file of this replica.

        Binds if `binds`, for an address with "*" or "::", and for ipc:. name: field of kv_events_config, for the error.
        Raises ConfigError, after closing all sockets, if the address cannot be used.
        """
        address = address_of_replica(address, self._rank)
        socket.set(zmq.IPV6, "[" in address)
        try:
            if binds or "*" in address or "::" in address or address.startswith("ipc:"):
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            problem = f"kv_events_config.{name} {address} cannot be used: {error}"
            raise ConfigError.because("kv_events_config", problem, "give another address") from None

    def _answer(self) -> None:
        """Serve replays until the publisher closes: send all kept batches from the requested number on, and then _END.
        Malformed requests, and replays that their router does not read, are logged and dropped.
        """
        while not self._is_closing:
            if not self._replay.poll(100):
                continue
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
                logger.warning("a request for a replay of KV events was ignored: it is not [empty, number of 8 bytes]")
                continue
            first = int.from_bytes(frames[2], "big")
            try:
                for number, payload in list(self._kept):
                    if number >= first:
                        self._replay.send_multipart((frames[0], b"", number.to_bytes(_NUMBER_BYTES, "big"), payload))
                self._replay.send_multipart((frames[0], b"", _END, b""))
            except zmq.ZMQError as error:
                logger.warning("a replay of KV events was ended, as its router does not read it: %s", error)


class KVEvents(LoopExtension):
    """Loop extension that publishes the events of every replica after each step.

    Attributes:
      publishers: one for each replica.
    """

    def __init__(self, config: KVEventsConfig, num_ranks: int):
        """Open the publishers of num_ranks replicas. Raises ConfigError, with all of them closed, for an address that
        cannot be used.
        """
        self.publishers: list[Publisher] = []
        try:
            for rank in range(num_ranks):
                self.publishers.append(Publisher(config, rank))
        except BaseException:
            self.shutdown()
            raise

    def attach(self, loop: Loop) -> None:
        """Store the engine's parts, and the scheduler's replicas, which record the events."""
        super().attach(loop)
        self._ranks = loop.scheduler.extension(NAME).ranks
        self._page_size = loop.scheduler.config.page_size
        self._windows = loop.scheduler.config.windows

    def after_forward(self, step: InFlight | None) -> Events:
        """Publish the events that scheduling caused. Returns no events of requests."""
        self._publish()
        return super().after_forward(step)

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Publish the events that the scheduler's update caused."""
        self._publish()

    def rest(self) -> float:
        """Publish the events of calls such as reset_prefix_cache; return _REST_SECONDS."""
        self._publish()
        return _REST_SECONDS

    def shutdown(self) -> None:
        for each in self.publishers:
            each.shutdown()

    def metrics(self) -> Iterator[Metric]:
        yield Counter("jaxengine:kv_event_batches", sum(each.number for each in self.publishers))

    def _publish(self) -> None:
        """Publish each replica's events since the last call as one batch, and clear them; nothing for a replica without
        events.
        """
        for rank, publisher in zip(self._ranks, self.publishers, strict=True):
            if rank.events:
                publisher.publish([self._event(each) for each in rank.events])
                rank.events.clear()

    def _event(self, event: Stored | Removed | Cleared) -> BlockStored | BlockRemoved | AllBlocksCleared:
        """Return a scheduler's event in vLLM's form, in which a page is named by the last 64 bits of its digest."""
        if isinstance(event, Cleared):
            return AllBlocksCleared()
        hashes = [short_digest(digest) for digest in event.digests]
        if isinstance(event, Removed):
            return BlockRemoved(hashes, _MEDIUM, event.group)
        window = self._windows[event.group]
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if event.parent is None else short_digest(event.parent),
            token_ids=event.token_ids,
            block_size=self._page_size,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=event.lora,
            extra_keys=event.extra_keys,
            group_idx=event.group,
            kv_cache_spec_kind="full_attention" if window is None else "sliding_window",
            kv_cache_spec_sliding_window=window,
        )
