"""From a configuration to a ModelRunner: open the model, resolve open options, load weights, compile steps.

Every process of an engine does this; host 0 then schedules, and the others execute the steps that it sends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jax.sharding import Mesh
from tqdm import tqdm

from jaxengine.checkpoint.custom_models import has_custom_class
from jaxengine.checkpoint.model_source import ModelSource, open_model
from jaxengine.config.base.lengths import AUTO_LENGTH
from jaxengine.config.base.platforms import PLATFORMS, Platform
from jaxengine.config.engine_config import ConfigError, EngineConfig, ResolvedConfig
from jaxengine.config.execution.placement import PALLAS, PLAIN
from jaxengine.config.kv.kv_cache import is_coded
from jaxengine.models.cache import platform_of, product_platform_of
from jaxengine.models.kernel_rows import has_kernels, is_kernel, plain_operations, why_no_kernels, without_rows
from jaxengine.runner.base.card import claim_card
from jaxengine.runner.base.garbage import few_collections
from jaxengine.runner.base.memory import TooLong
from jaxengine.runner.extensions.settle import item_sizes, settled
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.peers import ALONE, Peers
from jaxengine.runner.stage_runner import StageRunner
from jaxengine.runner.start.bundles import with_bundle
from jaxengine.runner.start.devices import choose_devices, open_stages, plan_shapes
from jaxengine.runner.start.kv_scales import known_scales, measure, scales_of
from jaxengine.runner.start.mesh_axes import engine_mesh

logger = logging.getLogger(__name__)


class OpenedModel(NamedTuple):
    """Opened model, resolved config and devices of an engine before any weights are loaded.

    Attributes:
      source: open files of the weights.
      config: config, resolved for the source and the devices.
      platform: platform whose kernels run on the devices.
      devices: devices of all stages, stage after stage.
      mesh: mesh in the engine's axes, if the caller's mesh says how tensor parallelism is split into attn and model;
        else None.
    """

    source: ModelSource
    config: ResolvedConfig
    platform: Platform
    devices: Sequence[Any]
    mesh: Mesh | None


def open_resolved(
    config: EngineConfig,
    devices: Sequence[Any] | None = None,
    mesh: Mesh | None = None,
    mesh_axes: Mapping[str, str] | None = None,
) -> OpenedModel:
    """Open the model of a config and resolve the options that the config leaves open; loads no weights. The returned
    source is open.

    Claims the share of a CUDA card's memory that the engine needs (`claim_card`), and binds the process to NUMA nodes
    with numa_bind, so call it before jax looks for devices.

    devices: candidates; None for `jax.devices()`. mesh: a user's mesh, in place of devices and parallel sizes.
    mesh_axes: maps its axes to "data", "tensor", "attn" or "model"; None if these are their names. With a max_model_len
    of AUTO_LENGTH, compiles to find the longest that fits; with a bundle, checks it. Raises ConfigError,
    ModelConfigError or ModelFileError, and DefaultModelMissing if no model is named and the default one is not
    installed.
    """
    if mesh is None and mesh_axes is not None:
        raise ConfigError("mesh_axes", mesh_axes, "None without a mesh")
    is_exact = False
    if mesh is not None:
        mesh, is_exact = engine_mesh(mesh, mesh_axes)
    if config.numa_bind:
        from jaxengine.runner.start.numa import bind_process

        bind_process(config.numa_bind_nodes, config.numa_bind_cpus)
    claim_card(config.gpu_memory_utilization or PLATFORMS["gpu"].memory_utilization)
    config, devices = choose_devices(config, devices, mesh)
    platform = PLATFORMS[kernel_platform(devices[0])]
    if config.attention_backend == PALLAS and not is_kernel("ragged_paged_attention", platform.name):
        raise ConfigError(
            "attention_backend", PALLAS, f"auto or {PLAIN}: {devices[0].device_kind} has no kernel for it"
        )
    source, resolved = resolve_model(config, platform)
    if config.max_model_len == AUTO_LENGTH:
        source, resolved = _with_longest(config, OpenedModel(source, resolved, platform, devices, None))
    if config.bundle is not None:
        with source.closing_on_error():
            resolved = with_bundle(source, resolved, devices)
    return OpenedModel(source, resolved, platform, devices, mesh if is_exact else None)


def resolve_model(config: EngineConfig, platform: Platform) -> tuple[ModelSource, ResolvedConfig]:
    """Open the model of a config for a platform's kernels and return it, open, with the config in which every open
    option is resolved. Raises ConfigError for options, ModelConfigError or ModelFileError for a model that cannot be
    used, and DefaultModelMissing for the default model if it is not installed. The source is then closed.
    """
    source, config = settle_model(config, platform)
    with source.closing_on_error():
        return source, config.resolved(source.config, platform, item_sizes(source, config))


def _with_longest(config: EngineConfig, opened: OpenedModel) -> tuple[ModelSource, ResolvedConfig]:
    """Return the opened model and its config with the longest max_model_len whose pages fit, at most the model's own
    context length. Reads no weights, and logs the length.

    Compiles the programs that start-up compiles before the number of pages is known. opened: is replaced by a new
    opened model if a shorter length is tried. Raises ConfigError if not even two tokens fit.
    """
    source, resolved = opened.source, opened.config
    while True:
        try:
            with source.closing_on_error():
                plan_shapes(source, resolved, opened.platform, opened.devices)
            break
        except TooLong as error:
            if error.fits < 2:
                raise
            # A shorter page table takes less memory: what fits now is never less than error.fits.
            source, resolved = resolve_model(replace(config, max_model_len=error.fits), opened.platform)
    logger.info("max_model_len is %d, the longest that fits", resolved.max_model_len)
    return source, resolved


def settle_model(config: EngineConfig, platform: Platform) -> tuple[ModelSource, EngineConfig]:
    """Open the model of a config for the kernels of a platform, and return it, open, with the config in which the
    options that depend on the model's files are settled.

    The returned config names the downloaded tokenizer and has no hub token or tokenizer revision. For a model class of
    the user it turns off the storage of executables. Needs no devices. Raises the errors of `resolve_model`.
    """
    source = open_model(config, keep_tables=platform.keeps_tables)
    with source.closing_on_error():
        config = settled(config, source)
    # What was downloaded is here now: code that gets this config needs neither the hub nor the token.
    tokenizer = config.tokenizer if source.tokenizer_path is None else str(source.tokenizer_path)
    config = replace(config, tokenizer=tokenizer, tokenizer_revision=None, hf_token=None)
    if has_custom_class(source.config):  # compiled steps are named after our sources, which do not include its class
        config = replace(config, compile_cache_dir="")
    return source, config


@few_collections()
def load_runner(
    source: ModelSource,
    config: ResolvedConfig,
    platform: Platform,
    devices: Sequence[Any],
    mesh: Mesh | None,
    *,
    peers: Peers = ALONE,
) -> ModelRunner:
    """Load the weights, prove kernels, compile all programs, and return the runner. Closes the source, also on an
    error.

    Every process of an engine calls this. If keys and values are stored as codes and `known_scales` has no scales for
    them, they are measured on random tokens, which is logged. source, config, platform, devices, mesh: results of
    `open_resolved`. peers: the engine's other processes; ALONE for none. Raises ConfigError for sizes or memory that do
    not fit, and if several processes would have to measure scales; ModelFileError for weights that do not fit.
    """
    show, coded = not config.disable_log_stats, is_coded(config.kv_cache_dtype)
    with source.closing_on_error():
        scales = known_scales(source, config) if coded else None
        if coded and scales is None and peers is not ALONE:
            problem = "kv_cache_scales are not in the checkpoint, and several processes measure none"
            advice = "give a file that `jaxengine calibrate` wrote, or unit"
            raise ConfigError.because("kv_cache_scales", problem, advice)
    with ProgressBar("Loading weights", "B", show) as bar:
        stages = open_stages(source, config, platform, devices, mesh, progress=bar.update)
    unused = proven(stages, config, platform, show)
    if coded:
        if scales is None:
            logger.info("measuring scales of keys and values on random tokens")
            scales = scales_of(measure(stages, config, platform), config.kv_cache_dtype)
        for stage in stages:
            stage.kv_scales = scales
    with ProgressBar("Loading steps", "step", show) as bar, without_rows(unused):
        for cache in [cache for stage in stages for cache in stage.caches]:
            cache.on_compile = partial(bar.rename, "Compiling steps")
        return ModelRunner(stages, config, progress=bar.update, peers=peers)


def proven(
    stages: Sequence[StageRunner], config: ResolvedConfig, platform: Platform, show: bool
) -> frozenset[tuple[str, str]]:
    """Prove the kernels of the stages' programs (`prove_kernels`, whose errors are raised), and return the rows
    (operation, kind) that programs must be compiled without, among them those that the stages' caches leave out
    already; the caches then leave out all of them. Nothing is proven if kernel_proof is "off" or the platform has no
    kernels.

    show: whether to show a progress bar.
    """
    left_out = stages[0].executables.unused
    platforms = {platform.name, product_platform_of(stages[0].programs.mesh.local_devices[0])}
    if config.kernel_proof == "off" or not any(map(has_kernels, platforms)):
        return left_out
    from jaxengine.runner.start.kernel_proof import prove_kernels

    with ProgressBar("Proving kernels", "kernel", show) as bar:
        return prove_kernels(stages, config.kernel_proof, config.compile_cache_dir, bar.update, left_out)


class ProgressBar:
    """Progress bar on stderr, a context manager; its `update` takes (done, total, what) calls. Shows nothing if `show`
    is False.
    """

    def __init__(self, title: str, unit: str, show: bool):
        """Show the bar. unit: "B" for bytes, which get prefixes such as M."""
        self._bar = tqdm(desc=title, unit=unit, unit_scale=unit == "B", disable=not show)

    def __enter__(self) -> ProgressBar:
        """Return the bar."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the bar."""
        self._bar.close()

    def rename(self, title: str) -> None:
        """Change the title of the bar."""
        self._bar.set_description_str(title)

    def update(self, done: int, total: int, what: str) -> None:
        """Show that `done` of `total` units are done, and `what`, the name of the current one."""
        self._bar.total = total
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update(done - self._bar.n)


def kernel_platform(device: Any) -> str:
    """Return the platform, a key of PLATFORMS, whose kernels a device runs. Logs a warning for a GPU without kernels
    ("gpu_xla").
    """
    platform = platform_of(device)
    if platform == "gpu_xla":
        logger.warning(
            "no kernels for %s on %s (%s): plain XLA runs instead, slower than on a card with kernels",
            plain_operations(device.compute_capability),
            device.device_kind,
            why_no_kernels(device.compute_capability),
        )
    return platform
