"""Memory plan: how many KV pages fit into a device's memory after weights, loaded programs and their workspace.

On a CPU the engine shares memory with everything else. The pool is therefore sized by need, and the memory in use is
the process's anonymous memory, since pages of files can be dropped at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import mmap
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from jaxengine.config.engine_config import ConfigError, ResolvedConfig
from jaxengine.runner.base.card import card_bytes, usable
from jaxengine.scheduler.pages.groups import most_pages_of

_CARDS = ("gpu", "cuda")
# Folder with a tree of control groups, and the file of a group's limit, by the controllers that /proc/self/cgroup
# names: none in version 2.
_CGROUPS = {"": ("sys/fs/cgroup", "memory.max"), "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes")}

# Bytes of memory that a loaded executable takes for each byte of its file. XLA:CPU keeps its HLO both as objects and as
# a message, which take far more than its machine code: 21.4 bytes in forward passes with prompts, 22.1 in those
# without, 17.6 in samplers (jaxlib 0.10.2; `python -m benchmarks memory`).
_CPU_BYTES_PER_STORED = 22
# The interpreter, jax and a tokenizer; llvmlite and the machine code that it makes (`python -m benchmarks memory`).
# They are constants because the number of pages is part of what is compiled, and must be the same at every start.
_CPU_PROCESS_BYTES, _CPU_LLVMLITE_BYTES = 152 << 20, 26 << 20
# XLA runs a CPU's programs on one thread more than there are devices, in turn, if there are as many cores. Each has an
# arena of the C library, which keeps the blocks of the programs that ran there, but for those that glibc maps by
# themselves (DEFAULT_MMAP_THRESHOLD_MAX of malloc.c). A little more is Python's (`python -m benchmarks memory`).
_LEAST_MAPPED, _CPU_PYTHON_HEAP_BYTES = 32 << 20, 4 << 20
# MADV_DONTNEED of Linux, and the bytes from which an array has a mapping of its own in the C library.
_MADV_DONTNEED, _LEAST_GIVEN_BACK = 4, 64 << 20


class StageNeeds(NamedTuple):
    """Memory in bytes on a device that one stage needs in addition to weights and pages.

    Attributes:
      programs: bytes that all loaded programs hold as long as the engine lives.
      workspace: largest temporary memory of a running program, including the slot state.
      extensions: bytes that optional capabilities hold, by purpose.
      kept: bytes of a step's blocks that the C library keeps on a CPU (`kept_bytes`).
    """

    programs: int
    workspace: int
    extensions: Mapping[str, int] = MappingProxyType({})
    kept: int = 0

    @property
    def total(self) -> int:
        """Sum of programs, workspace and extensions, in bytes."""
        return self.programs + self.workspace + sum(self.extensions.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Plan of one device's memory: bytes by purpose, and the KV pool's capacity.

    Attributes:
      total: the device's memory.
      budget: the part of it that the engine may use.
      weights: bytes of the model's weights on this device.
      programs: bytes that all compiled programs hold.
      workspace: temporary memory of the largest compiled step, including the slot state.
      process: on a CPU, other memory of the process, such as the interpreter and its libraries; elsewhere 0.
      heap: on a CPU, memory between the blocks of steps that run, which the C library keeps for the next; elsewhere 0.
      page_bytes: bytes of a page. page_size: tokens of a page. num_pages: pages of the pool.
      pages_per_seq: the most pages that a request of max_model_len tokens holds at once, over all cache groups.
      max_model_len: that of the configuration.
      by_need: whether the pool is only as large as default requests need, although the budget has room for more.
      extensions: bytes that optional capabilities hold, by purpose.
      most_page_bytes: bytes of a page in the pipeline stage where it is largest; None if that is this one.
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
    most_page_bytes: int | None = None
    heap: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pool's pages."""
        return self.num_pages * self.page_bytes

    @property
    def parts(self) -> dict[str, int]:
        """Bytes that the engine will hold on one device by purpose: "weights", "programs", "kv_pages", "workspace",
        "process", "heap" and those of extensions.
        """
        return {
            "weights": self.weights,
            "programs": self.programs,
            "kv_pages": self.kv_bytes,
            **self.extensions,
            "workspace": self.workspace,
            "process": self.process,
            "heap": self.heap,
        }

    @property
    def planned(self) -> int:
        """Bytes that the engine will hold on one device: the sum of `parts`."""
        return sum(self.parts.values())

    @property
    def num_requests(self) -> float:
        """Number of requests of max_model_len tokens for which the pool has room at once; not rounded."""
        return self.num_pages / self.pages_per_seq

    def table(self) -> str:
        """Return the plan as text of several lines: MiB by purpose, the number of pages and of longest requests that
        fit, the kv_cache_memory_bytes that give as many pages, and a note if the pool is sized by need.
        """
        rows = [
            ("weights", self.weights),
            ("programs", self.programs),
            ("KV pages", self.kv_bytes),
            *self.extensions.items(),
            ("workspace", self.workspace),
            *((name, size) for name, size in (("process", self.process), ("heap", self.heap)) if size),
            ("free of budget", max(0, self.budget - self.planned)),
            ("budget", self.budget),
            ("device", self.total),
        ]
        lines = [f"  {name:<15}{size / 2**20:>10,.1f} MiB" for name, size in rows]
        lines.append(
            f"  {self.num_pages:,} pages of {self.page_size} tokens; "
            f"{self.num_requests:.1f} requests of {self.max_model_len:,} tokens at once"
        )
        if pool := self.num_pages * (self.page_bytes if self.most_page_bytes is None else self.most_page_bytes):
            lines.append(f"  kv_cache_memory_bytes={pool} gives the pool this size without measuring")
        if self.by_need:
            lines.append("  sized by need; kv_cache_memory_bytes or gpu_memory_utilization make it larger")
        return "\n".join(lines)


