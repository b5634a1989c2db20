"""Options about where an engine's work runs: attention kernels, CPU cores of its process, devices of a sequence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.values import plain
from jaxengine.sharding.layout import MeshLayout

PALLAS, PLAIN = "PALLAS", "XLA"
ATTENTION_BACKENDS = ("auto", PALLAS, PLAIN)
# Nodes and CPUs that Linux may have.
_MAX_NODE, _MAX_CPU = 1023, 8191
_RANGES = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """The fields of EngineConfig about where its work runs.

    Attributes:
      attention_backend: "PALLAS" for the platform's attention kernels, "XLA" for attention in plain XLA, "auto" for
        kernels where the platform has them. A kernel that fails its proof (kernel_proof) is replaced by XLA.
      decode_context_parallel_size: devices that share the keys and values of a KV head. The number follows from
        tensor_parallel_size: 1 accepts whatever follows, and any other value must equal it.
      numa_bind: bind the engine's process, its threads and the memory that they allocate, to the NUMA nodes of its GPUs
        or TPUs. Linux only.
      numa_bind_nodes: the nodes, instead of those of the devices; as in vLLM, one for each device.
      numa_bind_cpus: the CPUs, such as "0-3" or "16-31,48-63", instead of all of the nodes'.
    """

    attention_backend: str = "auto"
    decode_context_parallel_size: int = 1
    numa_bind: bool = False
    numa_bind_nodes: tuple[int, ...] | None = field(default=None, metadata={"nargs": "+"})
    numa_bind_cpus: tuple[str, ...] | None = field(default=None, metadata={"nargs": "+"})


def read_attention_backend(value: Any) -> str:
    """Return attention_backend in upper case, or "auto". Raises ConfigError for other values."""
    found = {name.lower(): name for name in ATTENTION_BACKENDS}.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        raise ConfigError("attention_backend", value, ", ".join(ATTENTION_BACKENDS))
    return found


def with_attention_config(options: dict[str, Any]) -> dict[str, Any]:
    """Return options by name, in which vLLM's attention_config that has nothing but a `backend` is attention_backend.
    Raises ConfigError if both are given.
    """
    config = options.get("attention_config")
    if not isinstance(config, Mapping) or set(config) != {"backend"}:
        return options
    kept = {name: value for name, value in options.items() if name != "attention_config"}
    if config["backend"] is None:
        return kept
    if kept.get("attention_backend") is not None:
        problem = f"attention_config.backend is {config['backend']!r}, attention_backend {kept['attention_backend']!r}"
        raise ConfigError.because("attention_config", problem, "give one of them")
    return {**kept, "attention_backend": config["backend"]}


def read_numa_nodes(value: Any) -> tuple[int, ...]:
    """Return numa_bind_nodes as a tuple. value: a list of ints from 0 to _MAX_NODE or their digits, or one of them.
    Raises ConfigError for other values and for an empty list.
    """
    given = value if isinstance(value, (list, tuple)) else [value]
    nodes = [int(each) if isinstance(each, str) and re.fullmatch(r"\d{1,4}", each) else plain(each) for each in given]
    if not nodes or not all(type(node) is int and 0 <= node <= _MAX_NODE for node in nodes):
        raise ConfigError("numa_bind_nodes", value, f"a list of NUMA nodes, 0 to {_MAX_NODE}")
    return tuple(nodes)


def read_numa_cpus(value: Any) -> tuple[str, ...]:
    """Return numa_bind_cpus as a tuple of lists of CPUs. value: a list of such texts, or one. Raises ConfigError for
    other values, for an empty list and for descending ranges.
    """
    given = value if isinstance(value, (list, tuple)) else [value]
    try:
        if not given or not all(isinstance(each, str) for each in given):
            raise ValueError
        for each in given:
            cpus_of(each)
    except ValueError:
        raise ConfigError("numa_bind_cpus", value, 'lists of CPUs such as "0-3" or "16-31,48-63"') from None
    return tuple(given)


def cpus_of(text: str) -> set[int]:
    """Return the CPUs of a list in Linux' form, such as "0-3,8". Raises ValueError for another form, for a descending
    range, and for numbers above 8,191.
    """
    if not _RANGES.fullmatch(text):
        raise ValueError(f"{text!r} is no list of CPUs")
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not low <= high <= _MAX_CPU:
            raise ValueError(f"{part!r} is no range of CPUs")
        found.update(range(low, high + 1))
    return found


def check_placement(config: Any) -> None:
    """Raise ConfigError for numa_bind_nodes or numa_bind_cpus without numa_bind. config: an EngineConfig."""
    for name in ("numa_bind_nodes", "numa_bind_cpus"):
        if getattr(config, name) is not None and not config.numa_bind:
            raise ConfigError.because(name, f"{name} is given without numa_bind", "give numa_bind, too")


def checked_mesh(mesh: MeshLayout, size: int) -> MeshLayout:
    """Return the mesh. Raises ConfigError unless decode_context_parallel_size, `size`, is 1 or the number of devices
    over which tensor parallelism splits the sequences of a KV head.
    """
    if size not in (1, mesh.attn):
        why = "so many devices share the sequences of a KV head, which follows from tensor_parallel_size"
        allowed = f"1 or {mesh.attn}: {why}" if mesh.attn > 1 else f"1: {why}"
        raise ConfigError("decode_context_parallel_size", size, allowed)
    return mesh


# Readers of the fields of PlacementOptions that are not numbers or switches.
PLACEMENT_READERS = {
    "attention_backend": read_attention_backend,
    "numa_bind_nodes": read_numa_nodes,
    "numa_bind_cpus": read_numa_cpus,
}
