"""KV pages outside of the devices: moves them between the devices, host memory and a folder, and lets requests wait for
them.

The engine's thread only dispatches copies and processes finished ones. One thread waits for copies to the host, others
read files and send pages to the devices, and the folder has a thread that writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.config.kv.offload import folder_option, memory_field
from jaxengine.engine.extension import NO_EVENTS, Events, Loop, LoopExtension
from jaxengine.engine.extensions.offload.page_loads import Loading, PageLoads
from jaxengine.engine.extensions.offload.page_stores import OffloadStats, PageStores, Tiers
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.engine.stats.metric_types import Counter, Gauge, Histogram, Metric
from jaxengine.runner.base.memory import host_memory
from jaxengine.runner.extensions.offload import PageMover
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.weights.weight_update import checksums
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledStep, StepResult
from jaxengine.scheduler.extensions.offload import NAME
from jaxengine.scheduler.extensions.offload import Offload as Orders
from jaxengine.tiers.disk import MAX_OVERHEAD_BYTES, DiskTier
from jaxengine.tiers.host import LRU, HostTier

logger = logging.getLogger(__name__)

# Period at which an idle engine stores copies that have arrived.
_REST_SECONDS = 0.02


class Offload(LoopExtension):
    """Loop extension with the storage tiers of KV pages.

    Attributes:
      tiers, stats: stored pages, and counts.
      mover: copies pages between devices and host.
      stores: copies on their way to the host.
      done: loads that the last `poll` completed.
      generation: the orders' num_forgotten at which host memory was last cleared; different while it is out of date.
      orders: scheduler extension with the pages to copy and the loads to start; set by `attach`.
    """

    def __init__(self, runner: ModelRunner):
        """Allocate host memory for pages, open the folder, and start the threads. Raises ConfigError for an option that
        cannot be used.
        """
        config = runner.config
        self.mover: PageMover = runner.extension(NAME)
        self.done: list[Loading] = []
        self._runner = runner
        transfer = config.kv_transfer_config
        check_sizes(config, self.mover.block_bytes)
        host = HostTier(config.kv_offloading_bytes, LRU if transfer is None else transfer.eviction_policy)
        self.tiers, self.stats = Tiers(host, _open_disk(self, config)), OffloadStats()
        self._disk = self.tiers.disk
        self._something = threading.Event()
        self._loads = PageLoads(self.mover, self._something)
        self.stores = PageStores(self.mover, self.tiers, self.stats, self._something, is_bounded=not runner.on_cpu)
        self.generation = 0

    def attach(self, loop: Loop) -> None:
        super().attach(loop)
        self.orders: Orders = loop.scheduler.extension(NAME)
        self.orders.store = self.tiers
        self._most_decodes = loop.scheduler.config.max_num_seqs
        self._fills_after_sample = self.mover.fills_after_sample

    def poll(self) -> Events:
        """Dispatch due copies, store copies that have arrived, install loaded pages into the pools, and set `done` to
        the completed loads; return the requests of these loads as ready.
        """
        if self.done:
            self.done = []
        orders = self.orders
        if not (self._something.is_set() or orders.is_due or self.generation != orders.num_forgotten):
            return NO_EVENTS  # as in most steps
        self._something.clear()
        self._check_generation()
        self._save(filled=True)
        self.stores.keep()
        self._install()
        self.done = self._loads.take_done()
        for each in self.done:
            self._finish_load(each)
        return Events(ready=[each.load.request for each in self.done]) if self.done else NO_EVENTS

    def before_forward(self, step: ScheduledStep) -> None:
        """Dispatch copies of the pages that leave the pools, which the step's forward pass may overwrite."""
        if self.orders.is_due:
            self._save()

    def after_forward(self, step: InFlight | None) -> Events:
        """Dispatch copies of the pages that the step fills, and start the loads that the scheduler has ordered. Returns
        no events. With `fills_after_sample` the copies are left to the next `poll`.
        """
        if self.orders.is_due and not self._fills_after_sample:
            self._save(filled=True)
        if loads := self.orders.loads:
            for load in loads:
                self._loads.start(load, {key: self.tiers.find(key) for key in load.keys}, self.generation)
            self.orders.loads = []
        return NO_EVENTS

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Record the rate of computed tokens for the tiers, from steps with more than max_num_seqs tokens, which are
        hardly decodes alone.
        """
        if step.step.num_tokens > self._most_decodes:
            self.tiers.computing.observe(step.step.num_tokens, step.seconds)

    def ended(self, request: Request) -> None:
        """Release what the orders keep for the request, give up its load, and dispatch copies of the pages that it has
        filled.
        """
        self.orders.ended(request)
        self._loads.give_up(request)
        self._save(filled=True)

    def wait(self, seconds: float) -> bool:
        if not self._loads.is_busy:
            return False
        self._something.wait(seconds)
        return True

    def rest(self) -> float:
        """Store copies that have arrived; return the number of seconds after which to call this again, inf if none is
        on its way.
        """
        self._check_generation()
        self.stores.keep()
        return _REST_SECONDS if self.stores.is_busy else float("inf")

    def shutdown(self) -> None:
        """Wait for all copies from the devices, store them, and end the threads, the folder's after its writes."""
        with contextlib.ExitStack() as others:  # each is ended, even if one before it raises
            if self._disk is not None:
                others.callback(self._disk.shutdown)
            others.callback(self.stores.keep)
            others.callback(self._loads.shutdown)
            self.stores.shutdown()

    def flush(self, seconds: float = 30.0) -> bool:
        """Wait until all copies dispatched so far are stored, in the folder too, for `seconds` at most; return whether
        they are.
        """
        end = time.monotonic() + seconds
        self._check_generation()
        self.stores.flush(end)
        disk = self.tiers.disk
        return not self.stores.is_busy and (disk is None or disk.flush(max(0.0, end - time.monotonic())))

    @property
    def utilities(self) -> dict[str, Any]:
        return {"flush_kv_offload": self.flush}

    def metrics(self) -> Iterator[Metric | Histogram]:
        """Yield counters and histograms of pages moved, counters of prefix tokens looked up and of preemptions by mode,
        and a gauge of host memory's use; with a folder also its bytes, bad files and failed writes.
        """
        orders, tiers = self.orders, self.tiers
        for way in ("load", "store"):
            yield Counter(f"vllm:kv_offload_{way}_bytes", self.stats.bytes[way])
            yield Counter(f"vllm:kv_offload_{way}_time", self.stats.seconds[way])
            yield self.stats.sizes[way].metric(f"vllm:kv_offload_{way}_size")
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
        """Return, under the key "kv_offload", a dict of JSON values: "host_bytes", "host_capacity" (bytes) and
        "host_blocks" of host memory; with a folder also "disk_bytes", "disk_blocks" and "disk_bad_files"; the bytes
        moved, "load_bytes" and "store_bytes"; and the prefix tokens looked up ("queries") and found ("hits").
        """
        host, disk = self.tiers.host, self.tiers.disk
        stored = {"host_bytes": host.num_bytes, "host_capacity": host.capacity, "host_blocks": len(host)}
        if disk is not None:
            stored |= {"disk_bytes": disk.num_bytes, "disk_blocks": len(disk), "disk_bad_files": disk.num_bad}
        moved = {f"{way}_bytes": self.stats.bytes[way] for way in ("load", "store")}
        return {"kv_offload": stored | moved | {"hits": self.orders.num_hits, "queries": self.orders.num_queries}}

    @cached_property
    def identity(self) -> str:
        """Digest of the weights and the layout of pages, on which the pages' content depends in addition to their keys:
        32 hexadecimal digits.

        The first use reads all weights and logs the time that this took. Raises the errors of `checksums`.
        """
        start = time.monotonic()
        weights = sorted(checksums(self._runner).items())
        found = hashlib.sha256(repr((2, weights, self.mover.describe())).encode()).hexdigest()[:32]
        logger.info("pages are those of %s; weights were read for this name in %.1f s", found, time.monotonic() - start)
        return found

    def save(self, rank: int, pages: dict[bytes, int], states: dict[bytes, int]) -> None:
        """Dispatch copies of the present content of pages and snapshots of replica `rank`, by key, together with all
        copies that are due; those beyond the room of `stores` are dropped and counted.
        """
        orders = self.orders.ranks[rank]
        orders.pages.filled.update(pages)
        orders.states.filled.update(states)
        self._save(filled=True)

    def _save(self, filled: bool = False) -> None:
        """Dispatch copies of the pages and snapshots that leave the pools, and clear these orders; those for which
        there is no room are dropped and counted. filled: also those that steps have filled.

        Keys that are already on their way are skipped. Gives up the folder if the engine's weights are no longer those
        that name it.
        """
        if not self.orders.is_own:
            self.tiers.disk = None
        if filled:
            self.orders.is_due = False
        for states in (False, True):
            ranks = []
            for rank in self.orders.ranks:
                orders = rank.states if states else rank.pages
                due = orders.leaving | (orders.filled if filled else {})
                orders.leaving.clear()
                if filled:
                    orders.filled.clear()
                ranks.append([(key, row) for key, row in due.items() if key not in self.tiers.arriving])
            if any(ranks):
                self.stores.send(ranks, states)

    def _install(self) -> None:
        """Allocate pages and snapshots for the parts of loads that have reached the devices, dispatch writing them, and
        count them. Copies of the content that these pages had are dispatched first. Parts of loads that began before
        the pools forgot their pages are dropped.
        """
        for loading, coming, size in self._loads.take_parts():
            loading.load.came = time.monotonic()
            if loading.generation != self.generation:
                continue
            rank = self.orders.ranks[coming.rank]
            if coming.size:
                entries = rank.take(coming.keys, loading.load.pages)
            else:
                snapshot = rank.take_state(coming.keys[0])
                entries = [] if snapshot is None else [(coming.keys[0], snapshot)]
            self._save()  # copies of the earlier content of these pages come first
            if entries:
                self.mover.install(coming, entries)
            loading.num_found += len(entries)
            self.stats.count("load", len(entries), size, 0.0)

    def _finish_load(self, loading: Loading) -> None:
        """Mark a load as done, add it to the stats and to the loading rate, and log its error, if any."""
        loading.load.is_done = True
        if (error := loading.error) is not None:
            logger.error("pages could not be brought back; they are computed: %s", error)
        seconds = time.monotonic() - loading.start
        self.stats.seconds["load"] += seconds
        if loading.num_found:
            self.tiers.loading.observe(loading.num_found, seconds)

    def _check_generation(self) -> None:
        """Clear host memory and the copies on their way if the pools have forgotten their pages since the last call."""
        if self.generation != self.orders.num_forgotten:
            self.generation = self.orders.num_forgotten
            self.tiers.host.clear()
            self.tiers.arriving.clear()