def device_memory(device: Any) -> int:
    """Return a device's memory in bytes: all of a CUDA card; of a TPU, what its runtime may use; for a CPU,
    `host_memory`.
    """
    if device.platform in _CARDS:
        return card_bytes(device.memory_stats()["bytes_limit"])
    return host_memory() if device.platform == "cpu" else device.memory_stats()["bytes_limit"]


def host_memory(root: Path = Path("/")) -> int:
    """Return the host's memory in bytes, or the lowest limit of the process's control group and those that contain it.

    root: folder with `proc` and `sys`. Limits that a container does not show do not count.
    """
    total = next(
        int(line.split()[1]) * 1024
        for line in (root / "proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    return min([total, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the limits in bytes of the process's control group and of those that contain it, in both versions of
    control groups, without those that are unlimited or cannot be read. root: as in `host_memory`.
    """
    paths = {"": "/", "memory": "/"}  # without a group of its own, a process is in the root
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= {each: path for each in controllers.split(",") if each in paths}
    for controller, path in paths.items():
        folder, name = _CGROUPS[controller]
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            with contextlib.suppress(OSError):
                if (limit := (root / folder / group / name).read_text().strip()).isdigit():
                    yield int(limit)


def device_limit(device: Any) -> int | None:
    """Return the bytes of a CUDA card that jax's client may use; None for other devices, which have no such limit."""
    return device.memory_stats()["bytes_limit"] if device.platform in _CARDS else None


def memory_in_use(device: Any) -> int:
    """Return the bytes of a device's memory that are in use; for a CPU, the process's anonymous memory (RssAnon)."""
    if device.platform != "cpu":
        return device.memory_stats()["bytes_in_use"]
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))


def return_free_memory() -> None:
    """Collect garbage and return the process's freed memory to the system. Compilation leaves hundreds of MiB in the C
    library's free lists.
    """
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Return the C library's free memory to the system. Do nothing if the library has no malloc_trim (not glibc)."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def give_back_zeros(array: Any) -> None:
    """Return the memory of an array of zeros on a CPU to the system, which gives zeros again, page by page, as they are
    first read or written. A large pool then takes only what has been used of it. Do nothing on other devices, and on
    systems other than Linux, where such memory may not read as zeros.

    array: a jax.Array that has been computed, in memory of its own, with nothing but zeros.
    """
    if not sys.platform.startswith("linux"):
        return
    for first, size in whole_pages(array):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_DONTNEED)


