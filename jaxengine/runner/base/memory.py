"""Number of KV pages that fit: device memory as measured, less weights, loaded programs and their workspace.

On a CPU the engine shares memory with everything else, so the pool is sized by need there, and the process's anonymous
memory counts (pages of files can be dropped at any time).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxengine.config.engine_config import ConfigError, ResolvedConfig
from jaxengine.runner.base.card import card_bytes, usable
from jaxengine.scheduler.pages.groups import most_pages_of

_CARDS = ("gpu", "cuda")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

# XLA:CPU keeps the HLO of a loaded executable as objects and once more as a message, far more than its machine code:
# for each byte of its file 21.4 in forward passes with prompts, 22.1 in those without, 17.6 in samplers (jaxlib 0.10.2;
# `python -m benchmarks memory`).
_CPU_BYTES_PER_STORED = 22
# The interpreter, jax, a tokenizer: 200 MiB where it was measured. A constant, because the number of pages is a part of
# what is compiled and must be the same at every start.
_CPU_PROCESS_BYTES = 256 << 20


class StageNeeds(NamedTuple):
    """Memory of one stage's programs on a device, besides weights and pages, in bytes.

    Attributes:
      programs: held by all loaded programs, as long as the engine lives.
      workspace: largest temporary memory of a running program, state of the slots included.
      extensions: held by optional capabilities, by purpose.
    """

    programs: int
    workspace: int
    extensions: Mapping[str, int] = MappingProxyType({})

    @property
    def total(self) -> int:
        """Sum of programs, workspace and extensions, in bytes."""
        return self.programs + self.workspace + sum(self.extensions.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Plan of one device's memory: bytes by purpose, and the KV pool's capacity.

    Attributes:
      total: the device's memory.
      budget: the share of it that the engine may use.
      weights: the model's on this device.
      programs: held by all compiled programs.
      workspace: the largest compiled step's temporary memory, slot state included.
      process: on a CPU, other memory of the process, such as the interpreter and its libraries; else 0.
      page_bytes: of one page; page_size: its tokens; num_pages: in the pool.
      pages_per_seq: the most pages that a request of max_model_len tokens holds at once, over all cache groups.
      by_need: the pool is as large as default requests need, although the budget has room for more.
      extensions: held by optional capabilities, by purpose.
    """

    total: int
    budget: int
    weights: int
    programs: int
    workspace: int
    process: int
    page_bytes: int
    page_size: int
    num_pages: int
    pages_per_seq: int
    max_model_len: int
    by_need: bool
    extensions: Mapping[str, int] = field(default_factory=dict)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pool's pages."""
        return self.num_pages * self.page_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Bytes that the engine will hold of one device by purpose, those of extensions included; their sum is
        `planned`.
        """
        return {
            "weights": self.weights,
            "programs": self.programs,
            "kv_pages": self.kv_bytes,
            **self.extensions,
            "workspace": self.workspace,
            "process": self.process,
        }

    @property
    def planned(self) -> int:
        """Bytes of one device that the engine will hold: the sum of `parts`."""
        return sum(self.parts.values())

    @property
    def num_requests(self) -> float:
        """Number of requests of max_model_len tokens that the pool holds at once, as a fraction."""
        return self.num_pages / self.pages_per_seq

    def table(self) -> str:
        """Return the plan as text of several lines, for people: MiB by purpose, then pages and how many longest
        requests fit, and a note if the pool is sized by need.
        """
        rows = [
            ("weights", self.weights),
            ("programs", self.programs),
            ("KV pages", self.kv_bytes),
            *self.extensions.items(),
            ("workspace", self.workspace),
            *([("process", self.process)] if self.process else []),
            ("free of budget", max(0, self.budget - self.planned)),
            ("budget", self.budget),
            ("device", self.total),
        ]
        lines = [f"  {name:<15}{size / 2**20:>10,.1f} MiB" for name, size in rows]
        lines.append(
            f"  {self.num_pages:,} pages of {self.page_size} tokens; "
            f"{self.num_requests:.1f} requests of {self.max_model_len:,} tokens at once"
        )
        if self.by_need:
            lines.append("  sized by need; kv_cache_memory_bytes or gpu_memory_utilization make it larger")
        return "\n".join(lines)


def device_memory(device: Any) -> int:
    """Return a device's bytes of memory: all of a CUDA card, the part of a TPU that its runtime may use, the host's
    memory for a CPU, or the control group's limit if that is lower.
    """
    if device.platform in _CARDS:
        return card_bytes(device.memory_stats()["bytes_limit"])
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


def device_limit(device: Any) -> int | None:
    """Return the bytes of a CUDA card that jax's client has; None for other devices, whose client has no such limit."""
    return device.memory_stats()["bytes_limit"] if device.platform in _CARDS else None


