"""Copies of pages on their way to the host."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.kv.offload import KVTransferConfig
from jaxengine.engine.extensions.offload import page_loads
from jaxengine.engine.extensions.offload.offload import check_sizes
from jaxengine.engine.extensions.offload.page_stores import OffloadStats, PageStores, Tiers
from jaxengine.tiers.host import HostTier
from jaxengine.tiers.transport import never
from tests.tables import each_row


def test_a_flush_returns_in_time_when_a_copy_takes_longer():
    arrived, block = threading.Event(), np.arange(8, dtype=np.uint8)

    def blocks() -> dict[bytes, np.ndarray]:
        assert arrived.wait(60)
        return {b"a": block}

    mover: Any = SimpleNamespace(save=lambda ranks: [SimpleNamespace(entries=ranks[0], blocks=blocks)])
    tiers = Tiers(HostTier(100), None)
    stores = PageStores(mover, tiers, OffloadStats(), threading.Event(), is_bounded=True)
    stores.send([[(b"a", 0)]], states=False)
    stores.flush(time.monotonic() + 0.01)
    assert stores.is_busy and b"a" not in tiers.host
    arrived.set()
    stores.flush(time.monotonic() + 60)
    assert not stores.is_busy and tiers.host.get(b"a") is block
    stores.shutdown()


def test_a_copy_that_fails_costs_its_pages_alone(caplog):
    block = np.arange(8, dtype=np.uint8)

    def fail() -> dict[bytes, np.ndarray]:
        raise MemoryError("no memory")

    copies = iter((fail, lambda: {b"b": block}))
    mover: Any = SimpleNamespace(save=lambda ranks: [SimpleNamespace(entries=ranks[0], blocks=next(copies))])
    tiers, stats = Tiers(HostTier(100), None), OffloadStats()
    stores = PageStores(mover, tiers, stats, threading.Event(), is_bounded=True)
    stores.send([[(b"a", 0)]], states=False)
    found = {b"a": tiers.find(b"a"), b"c": block}
    stores.send([[(b"b", 0)]], states=False)
    stores.flush(time.monotonic() + 60)
    assert not tiers.has(b"a") and tiers.host.get(b"b") is block and not tiers.arriving
    assert stats.num_dropped == 1 and stats.counts["store"] == 1 and "no memory" in caplog.text
    assert dict(page_loads._read(found, never)) == {b"c": block}, "a load that waits for the copy has the other pages"
    stores.shutdown()


def test_a_page_of_two_replicas_is_copied_once():
    """Replicas that compute one prompt at once fill pages with the same key in one step."""
    sent: list[list[tuple[bytes, int]]] = []

    def save(ranks: list[list[tuple[bytes, int]]]) -> list[Any]:
        sent[:] = ranks
        entries = [each for own in ranks for each in own]
        return [SimpleNamespace(entries=entries, blocks=lambda: {key: np.zeros(8, np.uint8) for key, _ in entries})]

    mover: Any = SimpleNamespace(save=save)
    tiers, stats = Tiers(HostTier(100), None), OffloadStats()
    stores = PageStores(mover, tiers, stats, threading.Event(), is_bounded=True)
    stores.send([[(b"a", 0), (b"b", 1)], [(b"b", 0), (b"c", 5)]], states=False)
    stores.flush(time.monotonic() + 60)
    assert sent == [[(b"a", 0), (b"b", 1)], [(b"c", 5)]] and not tiers.arriving and len(tiers.host) == 3
    assert stats.num_dropped == 0 and stats.counts["store"] == 3
    stores.shutdown()


class Silent(page_loads.Place):
    """Another engine that brings nothing until its reader gives up."""

    is_far = True

    def __init__(self, address: str, reading: list[str]):
        self.address, self._name, self._reading = address, address, reading

    def read_all(self, keys, is_over):
        self._reading.append(self._name)
        while not is_over():
            time.sleep(0.001)
        yield from ()


def test_loads_from_engines_that_do_not_answer(monkeypatch):
    """One address holds half of the threads at most, and so does one client; a request that has ended holds none. A
    load for which the system has no thread ends.
    """

    def without_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def wait_for(holds: Any) -> None:
        end = time.monotonic() + 60
        while not holds() and time.monotonic() < end:
            time.sleep(0.001)
        assert holds()

    mover: Any = SimpleNamespace(page_bytes=8, send=lambda rank, pages: SimpleNamespace(keys=pages))
    loads, reading = page_loads.PageLoads(mover, threading.Event()), list[str]()
    orders: list[Any] = [SimpleNamespace(request=SimpleNamespace(client=""), rank=0) for _ in range(13)]
    for order in orders[:10]:
        loads.start(order, {b"a": Silent("silent:1", reading)}, 0)
    loads.start(orders[10], {b"a": Silent("silent:2", reading)}, 0)
    wait_for(lambda: sorted(reading) == ["silent:1"] * 4 + ["silent:2"])
    for order in orders[2:10]:  # two of which are being read
        loads.give_up(order.request)
    wait_for(lambda: len(loads._loading) == 11 and sum(each.num_parts == 0 for each in loads._loading) == 8)
    assert len(loads.take_done()) == 8 and loads.is_busy and len(reading) == 5
    monkeypatch.setattr(page_loads, "_QUEUE_SECONDS", -1.0)  # one whose turn comes too late
    loads.start(orders[11], {b"a": Silent("silent:3", reading)}, 0)
    wait_for(lambda: [each.num_parts for each in loads._loading].count(0) == 1)
    assert "silent:3" not in reading
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", without_threads)
        loads.start(orders[12], {b"a": Silent("silent:4", reading)}, 0)
    assert isinstance(loads._loading[-1].error, RuntimeError) and loads._loading[-1].num_parts == 0
    monkeypatch.setattr(page_loads, "_QUEUE_SECONDS", 20.0)
    for number in range(20):
        order: Any = SimpleNamespace(request=SimpleNamespace(client="many"), rank=0)
        loads.start(order, {b"a": Silent(f"many:{number}", reading)}, 0)
    wait_for(lambda: sorted(reading[5:]) == [f"many:{number}" for number in range(4)])
    other: Any = SimpleNamespace(request=SimpleNamespace(client="other"), rank=0)
    loads.start(other, {b"a": Silent("other:1", reading)}, 0)
    wait_for(lambda: reading[-1] == "other:1")
    loads.shutdown()
    assert all(each.future.done() for each in loads._loading)


@each_row(
    "gib, disk_gib, message",
    (
        (1e-6, None, "kv_offloading_size gives 1073 bytes, too few for a page; give at least 4096 bytes"),
        (1, 1e-6, "kv_offloading_disk_size gives 1073 bytes, too few for a page; give at least 4192 bytes"),
        (1e6, None, "kv_offloading_size gives 1073741824000000 bytes, more than the host's memory; give at most"),
    ),
)
def test_tiers_that_hold_nothing_or_too_much_are_refused(gib, disk_gib, message):
    config = EngineConfig(
        kv_offloading_size=gib, kv_offloading_path=disk_gib and "/tmp", kv_offloading_disk_size=disk_gib
    )
    with pytest.raises(ConfigError, match=message):
        check_sizes(cast(Any, config), 4096)


def test_a_default_that_is_too_much_for_a_small_host_is_refused_by_its_name(monkeypatch):
    """kv_buffer_size is a gigabyte if it is not given."""
    monkeypatch.setattr("jaxengine.engine.extensions.offload.offload.host_memory", lambda: 10**9 - 1)
    handover: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    handover["kv_connector_extra_config"] = {"transport": "folder", "shared_storage_path": "/tmp"}
    config = EngineConfig(kv_transfer_config=KVTransferConfig.read(handover))
    with pytest.raises(ConfigError, match="kv_transfer_config.kv_buffer_size gives 1000000000 bytes, more than"):
        check_sizes(cast(Any, config), 4096)