def whole_pages(array: Any) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of the whole pages of memory within each part of an array on this process's CPU devices;
    nothing for other devices, small parts, and arrays that are only described.
    """
    if not isinstance(array, jax.Array):
        return
    # Looked at before the parts, which become arrays of their own when they are asked for.
    if math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize < _LEAST_GIVEN_BACK:
        return
    for part in array.addressable_shards:
        if part.device.platform == "cpu":
            begin = part.data.unsafe_buffer_pointer()
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            yield first, (begin + part.data.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE


def workspace_bytes(analysis: Any) -> int:
    """Return the bytes that a compiled program needs while it runs, without its arguments: temporaries, and results
    that do not take donated memory. analysis: its `memory_analysis()`.
    """
    return analysis.temp_size_in_bytes + max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)


def kept_bytes(workspace: int, results: int = 0, num_blocks: int = 1) -> int:
    """Return the bytes of a program's blocks that the C library keeps after the program has run on a CPU: its results
    alone if its other blocks have _LEAST_MAPPED bytes or more, which go back to the system. workspace: as from
    `workspace_bytes`; results: bytes of the results among it; the rest is `num_blocks` equal blocks.
    """
    return workspace if workspace - results < num_blocks * _LEAST_MAPPED else results


def kept_of_step(forward: int, epilogue: int, num_blocks: int) -> int:
    """Return the bytes of a step's blocks that the C library keeps on one thread of a CPU. forward, epilogue:
    `kept_bytes` of both. num_blocks: number of blocks of the forward pass. The epilogue reuses the memory of a single
    block; of a chain's smaller blocks it finds enough about every other time.
    """
    return max(forward, epilogue) + (min(forward, epilogue) // 2 if num_blocks > 1 else 0)


def num_cores() -> int:
    """Return the number of cores that this process may use; on a system that does not say, all that it has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def heap_bytes(kept: int, devices: int) -> int:
    """Return the bytes of one of a process's CPU devices that the C library keeps between the blocks of steps that run:
    its share of Python's heap and, with more cores than devices, of what steps before left on the thread that waits. 0
    for no devices.

    kept: `kept_of_step` of a device's largest step. devices: number of CPU devices.
    """
    if not devices:
        return 0
    cores = num_cores()
    return ((kept if cores > devices else 0) + _CPU_PYTHON_HEAP_BYTES) // devices


def process_bytes() -> int:
    """Return the bytes that a process takes on a CPU besides weights, programs and pages, a constant of this machine:
    more if llvmlite is installed on x86-64.
    """
    builds = find_spec("llvmlite") is not None and platform.machine() in ("x86_64", "AMD64")
    return _CPU_PROCESS_BYTES + (_CPU_LLVMLITE_BYTES if builds else 0)


def held_bytes(code: int, stored: int, backend: str) -> int:
    """Return the bytes of device memory that a loaded program holds.

    code: size of its machine code, from `memory_analysis()`. stored: size of its file. backend: as
    `jax.default_backend` names it. On CPUs the result is a multiple of `stored`; elsewhere it is `code`, or `stored` if
    `code` is 0.
    """
    return _CPU_BYTES_PER_STORED * stored if backend == "cpu" else code or stored


class TooLong(ConfigError):
    """Error for a max_model_len for which too few pages fit.

    Attributes:
      fits: the most tokens that a request can have with the pages that fit.
    """

    def __init__(self, fits: int, max_model_len: int, allowed: str):
        super().__init__("max_model_len", max_model_len, allowed)
        self.fits = fits


class StageSizes(NamedTuple):
    """Sizes in bytes, on one device of a stage, that are known before the memory plan is made.

    Attributes:
      total: the device's memory.
      weights: bytes of the weights, including those of extensions.
      page_bytes: bytes of one page, including what extensions hold for it.
      limit: bytes of the device that jax's client may use; None for all.
    """

    total: int
    weights: int
    page_bytes: int
    limit: int | None = None


