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
# What of a plan is no array.
PROGRAMS, TEMPORARIES, PROCESS = "programs", "temporaries", "process"


@dataclass(frozen=True)
class Split:
    """How a model is split: tensor, pipeline and data parallel sizes, and whether experts are whole."""

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
        """Engine options, by name, that split a model so."""
        sizes = {"tensor_parallel_size": self.tensor, "pipeline_parallel_size": self.pipeline}
        return {**sizes, "data_parallel_size": self.data, "enable_expert_parallel": self.experts}

    @property
    def flags(self) -> str:
        """Flags of the command line that request this split; "" for one device."""
        sizes = (("-tp", self.tensor), ("-pp", self.pipeline), ("-dp", self.data))
        return " ".join([*(f"{flag} {size}" for flag, size in sizes if size > 1), *(["-ep"] if self.experts else [])])


class CompiledNeeds(Protocol):
    """Source of the memory that programs take of a device, by their compiler."""

    def meshes(self, layout: MeshLayout, split: Split) -> Sequence[Any]:
        """Return the mesh of each stage. layout: of one stage; split: has the number of stages."""
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
      chips, split: what was planned for.
      layout: mesh of one stage.
      config: resolved.
      stages: arrays of each pipeline stage.
      needs: what the programs of each stage take.
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
        """Windows of the cache groups."""
        return self.stages[0].programs.windows

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device, of the stage with the largest."""
        return max(stage.sizes(0).page_bytes for stage in self.stages)

    @property
    def page_bytes_of_all(self) -> int:
        """Bytes of one page of a sequence on all devices that have a part of it."""
        return self.layout.model * sum(stage.sizes(0).page_bytes for stage in self.stages)

    @cached_property
    def tightest(self) -> int:
        """Index of the stage that holds the most."""
        return max(range(len(self.stages)), key=lambda stage: sum(self._held(stage).values()))

    def parts(self) -> dict[str, int]:
        """Return the bytes of one device of the tightest stage by purpose, the rest under LEFT; they add up to what the
        engine may use. The rest is negative if it does not fit.
        """
        held = self._held(self.tightest)
        return {**held, LEFT: self.budget - sum(held.values())}

    @property
    def total(self) -> int:
        """Bytes of memory of a device."""
        return device_bytes(self.config, self.chips)[0]

    @property
    def num_programs(self) -> int:
        """Programs that start-up compiles, of all stages."""
        steps = [stage.programs for stage in self.stages]
        own = sum(len(each.programs(stage.params)) for stage in self.stages for each in stage.programs.extensions)
        return own + sum(len(list(each.packer.buckets)) + len(each.epilogue_sizes()) for each in steps)

    @property
    def budget(self) -> int:
        """Bytes of a device that the engine may use."""
        return plan_budget(self.config, self.chips)

    def _held(self, index: int) -> dict[str, int]:
        """Bytes of one device of the stage `index` by purpose, without what is left; none of 0 bytes."""
        stage, needs = self.stages[index], self.needs[index]
        arrays = stage.bytes_of(0 if self.memory is None else self.memory.num_pages)
        slots = sum(arrays.get(purpose, 0) for purpose in SLOTS_AND_SAMPLING)
        others = {purpose: size for purpose, size in needs.extensions.items() if purpose not in arrays}
        temporaries = max(0, needs.workspace - slots)
        process = 0 if self.memory is None else self.memory.process
        found = {**arrays, **others, PROGRAMS: needs.programs, TEMPORARIES: temporaries, PROCESS: process}
        return {purpose: size for purpose, size in found.items() if size}

    @property
    def num_pages(self) -> int:
        """Pages of a replica; 0 if it does not fit."""
        return 0 if self.memory is None else self.memory.num_pages

    def pages_of(self, num_tokens: int) -> int:
        """Return the most pages that a sequence of `num_tokens` tokens holds at once."""
        return most_pages_of(self.config.scheduler_config(1, windows=self.windows), num_tokens)

    def sequences_of(self, num_tokens: int) -> int:
        """Return the most sequences of `num_tokens` tokens that run at once, on all replicas; limited by slots, too."""
        own = min(self.config.max_num_seqs, self.num_pages // self.pages_of(num_tokens))
        return own * self.layout.num_ranks

    def pages_for_sequences(self, num_tokens: int) -> int:
        """Return the number of sequences of `num_tokens` tokens whose pages fit, on all replicas, with as many slots as
        it takes.
        """
        return self.num_pages // self.pages_of(num_tokens) * self.layout.num_ranks

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the pages hold, at most the model's context; 0 if it does not fit."""
        most = self.stages[0].programs.model.config.max_position_embeddings
        return longest_fit(self.config, self.num_pages, self.windows, most)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token on all devices, in layers that keep all tokens and in windows alike."""
        return self.page_bytes_of_all * len(self.windows) // self.config.block_size


def plan_budget(config: ResolvedConfig, chips: Chips) -> int:
    """Return the bytes of a device that an engine with this config plans for, on one of these chips."""
    return budget_of(config, *device_bytes(config, chips))


def device_bytes(config: ResolvedConfig, chips: Chips) -> tuple[int, int | None]:
    """Return (bytes of one device, how many of them jax's client reserves for an engine that is the first in its
    process to use the device). A CPU device has an equal part of this machine's memory. config: for
    gpu_memory_utilization. The second is None for other than CUDA devices, where it reserves none.
    """
    chip = chips.chip
    if chip.platform == "cpu":
        return device_memory(SimpleNamespace(platform="cpu")) // chips.count, None
    if chip.platform == "cuda":
        return chip.memory, int(chip.memory * client_share(config.gpu_memory_utilization))
    return chip.memory, None


def platform_for(chip: Chip) -> Platform:
    """Return the default options of a chip, which depend on the kernels that an engine runs on it."""
    return PLATFORMS[platform_of(SimpleNamespace(platform=chip.platform, compute_capability=chip.compute_capability))]


def plan_split(model: PlannedModel, chips: Chips, split: Split, compiled: CompiledNeeds | None = None) -> SplitPlan:
    """Plan a model on chips, split in one way; if it does not fit, the plan says so.

    With max_model_len "auto" it is the longest that fits. compiled: what programs take, by their compiler; None for an
    estimate.

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
    """Return what `plan_split` does, without a search for the length. compiled: as there. length: max_model_len as an
    option; empty for the config's. Raises ConfigError for options that are invalid or do not divide the model; that
    pages do not fit is part of the result.
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
    """Return the error of a plan whose pages are given and too many for the device; None if it fits.

    total: bytes of the device.
    """
    if memory.planned <= total:
        return None
    gib = 1 << 30
    problem = f"{memory.num_pages} KV pages and all else take {memory.planned / gib:.2f} GiB of {total / gib:.2f} GiB"
    advice = "lower num_gpu_blocks_override or kv_cache_memory_bytes, or leave them out"
    return ConfigError.because("num_gpu_blocks_override", problem, advice)
