"""Pages outside of the devices: moves them between the devices, host memory and a folder, and lets requests wait for
them.

The engine's thread only dispatches copies and looks which are done. One thread waits for copies to the host, another
reads files and sends pages to the devices, and the folder has a thread that writes.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxengine.config.errors import ConfigError
from jaxengine.engine.extension import NO_EVENTS, Events, Loop, LoopExtension
from jaxengine.engine.extensions.page_loads import Loading, PageLoads
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.metric_types import Counter, Gauge, Metric
from jaxengine.engine.output import EngineOutput
from jaxengine.runner.extensions.offload import MAX_LEAVING, SIZES, Leaving, PageMover
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.weight_update import checksums
from jaxengine.scheduler.batch import ScheduledStep, StepResult
from jaxengine.scheduler.extensions.offload import NAME
from jaxengine.scheduler.extensions.offload import Offload as Orders
from jaxengine.scheduler.request import Request
from jaxengine.tiers.disk import DiskTier
from jaxengine.tiers.host import LRU, HostTier

logger = logging.getLogger(__name__)

# How much a new measurement of a rate counts.
_WEIGHT = 0.2


class Rate:
    """Amount per second, as the mean of measurements in which later ones count more; None before the first."""

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, amount: float, seconds: float) -> None:
        """Add a measurement; one that took no time is left out."""
        if seconds > 0:
            new = amount / seconds
            self.value = new if self.value is None else (1 - _WEIGHT) * self.value + _WEIGHT * new


class Tiers:
    """Host memory and a folder as one store (jaxengine.scheduler.extensions.offload.Store). For the engine's thread.

    Attributes:
      disk: None for no folder, or once pages may be other than their keys say.
      arriving: keys on their way to the host, with the copy that has them.
      loading, computing: stored pages brought back and tokens computed per second.
    """

    def __init__(self, host: HostTier, disk: DiskTier | None):
        self.host, self.disk = host, disk
        self.arriving: dict[bytes, Future[dict[bytes, np.ndarray]]] = {}
        self.loading, self.computing = Rate(), Rate()

    def has(self, key: bytes) -> bool:
        return key in self.host or key in self.arriving or (self.disk is not None and key in self.disk)

    def pin(self, keys: Sequence[bytes]) -> None:
        self.host.pin(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        self.host.unpin(keys)

    def pays(self, num_stored: int, num_tokens: int) -> bool:
        """Whether bringing back pays. What has not been measured yet is tried."""
        loading, computing = self.loading.value, self.computing.value
        return loading is None or computing is None or num_stored / loading < num_tokens / computing

    def find(self, key: bytes) -> np.ndarray | Future[dict[bytes, np.ndarray]] | None:
        """Return a key's content if host memory has it, or the copy that brings it there; None: it may be on disk."""
        found = self.host.get(key)
        return found if found is not None else self.arriving.get(key)


class OffloadStats:
    """Counts of moved pages and states: of each way ("load", "store") the number, bytes and seconds, of dropped ones
    the number.
    """

    def __init__(self) -> None:
        self.counts = {"load": 0, "store": 0}
        self.bytes = {"load": 0, "store": 0}
        self.seconds = {"load": 0.0, "store": 0.0}
        self.num_dropped = 0

    def count(self, way: str, number: int, size: int, seconds: float) -> None:
        """Count pages moved. way: "load" or "store"."""
        self.counts[way] += number
        self.bytes[way] += size
        self.seconds[way] += seconds


