"""Assignment of devices: the mesh of each pipeline stage, and each stage's weights loaded onto its mesh."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxengine.checkpoint.model_source import ModelSource
from jaxengine.config.base.platforms import Platform
from jaxengine.config.engine_config import ConfigError, EngineConfig, ResolvedConfig
from jaxengine.config.execution.placement import PLAIN
from jaxengine.config.kv.offload import memory_option
from jaxengine.models.build import Build
from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.tower import TOWER
from jaxengine.models.kernel_rows import attention_rows
from jaxengine.models.params.declare import DeclaredParam, declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model, tensor_sizes
from jaxengine.models.weights.adapters.pools import abstract_leaves, with_pools
from jaxengine.models.weights.dummy import dummy_params
from jaxengine.models.weights.formats.orbax import load_checkpoint
from jaxengine.models.weights.load import load_params
from jaxengine.runner.base.memory import MemoryPlan, plan_stages
from jaxengine.runner.executables.cache import Place
from jaxengine.runner.extensions.build import step_programs
from jaxengine.runner.model_runner import Progress
from jaxengine.runner.programs.step_programs import StepPrograms
from jaxengine.runner.stage_runner import StageRunner, memory_needs
from jaxengine.runner.start.bundles import executables_of
from jaxengine.sharding.layout import MESH_AXES, MeshLayout
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.stages import Stage, devices_of_stages, split_layers, stages_of


class SplitDraft(NamedTuple):
    """Draft model or draft head of a stage before its weights are read.

    Attributes:
      programs: DraftPrograms of the draft's kind, with an abstract `model`.
      source: the open files of its weights.
    """

    programs: Any
    source: ModelSource


class SplitStage(NamedTuple):
    """Pipeline stage before its weights are read.

    Attributes:
      programs: programs with an abstract `model`.
      draft: None without a draft model or head that has weights.
    """

    programs: StepPrograms
    draft: SplitDraft | None

    @property
    def models(self) -> list[Any]:
        """Abstract models whose weights the stage loads: its part of the model and, if there is one, its draft model or
        head.
        """
        return [self.programs.model, *([] if self.draft is None else [self.draft.programs.model])]


def choose_devices(
    config: EngineConfig, devices: Sequence[Any] | None, mesh: Mesh | None
) -> tuple[EngineConfig, list[Any]]:
    """Return the config with the mesh's sizes filled in, and the devices that the engine uses, stage after stage.

    Args:
      devices: candidates, of which the first ones are taken; with several nodes, the first ones of each process. None
        for `jax.devices()`.
      mesh: mesh with axes data, attn and model (jaxengine.runner.start.mesh_axes), all of whose devices are used; None
        if the config's parallel sizes decide.

    Raises ConfigError for too few devices, for a mesh together with `devices` or parallel sizes, and if the processes
    cannot have equal numbers of devices of every stage.
    """
    if mesh is not None:
        said = (config.tensor_parallel_size, config.data_parallel_size, config.pipeline_parallel_size)
        if devices is not None or said != (1, 1, 1):
            raise ConfigError("mesh", dict(mesh.shape), "no mesh beside devices or parallel sizes; it says both")
        data, attn, model = mesh.devices.shape
        config = replace(config, tensor_parallel_size=attn * model, data_parallel_size=data)
        return config, list(mesh.devices.flat)
    available = jax.devices() if devices is None else list(devices)
    sizes = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
    tensor, data, stages = (getattr(config, name) for name in sizes)
    wanted = tensor * data * stages
    if wanted > len(available):
        largest = max(sizes, key=lambda name: getattr(config, name))
        raise ConfigError(
            largest,
            getattr(config, largest),
            f"parallel sizes whose product is at most {len(available)}, the number of devices; it is {wanted}",
        )
    return config, available[:wanted] if config.nnodes == 1 else _of_every_process(config, available, tensor * data)


def _of_every_process(config: EngineConfig, available: Sequence[Any], stage_size: int) -> list[Any]:
    """Return the first devices of each process, stage after stage, so that every stage has the same number of devices
    of each process.

    stage_size: number of devices of one stage. Every process must take part in every program, and hidden states must
    not cross between processes. Raises ConfigError if no such assignment exists.
    """
    by_process: dict[int, list[Any]] = {}
    for device in available:
        by_process.setdefault(device.process_index, []).append(device)
    each, rest = divmod(stage_size, len(by_process))
    least = min(map(len, by_process.values()))
    if rest or each * config.pipeline_parallel_size > least:
        allowed = (
            f"sizes that give every pipeline stage equally many devices of each process: tensor_parallel_size * "
            f"data_parallel_size, now {stage_size}, a multiple of nnodes, {len(by_process)}, and times "
            f"pipeline_parallel_size at most {least * len(by_process)}"
        )
        raise ConfigError("tensor_parallel_size", config.tensor_parallel_size, allowed)
    stages = range(config.pipeline_parallel_size)
    return [
        device
        for stage in stages
        for devices in by_process.values()
        for device in devices[stage * each : (stage + 1) * each]
    ]


def open_stages(
    source: ModelSource,
    config: ResolvedConfig,
    platform: Platform,
    devices: Sequence[Any],
    mesh: Mesh | None,
    *,
    progress: Progress,
) -> list[StageRunner]:
    """Load the model's pipeline stages onto their devices, in order, each with its draft model or head if there is one;
    return their runners. Closes the sources of both at the end, also on an error.

    devices: devices of all stages, stage after stage. mesh: the caller's mesh in the engine's axes if it decides how
    attention heads are split; else None. progress(done, total, what): called with the bytes of weights loaded so far
    and altogether, and the tensor's name.

    Raises ConfigError for a model that cannot be split in this way, ModelFileError for weights that do not fit, and the
    errors of jaxengine.runner.extensions.drafts.open.open_drafting.
    """
    with ExitStack() as opened:
        opened.callback(source.close)
        layout = config.mesh_layout(source.config)
        if mesh is not None and dict(mesh.shape) != (wanted := {name: getattr(layout, name) for name in MESH_AXES}):
            raise ConfigError(
                "mesh", dict(mesh.shape), f"{wanted} for a model of {source.config.num_kv_heads} kv heads"
            )
        meshes = [make_mesh(layout, part) for part in devices_of_stages(devices, config.pipeline_parallel_size)]
        stages, place = split_stages(source, config, platform, layout, meshes), executables_of(config)
        for draft in [stage.draft for stage in stages if stage.draft is not None]:
            opened.callback(draft.source.close)
        total = sum(size for stage in stages for model in stage.models for size in _sizes(model))
        runners, done = [], 0
        for stage in stages:
            programs, own = stage.programs, []
            params = load_weights(source, programs.model, programs.mesh, config, _part_of(progress, done, total))
            params = with_pools(programs.model, params, programs.mesh)
            done += sum(_sizes(programs.model))
            if stage.draft is not None:
                from jaxengine.runner.extensions.drafts.drafter import Drafter

                draft, part = stage.draft, _part_of(progress, done, total)
                weights = load_weights(draft.source, draft.programs.model, programs.mesh, config, part)
                own = [Drafter(draft.programs, weights, place)]
            runners.append(_choosing_kernels(StageRunner(programs, params, place, own), config))
        return runners


def plan_shapes(source: ModelSource, config: ResolvedConfig, platform: Platform, devices: Sequence[Any]) -> MemoryPlan:
    """Return the memory plan with which an engine would start on these devices. Weights are neither read nor allocated.

    Compiles or loads the programs that start-up compiles before the number of pages is known. Closes the source of a
    draft with files of its own; `source` stays open. Raises the errors of `open_stages`, and ConfigError (TooLong) if
    not even one request of max_model_len fits.
    """
    layout = config.mesh_layout(source.config)
    meshes = [make_mesh(layout, part) for part in devices_of_stages(devices, config.pipeline_parallel_size)]
    stages = split_stages(source, config, platform, layout, meshes)
    for draft in [stage.draft for stage in stages if stage.draft is not None]:
        if draft.source.path != source.path:  # else its weights are in the model's own files, which stay open
            draft.source.close()
    runners = [shape_runner(stage, config, config.compile_cache_dir) for stage in stages]
    needs = memory_needs(runners, config)
    shared = jax.local_device_count() if devices[0].platform == "cpu" else 0
    windows = runners[0].programs.windows
    return plan_stages(config, [stage.sizes for stage in runners], needs, windows=windows, shared=shared)


def shape_runner(stage: SplitStage, config: ResolvedConfig, place: Place) -> StageRunner:
    """Return a StageRunner that has abstract leaves in place of weights, so that it can compile programs and not run
    them.

    Its state changes are compiled or loaded here. config: its attention_backend chooses kernels. place: where its
    programs are stored (a folder, a Bundle, or None for the user's cache folder). Raises ConfigError if this place
    cannot be used.
    """
    mesh, own = stage.programs.mesh, []
    if stage.draft is not None:
        from jaxengine.runner.extensions.drafts.drafter import Drafter

        leaves = [leaf for _, leaf in abstract_leaves(stage.draft.programs.model, mesh)]
        own = [Drafter(stage.draft.programs, leaves, place)]
    leaves = [leaf for _, leaf in abstract_leaves(stage.programs.model, mesh)]
    return _choosing_kernels(StageRunner(stage.programs, leaves, place, own), config)


def _choosing_kernels(runner: StageRunner, config: ResolvedConfig) -> StageRunner:
    """Return the runner; its caches leave out all attention but plain XLA if attention_backend is PLAIN."""
    if config.attention_backend == PLAIN:
        for cache in runner.caches:
            cache.unused = attention_rows(runner.programs.platform)
    return runner


def split_stages(
    source: ModelSource, config: ResolvedConfig, platform: Platform, layout: MeshLayout, meshes: Sequence[Any]
) -> list[SplitStage]:
    """Return the model's stages in order, before any weights are read. Nothing is allocated. A draft's source is opened
    and stays open.

    meshes: a mesh for each stage, with the axes of `layout`, which may be abstract if nothing is to run. Raises the
    errors of `open_stages`.
    """
    stages = choose_stages(source.config, config, layout)
    models = [build_split(source.config, config, layout, stage) for stage in stages]
    draft = None
    if config.speculative_config is not None:
        from jaxengine.runner.extensions.drafts.open import open_drafting

        draft = open_drafting(source, config, layout, platform.name)
    found = []
    for model, mesh in zip(models, meshes, strict=True):
        programs = step_programs(model, config, platform, mesh)
        # With drafts there is one stage.
        own = None if draft is None else SplitDraft(draft.programs(draft.model, programs, config), draft.source)
        found.append(SplitStage(programs, own))
    return found


def choose_stages(model_config: ModelConfig, config: ResolvedConfig, layout: MeshLayout) -> list[Stage]:
    """Return the layers of each pipeline stage: as the option `pipeline_layers` says, else split so that the largest
    stage has the fewest bytes of weights. Weights that several layers share (a layer that runs several times, a block
    of Zamba) count for each of them. In such a split no stage needs what only an earlier one has (see
    `_needs_earlier`), unless too few layers remain at which stages may begin.

    For several stages without `pipeline_layers`, raises the errors of `build_split`, and ValueError for more stages
    than layers.
    """
    if config.pipeline_layers is not None:
        return stages_of(config.pipeline_layers)
    num_layers, num_stages = model_config.num_layers, config.pipeline_parallel_size
    if num_stages == 1:
        return stages_of([num_layers])
    sizes, beside = [0] * num_layers, []
    for param in declared_params(build_split(model_config, config, layout, Stage(0, num_layers))):
        for layer in _layers_with(model_config, param):
            sizes[layer] += param.num_bytes
    for end in (Stage(0, 1, is_last=False), Stage(num_layers - 1, num_layers, is_first=False)):
        held = declared_params(_abstract(model_config, config, layout, end))
        beside.append(sum(param.num_bytes for param in held if param.layer is None))
    first = [layer for layer in range(num_layers) if layer == 0 or not _needs_earlier(model_config, layer)]
    if len(first) < num_stages:
        first = list(range(num_layers))
    ends = [*first[1:], num_layers]
    held = [sum(sizes[begin:end]) for begin, end in zip(first, ends, strict=True)]
    split = split_layers(held, num_stages, before=beside[0], after=beside[1])
    return stages_of([ends[stage.layers[-1]] - first[stage.layers[0]] for stage in split])


def _layers_with(model_config: ModelConfig, param: DeclaredParam) -> tuple[int, ...]:
    """Return the numbers of the layers that multiply by a weight of the full model, which has it in the first of them
    alone; () for a weight outside of layers.
    """
    if param.layer is None:
        return ()
    if model_config.shared_blocks is not None and param.decl.sources:
        return model_config.shared_blocks.having(param.decl.sources[0].name) or (param.layer,)
    stored = model_config.stored_layer(param.layer)
    return tuple(layer for layer in range(model_config.num_layers) if model_config.stored_layer(layer) == stored)


def _needs_earlier(model_config: ModelConfig, layer: int) -> bool:
    """Return whether stages from `layer` on would need what only those before them have: embeddings of images, parts of
    which are added in the layers after it, or keys and values, or a selection of keys, of an earlier layer.
    """
    sources = (source for each in model_config.attention[layer:] for source in _sources_of(each))
    return layer < _num_with_parts(model_config) or any(source < layer for source, _ in sources)


def _sources_of(attention: LayerAttention) -> list[tuple[int, str]]:
    """Return the other layers whose results a layer with this attention uses, with what they are."""
    named = ((attention.kv_source, "keys and values"), (attention.selection_source, "keys as selected by the indexer"))
    return [(source, what) for source, what in named if source is not None]


def _num_with_parts(model_config: ModelConfig) -> int:
    """Return the number of the first layers that must be in the first stage, as parts of images are added there."""
    return max([0, *(tower.layers_with_parts for tower in model_config.towers)])


def build_split(model_config: ModelConfig, config: ResolvedConfig, layout: MeshLayout, stage: Stage) -> CausalLM:
    """Return the abstract model of one stage for a mesh layout.

    Raises:
      ConfigError: the mesh does not divide the model (the message names sizes that would); or the stage lacks a layer
        whose keys and values, or key selection, one of its layers uses; or a stage after the first has one of the
        layers that add image features; or, with kv_offloading_size, no layer of the stage has pages.
      ModelFileError: the checkpoint stores the modules of one product in different formats.
    """
    with_parts = _num_with_parts(model_config)
    if not stage.is_first and stage.layers[0] < with_parts:
        # Image embeddings stay in the stage that encodes them; only hidden states are sent to the next stage.
        problem = f"the first {with_parts} layers add parts of images, but the first stage has {stage.layers[0]}"
        raise ConfigError.because("pipeline_parallel_size", problem, "give it more by pipeline_layers, or fewer stages")
    if config.kv_offloading_bytes and not any(model_config.attention[layer].has_pages for layer in stage.layers):
        name = memory_option(config.kv_transfer_config)
        where = f"none of the layers {stage.layers[0]} to {stage.layers[-1]} of a stage has pages to keep elsewhere"
        problem = f"{name} is given, but {where}"
        raise ConfigError.because(name, problem, "leave it out, or choose stages by pipeline_layers")
    for layer in stage.layers:
        for source, what in _sources_of(model_config.attention[layer]):
            if source in stage.layers:
                continue
            problem = f"layer {layer} attends to {what} of layer {source}, which is in an earlier stage"
            raise ConfigError.because(
                "pipeline_parallel_size", problem, "choose stages by pipeline_layers that keep both together"
            )
    return _abstract(model_config, config, layout, stage)


def _abstract(model_config: ModelConfig, config: ResolvedConfig, layout: MeshLayout, stage: Stage) -> CausalLM:
    """Return the abstract model of a stage, which need not be one that can run. Raises the errors of `build_split`
    about meshes and formats.
    """
    try:
        whole = () if config.mm_encoder_tp_mode == "weights" else (TOWER,)
        build = Build(config.dtype, layout, stage, lora=config.lora_spec, whole_parts=whole, exact=config.rl_exact)
        return build_model(model_config, build)
    except ModelConfigError as error:
        raise ModelFileError(config.model or "the embedded model", str(error)) from None
    except ValueError as error:
        sizes = tensor_sizes(
            model_config, lambda size: replace(config, tensor_parallel_size=size).mesh_layout(model_config)
        )
        allowed = f"{', '.join(map(str, sizes))} for this model ({error})"
        raise ConfigError("tensor_parallel_size", config.tensor_parallel_size, allowed) from None


def load_weights(source: ModelSource, model: CausalLM, mesh: Mesh, config: ResolvedConfig, progress: Progress) -> Any:
    """Load the weights of an abstract model onto its mesh, and return them as an nnx.State.

    They come from the source's files or from its folder in device layout. A source without weights gets random ones
    from config.seed. progress(done, total, what): called with bytes. Raises ModelFileError for files that do not fit
    the model, and ValueError if the mesh does not split a weight of such a folder evenly.
    """
    if source.weights is None:
        return dummy_params(model, seed=config.seed, mesh=mesh, progress=progress)
    if isinstance(source.weights, Path):
        params, size = load_checkpoint(source.weights, model, mesh=mesh), sum(_sizes(model))
        progress(size, size, "all")
        return params
    return load_params(model, source.weights, mesh=mesh, progress=progress)


def _sizes(model: CausalLM) -> list[int]:
    """Return the size in bytes of each weight of an abstract model, summed over all devices."""
    return [param.num_bytes for param in declared_params(model)]


def _part_of(progress: Progress, before: int, total: int) -> Progress:
    """Return a progress function for a part of the work: it adds `before` to the part's `done`, and reports `total` in
    place of the part's total.
    """
    return lambda done, _, what: progress(before + done, total, what)
