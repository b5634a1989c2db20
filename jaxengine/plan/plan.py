"""The memory of one way to split a model over chips: planned by the functions that plan it when an engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Protocol

from jaxengine.config.base.lengths import AUTO_LENGTH
from jaxengine.config.base.platforms import PLATFORMS, Platform
from jaxengine.config.engine_config import ConfigError, ResolvedConfig
from jaxengine.models.cache import platform_of
from jaxengine.models.params.errors import ModelFileError
from jaxengine.plan.chips import Chip, Chips
from jaxengine.plan.estimate import estimated_needs
from jaxengine.plan.model import PlannedModel
from jaxengine.runner.base.card import client_share
from jaxengine.runner.base.memory import (
    MemoryPlan,
    StageNeeds,
    TooLong,
    budget_of,
    device_memory,
    longest_fit,
    plan_stages,
)
from jaxengine.runner.start.devices import SplitStage, split_stages
from jaxengine.runner.start.memory_bar import LEFT
from jaxengine.runner.start.stage_arrays import SLOTS_AND_SAMPLING, StageArrays, abstract_mesh
from jaxengine.scheduler.pages.groups import most_pages_of
from jaxengine.sharding.layout import MeshLayout

# The options of a split.
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
# Purposes of a plan's memory that are not arrays.
PROGRAMS, TEMPORARIES, PROCESS, HEAP = "programs", "temporaries", "process", "heap"


@dataclass(frozen=True)
class Split:
    """Split of a model over devices: tensor, pipeline and data parallel sizes, and whether expert parallelism is on."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    experts: bool = False

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.tensor * self.pipeline * self.data

    @property
    def options(self) -> dict[str, int | bool]:
        """Engine options of this split by name: the three parallel sizes and enable_expert_parallel."""
        sizes = {"tensor_parallel_size": self.tensor, "pipeline_parallel_size": self.pipeline}
        return {**sizes, "data_parallel_size": self.data, "enable_expert_parallel": self.experts}

    @property
    def flags(self) -> str:
        """Flags of the command line that request this split, without sizes of 1; "" for one device."""
        sizes = (("-tp", self.tensor), ("-pp", self.pipeline), ("-dp", self.data))
        return " ".join([*(f"{flag} {size}" for flag, size in sizes if size > 1), *(["-ep"] if self.experts else [])])


class CompiledNeeds(Protocol):
    """Source of the memory that programs take of a device, as their compiler reports it."""

    def meshes(self, layout: MeshLayout, split: Split) -> Sequence[Any]:
        """Return the mesh of each pipeline stage. layout: mesh layout of one stage; split: has the number of stages."""
        ...

    def needs(self, stages: Sequence[SplitStage], config: ResolvedConfig) -> list[StageNeeds]:
        """Return the memory that the programs of each stage take, under the resolved config. Raises ConfigError if they
        cannot be compiled.
        """
        ...