class Offload(LoopExtension):
    """Loop extension with the tiers.

    Attributes:
      tiers, stats: what is stored, and counts.
    """

    def __init__(self, runner: ModelRunner):
        config = runner.config
        self._mover: PageMover = runner.extension(NAME)
        transfer = config.kv_transfer_config
        host = HostTier(config.kv_offloading_bytes, LRU if transfer is None else transfer.eviction_policy)
        if host.capacity < self._mover.page_bytes:
            size = f"{self._mover.page_bytes} bytes, one page at least"
            raise ConfigError.because("kv_offloading_size", f"{host.capacity} bytes hold no page", f"give {size}")
        self.tiers, self.stats = Tiers(host, _open_disk(runner, self._mover)), OffloadStats()
        self._disk = self.tiers.disk
        self._copies = ThreadPoolExecutor(1, "kv-copies")
        self._something = threading.Event()
        self._loads = PageLoads(self._mover, self._something)
        self._leaving: deque[tuple[Leaving, Future[dict[bytes, np.ndarray]], float]] = deque()
        # Copies that wait hold device memory, which on a CPU is the host's.
        self._max_leaving = 1 << 30 if runner.on_cpu else MAX_LEAVING * SIZES[-1]
        self._generation = 0

    def attach(self, loop: Loop) -> None:
        super().attach(loop)
        self._orders: Orders = loop.scheduler.extension(NAME)
        self._orders.store = self.tiers

    def poll(self) -> Events:
        self._something.clear()
        self._check_generation()
        self._save()
        self._keep()
        self._install()
        if not (done := self._loads.take_done()):
            return NO_EVENTS
        for each in done:
            self._finish_load(each)
        return Events(ready=[each.load.request for each in done])

    def before_forward(self, step: ScheduledStep) -> None:
        self._save()

    def after_forward(self, step: InFlight | None) -> Events:
        self._save(filled=True)
        orders, tiers = self._orders, self.tiers
        for load in orders.loads:
            self._loads.start(load, {key: tiers.find(key) for key in load.keys}, tiers.disk, self._generation)
        orders.loads = []
        return NO_EVENTS

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        if step.step.num_tokens > self.loop.scheduler.config.max_num_seqs:  # hardly a step of decodes alone
            self.tiers.computing.observe(step.step.num_tokens, step.seconds)

    def ended(self, request: Request) -> None:
        self._orders.ended(request)
        self._save(filled=True)

    def wait(self, seconds: float) -> bool:
        if not self._loads.is_busy:
            return False
        self._something.wait(seconds)
        return True

    def shutdown(self) -> None:
        """End the threads, after what has left the devices is written to the folder."""
        self._copies.shutdown()
        self._loads.shutdown()
        self._keep()
        if self._disk is not None:
            self._disk.shutdown()

    def flush(self, seconds: float = 30.0) -> bool:
        """Wait until what has left the devices so far is stored, for `seconds` at most; return whether it is."""
        end = time.monotonic() + seconds
        self._check_generation()
        while self._leaving and time.monotonic() < end:
            self._leaving[0][1].exception(max(0.0, end - time.monotonic()))
            self._keep()
        disk = self.tiers.disk
        return not self._leaving and (disk is None or disk.flush(max(0.0, end - time.monotonic())))

    @property
    def utilities(self) -> dict[str, Any]:
        return {"flush_kv_offload": self.flush}

    def metrics(self) -> Iterator[Metric]:
        orders, tiers = self._orders, self.tiers
        for way in ("load", "store"):
            yield Counter(f"vllm:kv_offload_{way}_bytes", self.stats.bytes[way])
            yield Counter(f"vllm:kv_offload_{way}_time", self.stats.seconds[way])
            yield Counter(f"jaxengine:kv_offload_{way}_pages", self.stats.counts[way])
        yield Counter("jaxengine:kv_offload_dropped_pages", self.stats.num_dropped)
        yield Counter("vllm:external_prefix_cache_queries", orders.num_queries)
        yield Counter("vllm:external_prefix_cache_hits", orders.num_hits)
        for mode, count in orders.num_by_mode.items():
            yield Counter("jaxengine:num_preemptions_by_mode", count, {"mode": mode})
        yield Gauge("vllm:kv_offload_cpu_cache_usage_perc", tiers.host.num_bytes / tiers.host.capacity)
        if tiers.disk is not None:
            yield Gauge("jaxengine:kv_offload_disk_bytes", tiers.disk.num_bytes)
            yield Counter("jaxengine:kv_offload_disk_bad_files", tiers.disk.num_bad)
            yield Counter("jaxengine:kv_offload_disk_failed_writes", tiers.disk.num_failed)

    def status(self) -> dict[str, Any]:
        """Return the bytes of the tiers, and what has been moved."""
        host, disk = self.tiers.host, self.tiers.disk
        stored = {"host_bytes": host.num_bytes, "host_capacity": host.capacity, "host_blocks": len(host)}
        if disk is not None:
            stored |= {"disk_bytes": disk.num_bytes, "disk_blocks": len(disk), "disk_bad_files": disk.num_bad}
        moved = {f"{way}_bytes": self.stats.bytes[way] for way in ("load", "store")}
        return {"kv_offload": stored | moved | {"hits": self._orders.num_hits, "queries": self._orders.num_queries}}

    def _save(self, filled: bool = False) -> None:
        """Dispatch the copies that are due. filled: also of pages that the newest step has filled."""
        if not self._orders.is_own:
            self.tiers.disk = None
        for states in (False, True):
            ranks = []
            for rank in self._orders.ranks:
                orders = rank.states if states else rank.pages
                due = orders.leaving | (orders.filled if filled else {})
                orders.leaving.clear()
                if filled:
                    orders.filled.clear()
                ranks.append([(key, row) for key, row in due.items() if key not in self.tiers.arriving])
            if any(ranks):
                self._send_away(ranks, states)

    def _send_away(self, ranks: list[list[tuple[bytes, int]]], states: bool) -> None:
        room = self._max_leaving - sum(len(leaving.entries) for leaving, _, _ in self._leaving)
        for index, own in enumerate(ranks):
            ranks[index] = own[: max(0, room)]
            self.stats.num_dropped += len(own) - len(ranks[index])
            room -= len(ranks[index])
        for leaving in self._mover.save_states(ranks) if states else self._mover.save(ranks):
            future = self._copies.submit(leaving.blocks)
            future.add_done_callback(lambda _: self._something.set())
            self._leaving.append((leaving, future, time.monotonic()))
            self.tiers.arriving |= dict.fromkeys((key for key, _ in leaving.entries), future)

    def _keep(self) -> None:
        """Store what has arrived in host memory."""
        while self._leaving and self._leaving[0][1].done():
            leaving, future, start = self._leaving.popleft()
            blocks = future.result()
            for key in [key for key in blocks if self.tiers.arriving.get(key) is not future]:
                del blocks[key]  # forgotten meanwhile
            size = sum(block.nbytes for block in blocks.values())
            self.stats.count("store", len(blocks), size, time.monotonic() - start)
            for key, block in blocks.items():
                del self.tiers.arriving[key]
                self.tiers.host.put(key, block)
                if self.tiers.disk is not None:
                    self.tiers.disk.write(key, block)

    def _install(self) -> None:
        """Give pages to what has come to the devices, and dispatch the writing."""
        for loading, coming, size in self._loads.take_parts():
            if loading.generation != self._generation:
                continue
            rank = self._orders.ranks[coming.rank]
            if coming.size:
                entries = rank.take(coming.keys, loading.load.pages)
            else:
                snapshot = rank.take_state(coming.keys[0])
                entries = [] if snapshot is None else [(coming.keys[0], snapshot)]
            self._save()  # what these pages held
            if entries:
                self._mover.install(coming, entries)
            loading.num_found += len(entries)
            self.stats.count("load", len(entries), size, 0.0)

    def _finish_load(self, loading: Loading) -> None:
        """Count a load of which nothing more will come."""
        if (error := loading.error) is not None:
            logger.error("pages could not be brought back; they are computed: %s", error)
        seconds = time.monotonic() - loading.start
        self.stats.seconds["load"] += seconds
        if loading.num_found:
            self.tiers.loading.observe(loading.num_found, seconds)

    def _check_generation(self) -> None:
        """Forget what host memory has if the pools have forgotten theirs."""
        if self._generation != self._orders.num_forgotten:
            self._generation = self._orders.num_forgotten
            self.tiers.host.clear()
            self.tiers.arriving.clear()


def _open_disk(runner: ModelRunner, mover: PageMover) -> DiskTier | None:
    """Return the folder's tier, in a subfolder for what exactly this model's pages mean; None without the option.

    Raises ConfigError for a folder that cannot be made.
    """
    config = runner.config
    folder, size = config.kv_offloading_folder, config.kv_offloading_disk_size
    if folder is None:
        return None
    start = time.monotonic()
    weights = sorted(checksums(runner).items())
    name = hashlib.sha256(repr((1, weights, mover.describe())).encode()).hexdigest()[:32]
    try:
        disk = DiskTier(folder / name, None if size is None else int(size * (1 << 30)))
    except OSError as error:
        raise ConfigError.because("kv_offloading_path", str(error), "name another folder") from None
    logger.info(
        "%s has %d pages of this model; its weights were read for its name in %.1f s",
        disk.folder,
        len(disk),
        time.monotonic() - start,
    )
    return disk