def check_sizes(config: ResolvedConfig, block_bytes: int) -> None:
    """Raise ConfigError if the tiers' sizes are too small for a single page or state, or if the host's memory is less
    than what is to be used of it. block_bytes: size of the larger of a page and a state.
    """
    memory, disk = config.kv_offloading_bytes, config.kv_offloading_disk_size
    sizes = [(memory_field(config.kv_transfer_config), memory, block_bytes)]
    if disk is not None:
        sizes.append(("kv_offloading_disk_size", int(disk * (1 << 30)), block_bytes + MAX_OVERHEAD_BYTES))
    for name, size, least in sizes:
        if size < least:
            problem = f"{name} gives {size} bytes, too few for a page"
            raise ConfigError.because(name, problem, f"give at least {least} bytes, one page")
    if memory > (most := host_memory()):
        problem = f"{sizes[0][0]} gives {memory} bytes, more than the host's memory"
        raise ConfigError.because(sizes[0][0], problem, f"give at most {most} bytes")


def _open_disk(offload: Offload, config: ResolvedConfig) -> DiskTier | None:
    """Open the folder tier in a subfolder of kv_offloading_folder named by `identity`, log its number of pages, and
    return it; None without the option.

    Raises ConfigError for a folder that cannot be created or read.
    """
    folder, size = config.kv_offloading_folder, config.kv_offloading_disk_size
    if folder is None:
        return None
    try:
        capacity = None if size is None else int(size * (1 << 30))
        disk = DiskTier(folder / offload.identity, capacity, offload.mover.block_bytes)
    except OSError as error:
        name = folder_option(config.kv_transfer_config)
        problem = f"{name} {str(folder)!r} cannot be used: {error}"
        raise ConfigError.because(name, problem, "name another folder") from None
    logger.info("%s has %d pages of this model", disk.folder, len(disk))
    return disk