@dataclass(frozen=True)
class SplitPlan:
    """Plan of a model on chips, split in one way.

    Attributes:
      chips, split: the devices and the split that were planned.
      layout: mesh of one stage.
      config: the engine's, resolved.
      stages: arrays of each pipeline stage.
      needs: memory that the programs of each stage take.
      estimated: `needs` were estimated, not compiled.
      memory: the plan of the stage with the least room; None if it does not fit, and then `error` says why.
    """

    chips: Chips
    split: Split
    layout: MeshLayout
    config: ResolvedConfig
    stages: list[StageArrays]
    needs: list[StageNeeds]
    estimated: bool
    memory: MemoryPlan | None
    error: ConfigError | None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each KV cache group, in tokens; None for full attention."""
        return self.stages[0].programs.windows

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device, of the stage with the largest pages."""
        return max(stage.sizes(0).page_bytes for stage in self.stages)

    @property
    def page_bytes_of_all(self) -> int:
        """Bytes of one page of a sequence, summed over all devices of a replica that store a part of it."""
        return self.layout.model * sum(stage.sizes(0).page_bytes for stage in self.stages)

    @cached_property
    def tightest(self) -> int:
        """Index of the stage whose devices hold the most bytes."""
        return max(range(len(self.stages)), key=lambda stage: sum(self._held(stage).values()))

    def parts(self) -> dict[str, int]:
        """Return the bytes on one device of the tightest stage by purpose, with the rest of the budget under LEFT; they
        add up to the budget. The rest is negative if the model does not fit.
        """
        held = self._held(self.tightest)
        return {**held, LEFT: self.budget - sum(held.values())}

    @property
    def total(self) -> int:
        """Bytes of memory of one device."""
        return device_bytes(self.config, self.chips)[0]

    @property
    def num_programs(self) -> int:
        """Number of programs that start-up compiles, over all stages."""
        steps = [stage.programs for stage in self.stages]
        own = sum(len(each.programs(stage.params)) for stage in self.stages for each in stage.programs.extensions)
        return own + sum(len(list(each.packer.buckets)) + len(each.epilogue_sizes()) for each in steps)

    @property
    def budget(self) -> int:
        """Bytes of a device that the engine may use."""
        return plan_budget(self.config, self.chips)

    def _held(self, index: int) -> dict[str, int]:
        """Return the bytes on one device of the stage `index` by purpose, without purposes of 0 bytes and without the
        rest of the budget.
        """
        stage, needs = self.stages[index], self.needs[index]
        arrays = stage.bytes_of(0 if self.memory is None else self.memory.num_pages)
        slots = sum(arrays.get(purpose, 0) for purpose in SLOTS_AND_SAMPLING)
        others = {purpose: size for purpose, size in needs.extensions.items() if purpose not in arrays}
        temporaries = max(0, needs.workspace - slots)
        process, heap = (0, 0) if self.memory is None else (self.memory.process, self.memory.heap)
        of_programs = {PROGRAMS: needs.programs, TEMPORARIES: temporaries, PROCESS: process, HEAP: heap}
        found = {**arrays, **others, **of_programs}
        return {purpose: size for purpose, size in found.items() if size}

    @property
    def num_pages(self) -> int:
        """Number of KV pages of a replica; 0 if the model does not fit."""
        return 0 if self.memory is None else self.memory.num_pages

    def pages_of(self, num_tokens: int) -> int:
        """Return the most pages that a sequence of `num_tokens` tokens holds at once."""
        return most_pages_of(self.config.scheduler_config(1, windows=self.windows), num_tokens)

    def sequences_of(self, num_tokens: int) -> int:
        """Return how many sequences of `num_tokens` tokens can run at once, over all replicas, limited by pages and by
        max_num_seqs.
        """
        own = min(self.config.max_num_seqs, self.num_pages // self.pages_of(num_tokens))
        return own * self.layout.num_ranks

    def pages_for_sequences(self, num_tokens: int) -> int:
        """Return how many sequences of `num_tokens` tokens the pages of all replicas hold, without the limit of
        max_num_seqs.
        """
        return self.num_pages // self.pages_of(num_tokens) * self.layout.num_ranks

    @property
    def longest(self) -> int:
        """Largest number of tokens of a sequence that the pages hold, at most the model's context; 0 if the model does
        not fit.
        """
        most = self.stages[0].programs.model.config.max_position_embeddings
        return longest_fit(self.config, self.num_pages, self.windows, most)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, summed over all devices of a replica. Layers with a window count like
        those that keep all tokens.
        """
        return self.page_bytes_of_all * len(self.windows) // self.config.block_size


def plan_budget(config: ResolvedConfig, chips: Chips) -> int:
    """Return the bytes of one of these chips that an engine with this config may use."""
    return budget_of(config, *device_bytes(config, chips))


def device_bytes(config: ResolvedConfig, chips: Chips) -> tuple[int, int | None]:
    """Return (bytes of one device, how many of them jax's client reserves). The second applies to an engine that is the
    first in its process to use the device; it is None except on CUDA devices.

    A CPU device has an equal part of this machine's memory. Both are rounded down. config: its gpu_memory_utilization
    is used.
    """
    chip = chips.chip
    if chip.platform == "cpu":
        return device_memory(SimpleNamespace(platform="cpu")) // chips.count, None
    if chip.platform == "cuda":
        return chip.memory, int(chip.memory * client_share(config.gpu_memory_utilization))
    return chip.memory, None


def platform_for(chip: Chip) -> Platform:
    """Return the default options for a chip, those of the platform whose kernels an engine runs on it."""
    return PLATFORMS[platform_of(SimpleNamespace(platform=chip.platform, compute_capability=chip.compute_capability))]


def plan_split(model: PlannedModel, chips: Chips, split: Split, compiled: CompiledNeeds | None = None) -> SplitPlan:
    """Return the plan of a model on chips, split in one way. A plan that does not fit has an `error`.

    With max_model_len "auto" the plan has the longest context that fits. compiled: source of the programs' memory from
    their compiler; None estimates it.

    Raises:
      ConfigError: the model cannot be split so, or options contradict each other.
    """
    plan = _plan_length(model, chips, split, compiled, {})
    while model.config.max_model_len == AUTO_LENGTH and isinstance(plan.error, TooLong) and plan.error.fits > 1:
        plan = _plan_length(model, chips, split, compiled, {"max_model_len": plan.error.fits})
    return plan


def _plan_length(
    model: PlannedModel, chips: Chips, split: Split, compiled: CompiledNeeds | None, length: dict[str, int]
) -> SplitPlan:
    """Return the plan of a split with one max_model_len. length: {"max_model_len": tokens}, or {} for the config's.
    compiled: source of compiled memory needs, or None.

    Raises ConfigError for options that are invalid or do not divide the model. Pages that do not fit raise nothing: the
    plan's `memory` is then None and `error` is set.
    """
    config = model.resolved(**split.options, **length)
    layout = config.mesh_layout(model.source.config)
    meshes = [abstract_mesh(layout)] * split.pipeline if compiled is None else compiled.meshes(layout, split)
    try:
        found = split_stages(model.source, config, model.platform, layout, meshes)
        stages = [StageArrays(each) for each in found]
    except (ValueError, ModelFileError) as error:  # such as a weight that so many devices do not split evenly
        if isinstance(error, ConfigError):
            raise
        raise ConfigError.because("tensor_parallel_size", f"{error}", "give another one") from None
    needs = [estimated_needs(stage) for stage in stages] if compiled is None else compiled.needs(found, config)
    total, limit = device_bytes(config, chips)
    sizes = [stage.sizes(total, limit) for stage in stages]
    memory, error = None, None
    shared = chips.count if chips.chip.platform == "cpu" else 0
    try:
        memory = plan_stages(config, sizes, needs, windows=stages[0].programs.windows, shared=shared)
        error = _overfull(memory, total if limit is None else limit)
    except ConfigError as refused:
        error = refused
    memory = None if error else memory
    return SplitPlan(chips, split, layout, config, stages, needs, compiled is None, memory, error)


def _overfull(memory: MemoryPlan, total: int) -> ConfigError | None:
    """Return a ConfigError if the planned bytes exceed `total`, the bytes of the device, as they may with a given
    number of pages; else None.
    """
    if memory.planned <= total:
        return None
    gib = 1 << 30
    problem = f"{memory.num_pages} KV pages and all else take {memory.planned / gib:.2f} GiB of {total / gib:.2f} GiB"
    advice = "lower num_gpu_blocks_override or kv_cache_memory_bytes, or leave them out"
    return ConfigError.because("num_gpu_blocks_override", problem, advice)