def memory_in_use(device: Any) -> int:
    """Return the bytes of a device's memory in use now; for a CPU the process's anonymous memory (RssAnon)."""
    if device.platform != "cpu":
        return device.memory_stats()["bytes_in_use"]
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))


def return_free_memory() -> None:
    """Collect garbage, and return freed memory of this process to the system: compiling leaves hundreds of MiB in the C
    library's free lists.
    """
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Return the C library's free memory of this process to the system; does nothing if it has no malloc_trim (not
    glibc).
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def workspace_bytes(analysis: Any) -> int:
    """Return the bytes that a compiled program needs, besides its arguments, while it runs: temporaries, and results
    without donated memory. analysis: its `memory_analysis()`.
    """
    return analysis.temp_size_in_bytes + max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)


def held_bytes(code: int, stored: int, backend: str) -> int:
    """Return the bytes of device memory that a loaded program holds. backend: as `jax.default_backend` names it.

    code: machine code size from its `memory_analysis()`; stored: size of its file. On CPUs the result is a multiple of
    `stored`; elsewhere it is `code`, or `stored` if `code` is 0.
    """
    return _CPU_BYTES_PER_STORED * stored if backend == "cpu" else code or stored


class TooLong(ConfigError):
    """Error of a max_model_len for which too few pages fit.

    Attributes:
      fits: the most tokens that a request can have with these pages.
    """

    def __init__(self, fits: int, max_model_len: int, allowed: str):
        super().__init__("max_model_len", max_model_len, allowed)
        self.fits = fits


class StageSizes(NamedTuple):
    """Bytes on one device of a stage that are known before the memory plan."""

    total: int  # the device's memory
    weights: int  # those of extensions included
    page_bytes: int  # of one page, extensions' bytes for it included
    limit: int | None = None  # bytes that jax's client has of the device; None if it has all


def plan_stages(
    config: ResolvedConfig,
    stages: Sequence[StageSizes],
    needs: Sequence[StageNeeds],
    *,
    windows: tuple[int | None, ...],
    shared: int,
) -> MemoryPlan:
    """Return the plan of the stage with the fewest pages.

    stages, needs: of each stage. windows, shared: arguments of `plan_memory`, whose errors this raises.
    """
    plans = [
        plan_memory(config, **sizes._asdict(), needs=own, windows=windows, shared=shared)
        for sizes, own in zip(stages, needs, strict=True)
    ]
    return min(plans, key=lambda plan: plan.num_pages)


def budget_of(config: ResolvedConfig, total: int, limit: int | None = None) -> int:
    """Return the bytes of a device that an engine may plan for: the share gpu_memory_utilization of `total`, the
    device's bytes, and no more than what is usable of `limit`, the bytes that jax's client has (None: no limit).
    """
    budget = int(total * config.gpu_memory_utilization)
    return budget if limit is None else min(budget, usable(limit))


