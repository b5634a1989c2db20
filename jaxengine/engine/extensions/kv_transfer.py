"""Handover of KV pages between engines: an engine that prefills keeps them under a lease, an engine that decodes reads
them like pages of its storage tiers.

A producer copies a prompt's pages to host memory when the request ends, and its transport offers them from there. A
consumer's tiers find the pages that a request names as another engine's, and the request waits for them as for stored
pages.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import named_path
from jaxengine.config.base.key_file import read_key
from jaxengine.config.kv.kv_transfer import CONSUMER, FAIL, FOLDER, JAX, PRODUCER, KVHandover
from jaxengine.engine.extension import NO_EVENTS, Events, Loop, LoopExtension
from jaxengine.engine.extensions.offload.due_copies import DueCopies, KeptKeys, found_columns, is_here
from jaxengine.engine.extensions.offload.offload import Offload
from jaxengine.engine.extensions.offload.page_loads import Place
from jaxengine.engine.stats.metric_types import Counter, Gauge, Metric
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.kv_transfer import KVTransferParams
from jaxengine.scheduler.base.request import FinishReason, Request
from jaxengine.scheduler.extensions.offload import NAME as OFFLOAD
from jaxengine.scheduler.pages.groups import page_key
from jaxengine.scheduler.pages.reach import state_key
from jaxengine.tiers.transport import MAX_KEYS, FolderTransport, Source, Transport

logger = logging.getLogger(__name__)

NOT_LOADED = "the pages of its prompt did not come from the engine that computed them"
# Periods of `rest` in an idle engine while copies are due, and while there are leases.
_SOON_SECONDS, _LATER_SECONDS = 0.005, 0.25


class Elsewhere(Place):
    """Store (Place) of pages of one request that another engine has.

    Attributes:
      address: host and port of the other engine; None for a transport by a folder.
    """

    is_far = True

    def __init__(self, transport: Transport, source: Source, stats: TransferStats):
        """Store the parameters; nothing is read yet. source: the other engine and its lease. stats: counts received
        pages and failures.
        """
        self._transport, self._source, self._stats = transport, source, stats
        self.address = None if source.host is None else f"{source.host}:{source.port}"

    def read_all(self, keys: Sequence[bytes], is_over: Callable[[], bool]) -> Iterator[tuple[bytes, np.ndarray]]:
        """Read the blocks of these keys from the other engine, at most MAX_KEYS per request, and yield (key, block) for
        those that it has.

        An answer that lacks a key is the last, because a prefix ends with its first missing page. Once `is_over`
        returns True, a read ends with the blocks that have come. An OSError ends the iteration; it is logged, not
        raised. Counts the blocks and the failure in the stats.
        """
        reader = self._transport.open(self._source)
        try:
            for first in range(0, len(keys), MAX_KEYS):
                found = reader.read(asked := keys[first : first + MAX_KEYS], is_over)
                self._stats.num_received += len(found)
                yield from found.items()
                if len(found) < len(asked):
                    break
        except OSError as error:
            self._stats.num_failed += 1
            logger.warning("pages of lease %s did not come, and are computed: %s", self._source.lease, error)
        finally:
            reader.close()


@dataclasses.dataclass
class TransferStats:
    """Counts of KV pages handed over between engines.

    Attributes:
      num_received: pages and states that came from other engines.
      num_failed: sources whose reading ended with an error.
      num_refused: requests that got no lease because there was nothing to keep, or no host memory for it.
    """

    num_received: int = 0
    num_failed: int = 0
    num_refused: int = 0


class KVTransfer(LoopExtension):
    """Loop extension that hands over KV pages to other engines and receives theirs.

    Attributes:
      transport: sends and receives the pages.
      leases: (end in time.monotonic seconds, keys) by name, the oldest first.
      stats: counts of pages and leases.
    """

    def __init__(self, runner: ModelRunner, offload: Offload):
        """Open the transport. offload: extension with the host memory and its copies. Raises ConfigError if the
        transport cannot be opened.
        """
        transfer = runner.config.kv_transfer_config
        assert transfer is not None and transfer.handover is not None
        self._options, self._offload = transfer.handover, offload
        self.transport, self.stats = _open_transport(runner, offload, self._options), TransferStats()
        self.leases: dict[str, tuple[float, list[bytes]]] = {}
        self._keys_kept = KeptKeys(offload.tiers)
        self._due = DueCopies(offload)
        self._places: dict[Request, tuple[list[bytes], Elsewhere]] = {}

    def attach(self, loop: Loop) -> None:
        super().attach(loop)
        self._orders = loop.scheduler.extension(OFFLOAD)

    def prepare(self, request: Request) -> None:
        """Raise RequestError if a request's kv_transfer_params do not suit the engine: a direction that kv_role
        excludes, or for remote prefill a remote_host that is missing for its transport or of no use to it.
        """
        asked = request.params.kv_transfer
        if asked is None:
            return
        role, field = (CONSUMER, "do_remote_decode") if asked.do_remote_decode else (PRODUCER, "do_remote_prefill")
        if self._options.kv_role == role:
            problem = f"kv_transfer_params.{field} is true, but the engine's kv_role is {role}"
            raise RequestError(problem, param="kv_transfer_params", value=field)
        host, way = asked.remote_host, self._options.transport
        if asked.do_remote_prefill and (host is None) != (way == FOLDER):
            problem = f"kv_transfer_params.remote_host is {host!r}, but the engine's transport is {way}"
            raise RequestError(problem, param="kv_transfer_params", value="remote_host")

    def queued(self, requests: Sequence[Request]) -> None:
        """Register, in the tiers, the pages that other engines have for those requests that ask for remote prefill.
        Does nothing once the engine's weights have been replaced.
        """
        for request in requests:
            asked = request.params.kv_transfer
            if asked is None or not asked.do_remote_prefill or not self._orders.is_own:
                continue
            source = Source(asked.remote_host, asked.remote_port, asked.remote_request_id or "")
            place, keys = Elsewhere(self.transport, source, self.stats), self._keys(request, asked.remote_block_ids)
            self._places[request] = keys, place
            for key in keys:
                self._offload.tiers.elsewhere.setdefault(key, []).append(place)

    def poll(self) -> Events:
        """Advance copies and leases, and remove the sources of requests whose loads are done.

        If kv_load_failure_policy is "fail", return those of these requests that lack pages as ended, with finish reason
        ERROR.
        """
        self._advance()
        failed: list[Request] = []
        for each in self._offload.done:
            request, load = each.load.request, each.load
            if request not in self._places:
                continue
            pool = self.loop.scheduler.ranks[load.rank].pool
            if self._options.kv_load_failure_policy == FAIL and any(pool.find(key) is None for key in load.pages):
                failed.append(request)
            self._forget(request)
        return Events(ended=[(each, FinishReason.ERROR, NOT_LOADED) for each in failed]) if failed else NO_EVENTS

    def ended(self, request: Request) -> None:
        """Remove the request's source. If the request asked for remote decode and ended by length or stop, lease its
        pages and set its kv_transfer_params, which stay None if the lease is refused. Pages of replaced weights are not
        leased.
        """
        self._forget(request)
        asked = request.params.kv_transfer
        has_pages = request.finish_reason in (FinishReason.LENGTH, FinishReason.STOP) and self._orders.is_own
        if asked is not None and asked.do_remote_decode and has_pages:
            request.kv_transfer_params = self._lease(request)

    def rest(self) -> float:
        """Advance copies and leases; return the seconds after which to call this again: 5 ms with copies due, 250 ms
        with leases only, inf without either.
        """
        self._advance()
        return _SOON_SECONDS if self._due else _LATER_SECONDS if self.leases else float("inf")

    def shutdown(self) -> None:
        self.transport.shutdown()

    def metrics(self) -> Iterator[Metric]:
        yield Gauge("jaxengine:kv_transfer_leases", len(self.leases))
        yield Gauge("jaxengine:kv_transfer_leased_pages", len(self._keys_kept))
        yield Counter("jaxengine:kv_transfer_received_pages", self.stats.num_received)
        yield Counter("jaxengine:kv_transfer_failed_sources", self.stats.num_failed)
        yield Counter("jaxengine:kv_transfer_refused_leases", self.stats.num_refused)

    def _keys(self, request: Request, columns: Sequence[Sequence[int]]) -> list[bytes]:
        """Return the distinct keys of the named columns (pages) of a request's prompt, for each cache group and then
        for states.

        columns: increasing indices of pages in the prompt for each cache group, and last indices of states if the model
        has them. Columns that the prompt does not have, or that the request computes in any case, are left out. Sets
        the request's page digests.
        """
        rank = self.loop.scheduler.ranks[0]
        request.compute_with(rank.weights_digest)
        digests, num_groups = rank.findable(request, request.prompt_token_ids), rank.pages.num_groups
        keys = []
        for group, own in enumerate(columns):
            known = [digests[column] for column in own[: bisect_left(own, len(digests))]]
            if group < num_groups:
                keys += [page_key(digest, group) for digest in known]
            elif rank.pages.snapshots is not None:
                keys += map(state_key, known)
        return list(dict.fromkeys(keys))

    def _lease(self, request: Request) -> dict[str, object] | None:
        """Lease the prompt pages of a request that has ended, without the page of its last prompt token, and return the
        kv_transfer_params with which another engine gets them, as JSON values.

        Returns None, and counts a refusal, if the request has no pages or host memory has no room for them. Pins the
        keys in host memory, queues copies of pages that are still on the devices, and offers the pages through the
        transport.
        """
        rank, offload = self.loop.scheduler.ranks[request.rank], self._offload
        digests = request.page_hashes[: (request.num_prompt_tokens - 1) // rank.config.page_size]
        found = found_columns(rank.pages, digests)
        columns = [
            [column for column, (key, page) in enumerate(own.items()) if page is not None or is_here(offload, key)]
            for own in found
        ]
        keys = self._keys(request, columns)
        if not self._has_room(keys):
            self.stats.num_refused += 1
            return None
        lease = secrets.token_hex(16)
        self._keep(lease, keys)
        there = {key: page for own in found for key, page in own.items() if page is not None}
        self._due.add(rank, keys, there)
        for key in keys:
            self._offer(key)
        self._advance()
        host, port = self.transport.address or (None, None)
        return dataclasses.asdict(
            KVTransferParams(
                do_remote_prefill=True,
                remote_engine_id=self._options.engine_id,
                remote_request_id=lease,
                remote_block_ids=tuple(map(tuple, columns)),
                remote_host=host,
                remote_port=port,
                tp_size=self.loop.runner.config.tensor_parallel_size,
            )
        )

    def _has_room(self, keys: Sequence[bytes]) -> bool:
        """Return whether host memory can keep these keys in addition to those of other leases; False for no keys."""
        size = self._offload.mover.block_bytes
        total = len(self._keys_kept) + sum(key not in self._keys_kept for key in keys)
        return bool(keys) and total * size <= self._offload.tiers.host.capacity

    def _keep(self, lease: str, keys: list[bytes]) -> None:
        """Begin a lease of kv_lease_duration seconds: pin its keys in host memory, and announce them through the
        transport without content.
        """
        self.leases[lease] = time.monotonic() + self._options.kv_lease_duration, keys
        self._keys_kept.keep(keys)
        for key in keys:
            self.transport.offer(key, None)

    def _advance(self) -> None:
        """Dispatch copies of leased pages as far as there is room, and end the leases that have expired or that their
        readers released.
        """
        for key in self._due.advance():
            self._offer(key)
        now = time.monotonic()
        over = [lease for lease, (end, _) in self.leases.items() if end < now]
        for lease in {*over, *self.transport.released()} & self.leases.keys():
            self._end_lease(lease)

    def _offer(self, key: bytes) -> None:
        """Offer the block of a key in host memory through the transport, at once or when the copy to host memory is
        done. Does nothing if there is neither.
        """
        tiers = self._offload.tiers
        if (block := tiers.host.get(key)) is not None:
            self.transport.offer(key, block)
        elif (copy := tiers.arriving.get(key)) is not None:
            copy.add_done_callback(lambda done: self._offer_copied(done, key))

    def _offer_copied(self, copy: Future[dict[bytes, np.ndarray]], key: bytes) -> None:
        """Offer the block of a key from a finished copy through the transport; withdraw the key if the copy failed or
        its last lease has ended. Runs on the thread that ended the copy.
        """
        block = copy.result().get(key)
        if block is not None:
            self.transport.offer(key, block)
        if block is None or key not in self._keys_kept:  # the engine's thread has ended its last lease
            self.transport.withdraw([key])

    def _end_lease(self, lease: str) -> None:
        """Remove a lease: unpin its keys, and withdraw from the transport those that no other lease has."""
        _, keys = self.leases.pop(lease)
        self.transport.withdraw(self._keys_kept.release(keys))

    def _forget(self, request: Request) -> None:
        """Remove the request's source of pages from the tiers; nothing for a request without one."""
        keys, place = self._places.pop(request, ((), None))
        elsewhere = self._offload.tiers.elsewhere
        for key in keys:
            elsewhere[key].remove(place)  # pyright: ignore[reportArgumentType]
            if not elsewhere[key]:
                del elsewhere[key]


