"""The option numa_bind: an engine's process runs on the NUMA nodes that its devices are attached to.

Threads that exist are bound, and those that are started later inherit it. Facts come from Linux' /sys; memory is bound
by the system call set_mempolicy.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.execution.placement import cpus_of

logger = logging.getLogger(__name__)

SYSTEM = Path("/sys")
_THREADS = Path("/proc/self/task")
# Vendors' ids on the PCI bus.
_NVIDIA, _GOOGLE = "0x10de", "0x1ae0"
_VENDORS = {_NVIDIA: "CUDA_VISIBLE_DEVICES", _GOOGLE: "TPU_VISIBLE_CHIPS"}
# Classes of GPUs: displays, 3D controllers and processing accelerators.
_CLASSES = ("0x0300", "0x0302", "0x1200")
# Google's ids of TPUs, v2 to v7x, which are known by them and not by a class, as in jax.
_TPUS = frozenset(("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"))
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_BIND = 2


def bind_process(nodes: Sequence[int] | None, cpus: Sequence[str] | None) -> None:
    """Bind this process to NUMA nodes: its threads to their CPUs, its memory to theirs, and log that. Call it before
    jax starts its threads.

    nodes: None for those of all GPUs and TPUs that this process may use. cpus: lists of CPUs, such as "0-3", instead of
    the nodes'. Raises ConfigError on other systems than Linux, for nodes that this host does not have, for `cpus` that
    the process may not use, or nodes of which it may use no CPU, if the devices' nodes are not known, and if the system
    refuses.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("numa_bind", True, "False: it needs Linux")
    chosen = sorted(set(device_nodes(SYSTEM) if nodes is None else nodes))
    there = _cpus_by_node(SYSTEM)
    if missing := [node for node in chosen if node not in there]:
        problem = f"numa_bind_nodes has {missing[0]}, which this host does not have"
        raise ConfigError.because("numa_bind_nodes", problem, f"it has {', '.join(map(str, sorted(there)))}")
    wanted = set().union(*(map(cpus_of, cpus) if cpus is not None else (there[node] for node in chosen)))
    usable = wanted & os.sched_getaffinity(0)
    if not usable or (cpus is not None and usable != wanted):
        name, unusable = "numa_bind" if cpus is None else "numa_bind_cpus", sorted(wanted - usable)
        problem = f"{name} names CPUs that this process may not use: {', '.join(map(str, unusable[:8]))}"
        raise ConfigError.because(name, problem, "its container or its parent binds it to others")
    _bind_memory(chosen)
    for thread in _THREADS.iterdir():
        _bind_thread(int(thread.name), usable)
    logger.info("bound to NUMA nodes %s, %d CPUs", ", ".join(map(str, chosen)), len(usable))


def device_nodes(system: Path) -> list[int]:
    """Return the NUMA nodes of the GPUs and TPUs of this host, ascending; only of those that CUDA_VISIBLE_DEVICES or
    TPU_VISIBLE_CHIPS lists by number, if the variable is set.

    system: the folder /sys. Raises ConfigError if there is none, the node of one is not known, or the variable lists
    anything else than numbers of these devices.
    """
    found: set[int] = set()
    for vendor, variable in _VENDORS.items():
        nodes = _pci_nodes(system, vendor)
        listed = os.environ.get(variable, "").replace(" ", "")
        if listed and nodes:
            numbers = [int(each) if each.isdigit() else -1 for each in listed.split(",")]
            if not all(0 <= number < len(nodes) for number in numbers):
                problem = f"numa_bind finds no device for {variable}={listed}"
                raise ConfigError.because("numa_bind", problem, "give numa_bind_nodes")
            nodes = [nodes[number] for number in numbers]
        found.update(nodes)
    if not found or min(found) < 0:
        problem = "numa_bind: no GPU or TPU is found whose NUMA node is known"
        raise ConfigError.because("numa_bind", problem, "give numa_bind_nodes")
    return sorted(found)


def _pci_nodes(system: Path, vendor: str) -> list[int]:
    """Return the NUMA node of each GPU or TPU of a vendor in the order of the PCI bus; -1 for a node that is not
    known.
    """
    nodes = []
    for device in sorted((system / "bus/pci/devices").glob("*")):
        if _line(device / "vendor") != vendor:
            continue
        if _line(device / "device") in _TPUS if vendor == _GOOGLE else _line(device / "class").startswith(_CLASSES):
            nodes.append(int(_line(device / "numa_node") or -1))
    return nodes


def _cpus_by_node(system: Path) -> dict[int, set[int]]:
    """Return the CPUs of each NUMA node; nodes with memory alone have none."""
    folders = (system / "devices/system/node").glob("node[0-9]*")
    listed = {int(folder.name.removeprefix("node")): _line(folder / "cpulist") for folder in folders}
    return {node: cpus_of(text) if text else set() for node, text in listed.items()}


def _line(path: Path) -> str:
    """Return the content of a file of one line; "" for a file that cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _bind_thread(thread: int, cpus: Iterable[int]) -> None:
    """Bind a thread of this process to CPUs; nothing happens to one that has ended. Raises ConfigError if the system
    refuses.
    """
    try:
        os.sched_setaffinity(thread, cpus)
    except ProcessLookupError:
        pass
    except OSError as error:
        raise ConfigError.because("numa_bind", f"numa_bind: {error}", "leave it out") from None


def _bind_memory(nodes: Sequence[int]) -> None:
    """Make this thread, and those that it starts, allocate memory on these nodes alone. Raises ConfigError for another
    processor than those of _SET_MEMPOLICY, and if the system refuses: containers without the capability SYS_NICE do,
    and all do for nodes without memory.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise ConfigError("numa_bind", True, f"False on {platform.machine()}")
    words = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than the number that it gets.
    if libc.syscall(number, _MPOL_BIND, words, ctypes.c_ulong(64 * len(words) + 1)):
        error = ctypes.get_errno()
        problem = f"numa_bind: memory cannot be bound: {os.strerror(error)}"
        advice = "containers need `--cap-add SYS_NICE`" if error == errno.EPERM else "give other numa_bind_nodes"
        raise ConfigError.because("numa_bind", problem, advice)