def plan_memory(
    config: ResolvedConfig,
    *,
    total: int,
    weights: int,
    needs: StageNeeds,
    page_bytes: int,
    limit: int | None = None,
    windows: tuple[int | None, ...] = (None,),
    shared: int = 0,
) -> MemoryPlan:
    """Return the memory plan of one device, with the size of its KV pool.

    The pool has the size that the config fixes (num_gpu_blocks_override, kv_cache_memory_bytes), else the pages that
    fit into gpu_memory_utilization of the device, but no more than requests can use.

    Args:
      total, weights, page_bytes: bytes of one device: its memory, the weights, and a page.
      needs: bytes of one device besides these.
      limit: bytes of a device that jax's client has; None if it has all.
      windows: of the cache groups, whose pages all have `page_bytes`.
      shared: number of devices that share this host's memory; 0 if devices have memories of their own.

    Raises:
      ConfigError: not a single page fits; the message advises what to change. TooLong, a ConfigError: pages fit, but
        too few for max_model_len.
    """
    limits = config.scheduler_config(1, windows=windows)
    pages_per_seq = most_pages_of(limits, config.max_model_len)
    process = _CPU_PROCESS_BYTES // shared if shared else 0
    budget = budget_of(config, total, limit)
    by_need = False
    if config.num_gpu_blocks_override is not None:
        num_pages = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        num_pages = config.kv_cache_memory_bytes // max(1, page_bytes)
    else:
        # More pages than all slots can fill serve only as prefix cache: twice as many are enough.
        needed = 2 * pages_per_seq * config.max_num_seqs
        if config.default_seq_tokens is not None:
            of_default = most_pages_of(limits, min(config.default_seq_tokens, config.max_model_len))
            needed = max(min(2, config.max_num_seqs) * pages_per_seq, config.max_num_seqs * of_default)
        if config.ends_at_once:  # pages are free again after a step
            of_step = config.max_num_batched_tokens // config.block_size + config.max_num_seqs
            needed = max(pages_per_seq, (config.max_in_flight + 1) * of_step)
        fitting = (budget - weights - needs.total - process) // max(1, page_bytes)
        num_pages = min(fitting, needed)
        by_need = (config.ends_at_once or config.default_seq_tokens is not None) and needed < fitting
    if num_pages < 1:
        raise _no_room(config, budget, weights + process, needs)
    if num_pages < pages_per_seq:
        fits = longest_fit(config, num_pages, windows, config.max_model_len)
        others = [f"{purpose} take {size / (1 << 30):.1f} GiB" for purpose, size in needs.extensions.items() if size]
        of_others = f"; {', '.join(others)}, less with a lower max_num_seqs" if others else ""
        raise TooLong(
            fits,
            config.max_model_len,
            f"at most {fits} with the {num_pages} KV pages that fit; lower max_model_len, or raise "
            f"gpu_memory_utilization ({config.gpu_memory_utilization}) or kv_cache_memory_bytes{of_others}",
        )
    return MemoryPlan(
        total=total,
        budget=budget,
        weights=weights,
        programs=needs.programs,
        workspace=needs.workspace,
        process=process,
        page_bytes=page_bytes,
        page_size=config.block_size,
        num_pages=num_pages,
        pages_per_seq=pages_per_seq,
        max_model_len=config.max_model_len,
        by_need=by_need,
        extensions=needs.extensions,
    )


def longest_fit(config: ResolvedConfig, num_pages: int, windows: tuple[int | None, ...], most: int) -> int:
    """Return the tokens of the longest sequence that num_pages pages hold: `most` if it fits, else the largest number
    of whole pages, in tokens; 0 if none. windows: of the cache groups.
    """
    limits = config.scheduler_config(1, windows=windows)
    if most_pages_of(limits, most) <= num_pages:
        return most
    fits, fails = 0, -(-most // config.block_size)  # columns; more never take fewer pages
    while fits + 1 < fails:
        middle = (fits + fails) // 2
        if most_pages_of(limits, middle * config.block_size) <= num_pages:
            fits = middle
        else:
            fails = middle
    return fits * config.block_size


def _no_room(config: ResolvedConfig, budget: int, weights: int, needs: StageNeeds) -> ConfigError:
    """Return a ConfigError, which the caller raises, for a device without room for a single page. weights: bytes of
    weights and of the process.
    """
    gib = 1 << 30
    held = {"weights": weights, "programs and what they need": needs.programs + needs.workspace, **needs.extensions}
    listed = ", ".join(f"{purpose} {size / gib:.2f} GiB" for purpose, size in held.items() if size)
    problem = f"no KV page fits: of {budget / gib:.2f} GiB that the engine may use of a device, it needs {listed}"
    advice = (
        f"use more devices (tensor_parallel_size, now {config.tensor_parallel_size}, or pipeline_parallel_size), fewer "
        "bits (quantization), a lower max_num_seqs or max_num_batched_tokens, or raise gpu_memory_utilization "
        f"({config.gpu_memory_utilization})"
    )
    return ConfigError.because("gpu_memory_utilization", problem, advice)
