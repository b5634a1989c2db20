"""Memory that programs take of a device, by their compiler: they are compiled as a start compiles them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxengine.check.children import environment, replies, tail
from jaxengine.check.targets import Target, find_target, require_compiler
from jaxengine.config.engine_config import ConfigError, ResolvedConfig
from jaxengine.config.execution.placement import PLAIN
from jaxengine.plan.chips import Chips
from jaxengine.plan.plan import PARALLEL, CompiledNeeds, Split
from jaxengine.runner.base.memory import StageNeeds
from jaxengine.runner.stage_runner import memory_needs
from jaxengine.runner.start.devices import SplitStage, shape_runner
from jaxengine.runner.start.stage_arrays import abstract_mesh
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.stages import devices_of_stages


def compiler_of(chips: Chips, model: str | None, options: Mapping[str, Any]) -> CompiledNeeds:
    """Return the source of compiled memory needs for some chips: OnCpu or Elsewhere. model, options: model and options
    that the command line names.

    Raises ConfigError for chips whose compiler is not installed or that `jaxengine check` does not know, for a `model`
    of None except on CPUs, and for more CPU devices than OnCpu can get.
    """
    if chips.chip.platform == "cpu":
        return OnCpu(chips)
    if not chips.chip.target or model is None:
        problem = f"programs of {model or 'the embedded model'} cannot be compiled for {chips}"
        raise ConfigError.because("compile", problem, "leave --compile out: the plan is then an estimate")
    target = find_target(chips.chip.target + (f"-{chips.count}" if chips.count > 1 else ""))
    require_compiler(target)
    return Elsewhere(target, model, options)


class OnCpu:
    """CompiledNeeds of CPU devices of this machine. Programs are compiled as an engine here compiles them, so that it
    can load them from the cache afterwards.
    """

    def __init__(self, chips: Chips):
        """Set jax's platform to the CPU and its number of devices to chips.count, unless jax is initialised already.
        Raises ConfigError if there are fewer devices.
        """
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", chips.count)
        except RuntimeError:  # they have been made
            pass
        self._devices = jax.devices("cpu")[: chips.count]
        if len(self._devices) < chips.count:
            raise ConfigError(
                "chips", str(chips), f"at most cpu:{len(self._devices)} in a process that uses jax already"
            )

    def meshes(self, layout: MeshLayout, split: Split) -> Sequence[Any]:
        """Return the mesh of each stage over these devices. layout: mesh layout of one stage; split: has the number of
        stages.
        """
        return [make_mesh(layout, part) for part in devices_of_stages(self._devices[: split.size], split.pipeline)]

    def needs(self, stages: Sequence[SplitStage], config: ResolvedConfig) -> list[StageNeeds]:
        """Compile the programs that determine the memory needs of each stage, or load them from the cache, and return
        the StageNeeds of each stage.

        Nothing is compiled if options fix the number of pages, except with enforce_eager.
        """
        return memory_needs([shape_runner(stage, config, config.compile_cache_dir) for stage in stages], config)


class Elsewhere:
    """CompiledNeeds of chips that are not present but that `jaxengine check` compiles for. Their compiler runs in a
    separate process.
    """

    def __init__(self, target: Target, model: str, options: Mapping[str, Any]):
        """Store what to compile. options: engine options, as given; "model" and the parallel sizes are ignored."""
        self._target, self._model = target, model
        self._options = {name: value for name, value in options.items() if name not in ("model", *PARALLEL)}

    def meshes(self, layout: MeshLayout, split: Split) -> Sequence[Any]:
        """Return an abstract mesh of `layout` for each of the split's stages."""
        return [abstract_mesh(layout)] * split.pipeline

    def needs(self, stages: Sequence[SplitStage], config: ResolvedConfig) -> list[StageNeeds]:
        """Compile in a separate process with the target's compiler, wait for it, and return the StageNeeds of each
        stage.

        Raises ConfigError if the process refuses the model or fails, and for attention_backend "XLA"; BrokenPipeError
        if it ends before it has read the request.
        """
        if config.attention_backend == PLAIN:
            problem = f"attention_backend is {PLAIN}, but --compile has the kernels of {self._target.name}"
            raise ConfigError.because("attention_backend", problem, "leave one of them out")
        parallel = {name: getattr(config, name) for name in PARALLEL}
        options = {**self._options, **parallel, "max_model_len": config.max_model_len}
        with tempfile.TemporaryDirectory(prefix="jaxengine-plan-") as folder:
            log, dumps = Path(folder) / "log", Path(folder) / "dumps"
            dumps.mkdir()
            request = {"target": self._target.name, "model": self._model, "options": options, "kernels": None}
            request |= {"short": True, "skip": [], "needs_only": True}
            request |= {"log": str(log), "dumps": str(dumps)}
            found = None
            for message in replies(request, environment(self._target, dumps, False), log):
                if message["event"] == "refused":
                    raise ConfigError.because("compile", message["reason"], "leave --compile out for an estimate")
                found = message["needs"] if message["event"] == "needs" else found
            if found is None:
                problem = f"the compiler for {self._target.name} failed: {tail(log)}"
                raise ConfigError.because("compile", problem, "leave --compile out: the plan is then an estimate")
        drafts = [() if stage.draft is None else (stage.draft.programs,) for stage in stages]
        memory = [stage.programs.memory(own) for stage, own in zip(stages, drafts, strict=True)]
        return [StageNeeds(own[0], own[1], held) for own, held in zip(found, memory, strict=True)]