def _open_transport(runner: ModelRunner, offload: Offload, options: KVHandover) -> Transport:
    """Open the transport that the options name, and return it: a folder named by the pages' identity, or one by
    network, which listens if the engine offers pages. Raises ConfigError if it cannot be opened.
    """
    if options.transport == FOLDER:
        assert options.shared_storage_path is not None
        name = "kv_transfer_config.shared_storage_path"
        folder = named_path(name, options.shared_storage_path) / offload.identity
        try:
            most = offload.mover.block_bytes
            return FolderTransport(folder, options.kv_lease_duration, options.produces, most)
        except OSError as error:
            problem = f"{name} {options.shared_storage_path!r} cannot be used: {error}"
            raise ConfigError.because(name, problem, "name another folder") from None
    key_file, port = runner.config.cluster_key_file, options.kv_port if options.produces else None
    assert key_file is not None
    key = read_key("cluster_key_file", key_file)
    try:
        if options.transport == JAX:
            from jaxengine.tiers.jax_transfer import JaxTransport

            return JaxTransport(key, offload.identity, options.kv_ip, port)
        from jaxengine.tiers.tcp import TcpTransport  # it needs pyzmq

        return TcpTransport(key, offload.identity, None if port is None else (options.kv_ip, port))
    except OSError as error:
        raise ConfigError.because("kv_transfer_config.kv_ip", str(error), "name an address of this host") from None
