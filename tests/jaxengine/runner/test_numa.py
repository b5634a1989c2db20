"""An engine's process on the NUMA nodes of its devices: those of a host that is described by files, and this one's."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from jax._src import hardware_utils

from jaxengine.config.engine_config import ConfigError
from jaxengine.runner.start import numa

# Two GPUs on each of two nodes, a network card, and a bridge.
DEVICES = {
    "0000:1b:00.0": ("0x10de", "0x030200", "0"),
    "0000:2b:00.0": ("0x10de", "0x030200", "0"),
    "0000:8b:00.0": ("0x10de", "0x030200", "1"),
    "0000:9b:00.0": ("0x10de", "0x030000", "1"),
    "0000:9c:00.0": ("0x15b3", "0x020000", "3"),
    "0000:9d:00.0": ("0x10de", "0x060400", "4"),
}


@pytest.fixture
def host(tmp_path, monkeypatch):
    for variable in ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"):
        monkeypatch.delenv(variable, raising=False)
    for name, (vendor, kind, node) in DEVICES.items():
        folder = tmp_path / "bus/pci/devices" / name
        folder.mkdir(parents=True)
        for file, text in (("vendor", vendor), ("class", kind), ("numa_node", node)):
            (folder / file).write_text(f"{text}\n")
    return tmp_path


def test_nodes_are_those_of_visible_devices(host, monkeypatch):
    assert numa.device_nodes(host) == [0, 1]
    for listed, nodes in (("2", [1]), ("0, 1", [0]), ("1,3", [0, 1])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert numa.device_nodes(host) == nodes
    for listed in ("GPU-8932f937", "4", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        with pytest.raises(ConfigError, match=f"no device for CUDA_VISIBLE_DEVICES={listed}; give numa_bind_nodes"):
            numa.device_nodes(host)


def test_tpus_are_known_by_their_ids(host, monkeypatch):
    """Whatever their class is. Google's network cards and disks are no TPUs."""
    assert {*hardware_utils._TPU_PCI_DEVICE_IDS} == numa._TPUS and hardware_utils._GOOGLE_PCI_VENDOR_ID == numa._GOOGLE
    for name, (device, kind, node) in enumerate(
        (("0x0042", "0x020000", "5"), ("0x0063", "0xff0000", "6"), ("0x0063", "0x120000", "7"))
    ):
        folder = host / f"bus/pci/devices/0001:00:0{name}.0"
        folder.mkdir()
        for file, text in (("vendor", "0x1ae0"), ("device", device), ("class", kind), ("numa_node", node)):
            (folder / file).write_text(f"{text}\n")
    assert numa.device_nodes(host) == [0, 1, 6, 7]
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "1")
    assert numa.device_nodes(host) == [0, 1, 7]


def test_nodes_that_are_not_known_must_be_given(host):
    (host / "bus/pci/devices/0000:1b:00.0/numa_node").write_text("-1\n")
    with pytest.raises(ConfigError, match="no GPU or TPU is found whose NUMA node is known; give numa_bind_nodes"):
        numa.device_nodes(host)
    with pytest.raises(ConfigError, match="no GPU or TPU is found"):
        numa.device_nodes(host / "bus")


@pytest.mark.skipif(sys.platform != "linux", reason="NUMA nodes are bound on Linux")
def test_every_thread_is_bound_and_memory_after_it(monkeypatch):
    """The test's own process is not bound for good: its threads get their CPUs back, and memory is not bound."""
    bound: list[list[int]] = []
    monkeypatch.setattr(numa, "_bind_memory", bound.append)
    before, ended = os.sched_getaffinity(0), threading.Event()
    ids: list[int] = []
    waiting = threading.Thread(target=lambda: (ids.append(threading.get_native_id()), ended.wait()))
    waiting.start()
    first = min(before)
    monkeypatch.setattr(numa, "_cpus_by_node", lambda system: {0: {first}, 1: {8000}, 2: before})
    try:
        numa.bind_process([0, 0], None)
        assert bound == [[0]]
        assert {thread: os.sched_getaffinity(thread) for thread in (0, ids[0])} == {0: {first}, ids[0]: {first}}
        numa.bind_process([0], [str(first)])
        for options, message in (
            (([3], None), "numa_bind_nodes has 3, which this host does not have; it has 0, 1, 2"),
            (([1], None), "numa_bind names CPUs that this process may not use: 8000"),
            (([0], ["8000"]), "numa_bind_cpus names CPUs that this process may not use: 8000"),
        ):
            with pytest.raises(ConfigError, match=message):
                numa.bind_process(*options)
        assert bound == [[0], [0]]
    finally:
        for thread in numa._THREADS.iterdir():
            os.sched_setaffinity(int(thread.name), before)
        ended.set()
        waiting.join()


@pytest.mark.skipif(sys.platform != "linux", reason="NUMA nodes are bound on Linux")
def test_memory_is_bound_by_the_system(monkeypatch):
    """In a thread of its own, whose policy ends with it. A container may forbid the call, and then it is an error."""
    found: list[str] = []

    def bind(nodes: list[int]) -> None:
        try:
            numa._bind_memory(nodes)
            found.append("bound")
        except ConfigError as error:
            found.append(str(error))

    for nodes in ([0], [900]):
        thread = threading.Thread(target=bind, args=(nodes,))
        thread.start()
        thread.join()
    refused = "numa_bind: memory cannot be bound: "
    assert found[0] == "bound" or found[0].startswith(f"{refused}Operation not permitted"), found
    assert found[1].startswith(refused) and ("SYS_NICE" in found[1]) == ("not permitted" in found[1])
    monkeypatch.setattr(numa.platform, "machine", lambda: "s390x")
    with pytest.raises(ConfigError, match="numa_bind is True; allowed: False on s390x"):
        numa._bind_memory([0])