def plan_stages(
    config: ResolvedConfig,
    stages: Sequence[StageSizes],
    needs: Sequence[StageNeeds],
    *,
    windows: tuple[int | None, ...],
    shared: int,
) -> MemoryPlan:
    """Return the plan of the stage that has room for the fewest pages.

    stages, needs: sizes and memory needs of each stage. windows, shared: see `plan_memory`, whose errors are raised.
    """
    plans = [
        plan_memory(config, **sizes._asdict(), needs=needed, windows=windows, shared=shared)
        for sizes, needed in zip(stages, needs, strict=True)
    ]
    most = max(plan.page_bytes for plan in plans)
    return replace(min(plans, key=lambda plan: plan.num_pages), most_page_bytes=most)


def budget_of(config: ResolvedConfig, total: int, limit: int | None = None) -> int:
    """Return the bytes of a device that an engine may plan to use: the share gpu_memory_utilization of `total`, rounded
    down, but no more than is `usable` of `limit`.

    total: the device's memory. limit: bytes of it that jax's client may use; None for all.
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

    The pool has the size that the config fixes (num_gpu_blocks_override, kv_cache_memory_bytes). Otherwise it has as
    many pages as fit into the share gpu_memory_utilization of the device, but no more than twice those that all slots
    can fill: the rest is prefix cache. With `default_seq_tokens`, as many as all slots fill at that length, and at
    least those of two requests of max_model_len, are enough; if requests end at once, those of max_in_flight + 1 steps.

    Args:
      total, weights, page_bytes, limit: see StageSizes.
      needs: memory that is needed in addition to weights and pages.
      windows: windows of the cache groups, whose pages all have `page_bytes`.
      shared: number of devices that share this host's memory; 0 if devices have their own memory.

    Raises:
      ConfigError: not a single page fits; the message says what can be changed. If pages fit, but too few for
        max_model_len, it is a TooLong.
    """
    limits = config.scheduler_config(1, windows=windows)
    pages_per_seq = most_pages_of(limits, config.max_model_len)
    process, heap = (process_bytes() // shared if shared else 0), heap_bytes(needs.kept, shared)
    budget = budget_of(config, total, limit)
    by_need = False
    if config.num_gpu_blocks_override is not None:
        num_pages = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        num_pages = config.kv_cache_memory_bytes // max(1, page_bytes)
    else:
        # Pages beyond those that all slots can fill only serve as prefix cache, for which as many again are enough.
        needed = 2 * pages_per_seq * config.max_num_seqs
        if config.default_seq_tokens is not None:
            of_default = most_pages_of(limits, min(config.default_seq_tokens, config.max_model_len))
            needed = max(min(2, config.max_num_seqs) * pages_per_seq, config.max_num_seqs * of_default)
        if config.ends_at_once:  # pages are free again after a step
            of_step = config.max_num_batched_tokens // config.block_size + config.max_num_seqs
            needed = max(pages_per_seq, (config.max_in_flight + 1) * of_step)
        fitting = (budget - weights - needs.total - process - heap) // max(1, page_bytes)
        num_pages = min(fitting, needed)
        by_need = (config.ends_at_once or config.default_seq_tokens is not None) and needed < fitting
    if num_pages < 1:
        raise _no_room(config, budget, weights + process + heap, needs)
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
        heap=heap,
    )


def longest_fit(config: ResolvedConfig, num_pages: int, windows: tuple[int | None, ...], most: int) -> int:
    """Return the number of tokens of the longest sequence for which `num_pages` pages suffice, at most `most`. Below
    `most` it is a multiple of the page size, possibly 0. windows: windows of the cache groups.
    """
    limits = config.scheduler_config(1, windows=windows)
    if most_pages_of(limits, most) <= num_pages:
        return most
    fits, fails = 0, -(-most // config.block_size)  # in columns; bisect, as more columns never take fewer pages
    while fits + 1 < fails:
        middle = (fits + fails) // 2
        if most_pages_of(limits, middle * config.block_size) <= num_pages:
            fits = middle
        else:
            fails = middle
    return fits * config.block_size


def _no_room(config: ResolvedConfig, budget: int, weights: int, needs: StageNeeds) -> ConfigError:
    """Return a ConfigError, for the caller to raise, about a device without room for a single page, with the budget,
    what takes it by purpose, and the options to change. weights: bytes of weights and of the process with its heap.
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
