"""How many pages fit: the device's memory as measured, less the weights and the compiled steps' workspace."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxengine.config.engine_config import ConfigError, ResolvedConfig

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, and what the KV pool holds.

    Attributes:
      total: the device's memory.
      budget: the share of it that the engine may use.
      workspace: the largest compiled step's temporary memory, slot state included.
      pages_per_seq: the most that a request of max_model_len tokens holds at once, over all cache groups.
    """

    total: int
    budget: int
    weights: int
    workspace: int
    page_bytes: int
    page_size: int
    num_pages: int
    pages_per_seq: int
    max_model_len: int

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def num_requests(self) -> float:
        """Requests of max_model_len tokens that the pool holds at once."""
        return self.num_pages / self.pages_per_seq

    def table(self) -> str:
        """The plan for a person to read."""
        rows = [
            ("weights", self.weights),
            ("KV pages", self.kv_bytes),
            ("workspace", self.workspace),
            ("free of budget", max(0, self.budget - self.weights - self.kv_bytes - self.workspace)),
            ("budget", self.budget),
            ("device", self.total),
        ]
        lines = [f"  {name:<15}{size / 2**20:>10,.1f} MiB" for name, size in rows]
        lines.append(
            f"  {self.num_pages:,} pages of {self.page_size} tokens; "
            f"{self.num_requests:.1f} requests of {self.max_model_len:,} tokens at once"
        )
        return "\n".join(lines)


def device_memory(device: Any) -> int:
    """Bytes of memory of a device; of the host, or its control group, for a CPU."""
    if device.platform != "cpu":
        return device.memory_stats()["bytes_limit"]
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    for path in map(Path, _CGROUP_LIMITS):
        if path.exists() and (limit := path.read_text().strip()).isdigit():
            total = min(total, int(limit))
    return total


def memory_in_use(device: Any) -> int:
    """Bytes of a device's memory in use now; what this process holds for a CPU."""
    if device.platform != "cpu":
        return device.memory_stats()["bytes_in_use"]
    resident = Path("/proc/self/statm").read_text().split()[1]
    return int(resident) * resource.getpagesize()


def workspace_bytes(analysis: Any) -> int:
    """What a compiled program needs beside its arguments, by its `memory_analysis()`: scratch, results, code."""
    outputs = max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    return analysis.temp_size_in_bytes + outputs + analysis.generated_code_size_in_bytes


def plan_memory(
    config: ResolvedConfig,
    *,
    total: int,
    weights: int,
    workspace: int,
    page_bytes: int,
    windows: tuple[int | None, ...] = (None,),
) -> MemoryPlan:
    """Sizes the KV pool. windows: of the cache groups, whose pages are all `page_bytes` large.

    Raises:
      ConfigError: not even one request of max_model_len fits; says what to change.
    """
    pages_per_seq = config.scheduler_config(1, windows=windows).most_pages(config.max_model_len)
    # More pages than all slots can fill would never be used but as cache: twice is plenty.
    useful = 2 * pages_per_seq * config.max_num_seqs
    budget = int(total * config.gpu_memory_utilization)
    if config.num_gpu_blocks_override is not None:
        num_pages = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        num_pages = config.kv_cache_memory_bytes // page_bytes
    else:
        num_pages = min((budget - weights - workspace) // page_bytes, useful)
    if num_pages < pages_per_seq:
        fits = _longest_fit(config, max(0, num_pages), windows)
        raise ConfigError(
            "max_model_len",
            config.max_model_len,
            f"at most {fits} with the {max(0, num_pages)} KV pages that fit; lower max_model_len, or raise "
            f"gpu_memory_utilization ({config.gpu_memory_utilization}) or kv_cache_memory_bytes",
        )
    return MemoryPlan(
        total=total,
        budget=budget,
        weights=weights,
        workspace=workspace,
        page_bytes=page_bytes,
        page_size=config.block_size,
        num_pages=num_pages,
        pages_per_seq=pages_per_seq,
        max_model_len=config.max_model_len,
    )


def _longest_fit(config: ResolvedConfig, num_pages: int, windows: tuple[int | None, ...]) -> int:
    """The tokens of the longest sequence that so many pages hold, in whole pages and less than max_model_len."""
    limits, columns = config.scheduler_config(1, windows=windows), 0
    while limits.most_pages((columns + 1) * config.block_size) <= num_pages:
        columns += 1
    return columns * config.block_size
