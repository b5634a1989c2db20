"""The command `jaxengine build`: compiles every step of an engine for chips, which need not be here, into a bundle."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.config.base.lengths import AUTO_LENGTH
from jaxengine.config.command_line import given_options
from jaxengine.config.engine_config import ConfigError, EngineConfig, ResolvedConfig
from jaxengine.config.engine_flags import MODEL, add_engine_options, add_model
from jaxengine.config.execution.placement import PLAIN
from jaxengine.plan.chips import CHIPS, Chips, read_chips


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, with `run` as the function that executes it."""
    add_model(parser, help="a Hugging Face folder, a GGUF file, or a hub id, of which no weights are downloaded")
    names = ", ".join(name for name, chip in CHIPS.items() if chip.target)
    parser.add_argument(
        "--chips", default="cpu", metavar="NAME[:COUNT]", help=f"chips to build for: {names} (default: cpu)"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the bundle")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build the bundle for args.chips in the folder args.out, and print its size and the options to start an engine
    with. Returns 0.

    Raises ConfigError for invalid arguments and options, a compiler that is not installed, and a model that does not
    fit, and the errors of an engine start for a model that cannot be read.
    """
    chips, options = read_chips(args.chips), given_options(args, EngineConfig)
    key_file, bundle = options.pop("bundle_key_file", None), options.pop("bundle", None)
    if bundle is not None:
        raise ConfigError("bundle", bundle, "none: --out names the bundle to build")
    options = _split(chips, options)
    config = EngineConfig.from_options(**options)
    start = time.perf_counter()
    built = build(config, chips, _devices(chips), args.out, key_file)
    model, minutes = getattr(args, MODEL, None) or "the embedded model", (time.perf_counter() - start) / 60
    print(
        f"{args.out}: {built['programs']} programs of {model} for {chips}, {built['bytes'] / (1 << 20):,.1f} MiB, "
        f"{built['pages']:,} KV pages; {minutes:.1f} minutes"
    )
    size = options["tensor_parallel_size"]
    split = f", tensor_parallel_size {size}" if size > 1 else ""
    print(f"start the engine with the same options{split} and --bundle {args.out}")
    return 0


def build(config: EngineConfig, chips: Chips, devices: Sequence[Any], out: str, key_file: str | None) -> dict[str, int]:
    """Compile the programs that an engine with this config loads when it starts, and write the bundle.

    A bundle that is already there is replaced. devices: devices of the chips. out: folder of the bundle. key_file: file
    with the secret to sign with; None writes no signature. Returns the numbers "programs", "bytes" and KV "pages".
    Raises ConfigError for options that a bundle does not support, chips of several hosts and a model that does not fit,
    if possible before anything is compiled, and the errors of an engine start for a model that cannot be read.
    """
    from jaxengine.plan.model import open_planned
    from jaxengine.plan.plan import Split, plan_split, platform_for
    from jaxengine.runner.executables.bundle import NewBundle
    from jaxengine.runner.start.bundles import about, refuse_unknown_code
    from jaxengine.runner.start.open import ProgressBar
    from jaxengine.runner.warm_up import warm_up
    from jaxengine.version import __version__

    for name in ("enforce_eager", "fit", "record_steps"):
        if getattr(config, name):
            raise ConfigError(name, getattr(config, name), "not given: a bundle has no steps of its kind")
    if config.attention_backend == PLAIN:
        raise ConfigError("attention_backend", PLAIN, "not given: a bundle has the platform's own kernels")
    if config.max_model_len == AUTO_LENGTH:
        raise ConfigError("max_model_len", "auto", "a number, which the engine is then given too: see `jaxengine plan`")
    if config.nnodes > 1:
        raise ConfigError("nnodes", config.nnodes, "1: a bundle is for one process")
    if (hosts := len({device.process_index for device in devices})) > 1:
        raise ConfigError("chips", str(chips), f"chips of one host, whose process loads the bundle; these have {hosts}")
    model = open_planned(config, platform_for(chips.chip))
    try:
        sizes = config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size
        split = Split(*sizes, config.enable_expert_parallel)
        refuse_unknown_code(model.source, model.resolved(**split.options))
        plan_split(model, chips, split)  # raises errors before an earlier bundle is replaced
        compiler = _Stages(devices, bundle := NewBundle(out, key_file, config.compile_cache_dir))
        plan = plan_split(model, chips, split, compiler)
        if plan.memory is None:
            assert plan.error is not None
            raise plan.error
        shown = not config.disable_log_stats
        with ProgressBar("Compiling steps", "step", shown) as bar, compiler.compiling_ahead() as ahead:
            warm_up(compiler.stages, plan.num_pages, bar.update, ahead=ahead)
        for stage in compiler.stages:
            stage.allocate()
            _ = stage.workspace_bytes, stage.program_bytes  # compiles or stores the numbers that an engine start needs
        bundle.finish(about(model.source, plan.config, devices, built=True), plan.num_pages, __version__)
        return {"programs": bundle.num_programs, "bytes": bundle.num_bytes, "pages": plan.num_pages}
    finally:
        model.close()


class _Stages:
    """Stages of an engine whose programs go into a bundle; implements jaxengine.plan.plan.CompiledNeeds.

    Attributes:
      stages: StageRunners of the split that was planned last.
    """

    def __init__(self, devices: Sequence[Any], bundle: Any):
        """Store the devices and the bundle, a NewBundle, for `needs`."""
        self._devices, self._bundle = devices, bundle
        self.stages: list[Any] = []

    def meshes(self, layout: Any, split: Any) -> Sequence[Any]:
        """Return the mesh of each pipeline stage over the devices. layout: mesh layout of one stage; split: Split, of
        which `pipeline`, the number of stages, is used.
        """
        from jaxengine.sharding.mesh import make_mesh
        from jaxengine.sharding.stages import devices_of_stages

        return [make_mesh(layout, part) for part in devices_of_stages(self._devices, split.pipeline)]

    def needs(self, stages: Sequence[Any], config: ResolvedConfig) -> list[Any]:
        """Create runners of `stages`, store them in the attribute `stages`, compile the programs that determine their
        memory needs into the bundle, and return the StageNeeds of each. config: the engine's, resolved.
        """
        from jaxengine.runner.stage_runner import memory_needs
        from jaxengine.runner.start.devices import shape_runner

        self.stages = [shape_runner(stage, config, self._bundle) for stage in stages]
        with self.compiling_ahead():
            return memory_needs(self.stages, config)

    def compiling_ahead(self) -> contextlib.AbstractContextManager[int]:
        """Return the context in which programs of `stages` compile on threads (executables.cache.compiling_ahead)."""
        from jaxengine.runner.executables.cache import compiling_ahead
        from jaxengine.runner.warm_up import num_compile_threads

        caches = [cache for stage in self.stages for cache in stage.caches]
        return compiling_ahead(caches, num_compile_threads(self._devices[0].platform))


def _split(chips: Chips, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with tensor_parallel_size added, if it is missing, so that all chips are used.

    Raises ConfigError if the product of the parallel sizes is not the number of chips.
    """
    names = ("data_parallel_size", "pipeline_parallel_size")
    others = 1
    for name in names:
        others *= max(1, int(options.get(name) or 1))
    tensor = options.get("tensor_parallel_size") or chips.count // others
    if tensor * others != chips.count:
        allowed = f"one whose product with the other parallel sizes, {others}, is {chips.count}, the devices of {chips}"
        raise ConfigError("tensor_parallel_size", tensor, allowed)
    return {**options, "tensor_parallel_size": tensor}


def _devices(chips: Chips) -> Sequence[Any]:
    """Return the devices of the chips: this machine's CPUs, or devices that only a compiler describes.

    Sets jax's platform to the CPU, and libtpu's environment for TPUs. Raises ConfigError for more CPU devices than a
    process has that uses jax already, for a compiler that is not installed, and for chips without a compile target.
    """
    import jax

    from jaxengine.check.children import prepare_libtpu
    from jaxengine.check.devices import target_devices
    from jaxengine.check.targets import find_target, require_compiler

    if not chips.chip.target:
        names = ", ".join(name for name, chip in CHIPS.items() if chip.target)
        raise ConfigError("chips", str(chips), f"chips that programs can be compiled for: {names}")
    target = find_target(chips.chip.target + (f"-{chips.count}" if chips.count > 1 else ""))
    require_compiler(target)
    if target.backend == "tpu":
        prepare_libtpu()
    with contextlib.suppress(RuntimeError):  # jax runs already
        jax.config.update("jax_platforms", "cpu")
        if target.backend == "cpu":
            jax.config.update("jax_num_cpu_devices", chips.count)
    if target.backend == "cpu" and (here := len(jax.devices("cpu"))) < chips.count:
        raise ConfigError("chips", str(chips), f"at most cpu:{here} in a process that uses jax already")
    return target_devices(target)
