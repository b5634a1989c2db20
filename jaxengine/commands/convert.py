"""`jaxengine convert`: writes a model's weights in device layout, so that later starts only read them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from jaxengine.checkpoint.model_source import open_model
from jaxengine.commands.new_folder import new_folder
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.params.declare import declared_params
from jaxengine.models.quantization.base.rules import Quantization
from jaxengine.models.registry import build_model
from jaxengine.models.weights.adapters.folder import MAX_RANK, read_adapter
from jaxengine.models.weights.adapters.pools import targets_of
from jaxengine.models.weights.formats.orbax import save_checkpoint
from jaxengine.models.weights.views.merged import MergedSource
from jaxengine.runner.extensions.settle import item_sizes
from jaxengine.runner.start.devices import build_split, choose_devices, choose_stages, load_weights
from jaxengine.runner.start.kv_scales import stored_scales
from jaxengine.runner.start.open import ProgressBar, kernel_platform
from jaxengine.sharding.mesh import make_mesh


def convert(config: EngineConfig, folder: Path, merge_lora: Path | None = None) -> None:
    """Load the model for the config's dtype and parallel sizes and write it, in device layout, to the new folder
    `folder`.

    merge_lora: folder of an adapter to merge into the weights, or None. Prints progress and the folder's name to
    stderr. The folder is complete or absent afterwards.

    Raises ConfigError for options that do not fit the model, pipeline stages, hf_overrides, a pooling model, a model
    without safetensors, a quantised one with plain stacks of experts, and an adapter for a quantised model or of
    weights that layers share. Raises ModelConfigError or ModelFileError for an invalid model, and ModelFileError,
    before weights are read, if the folder exists or cannot be written.
    """
    if config.pipeline_parallel_size != 1:
        size = config.pipeline_parallel_size
        raise ConfigError(
            "pipeline_parallel_size", size, "1: a converted folder is whole, and each stage reads its own"
        )
    if config.hf_overrides:
        problem = (
            f"hf_overrides has {', '.join(config.hf_overrides)}, and a converted folder keeps the model's config.json"
        )
        raise ConfigError.because("hf_overrides", problem, "give them where the folder is served")
    config, devices = choose_devices(config, None, None)
    with closing(open_model(config)) as source:
        if source.pooling is not None:
            problem = f"model {config.model!r} is a pooling model, and only models that generate are converted"
            raise ConfigError.because("runner", problem, "run it from its own folder")
        if source.weights is None or not source.path.is_dir():
            problem = f"model {config.model or 'the embedded one'!r} has no safetensors to convert"
            raise ConfigError.because("model", problem, "name a Hugging Face folder or hub id with safetensors")
        # A converted folder has no such tensors to decide from: its configuration would ask for quantised ones.
        if config.quantization is None and (plain := _unlisted(source.config)) is not None:
            problem = f"{config.model!r} is quantised except for {plain}, which its config.json does not say"
            raise ConfigError.because("model", problem, "serve it from its own folder")
        if merge_lora is not None and source.config.quantization is not None:
            problem = f"the weights of {config.model!r} are quantised, and an adapter is not merged into such"
            raise ConfigError.because("merge_lora", problem, "serve it with the base model: enable_lora")
        platform = PLATFORMS[kernel_platform(devices[0])]
        resolved = config.resolved(source.config, platform, item_sizes(source, config))
        layout = resolved.mesh_layout(source.config)
        stage = choose_stages(source.config, resolved, layout)[0]
        model, mesh = build_split(source.config, resolved, layout, stage), make_mesh(layout, devices)
        scales = stored_scales(source)
        if merge_lora is not None:
            assert source.weights is not None and not isinstance(source.weights, Path)
            targets = targets_of([build_split(source.config, replace(resolved, enable_lora=True), layout, stage)])
            adapter = read_adapter(merge_lora, targets, MAX_RANK, "float32")
            _check_own(source.config, adapter.matrices)
            source = replace(source, weights=MergedSource(source.weights, adapter.matrices))
        with new_folder(folder) as part:
            with ProgressBar("Loading weights", "B", not config.disable_log_stats) as bar:
                params = load_weights(source, model, mesh, resolved, bar.update)
            source.close()
            print(f"writing {folder}", file=sys.stderr)
            save_checkpoint(part, params, model, mesh=mesh, files=source.files_beside_weights(), kv_scales=scales)


def _unlisted(model: ModelConfig) -> str | None:
    """Return a module that the model has as it is in the checkpoint, though its config.json says that it is quantised;
    None if there is none.
    """
    if not isinstance(model.quantization, Quantization) or not model.quantization.unlisted:
        return None
    said = replace(model, quantization=replace(model.quantization, unlisted=()))
    built = (declared_params(build_model(each, Build("float32"))) for each in (said, model))
    before, now = ({source.name for param in params for source in param.decl.sources} for params in built)
    return min((name.rpartition(".")[0] for name in now - before), default=None)


def _check_own(model: ModelConfig, modules: Iterable[str]) -> None:
    """Raise ConfigError if an adapter changes a module whose weights several layers share: it has matrices for each of
    them. modules: the model's names of those that the adapter changes.
    """
    having = {} if model.shared_blocks is None else {each: model.shared_blocks.having(each) for each in modules}
    if module := next((each for each, layers in having.items() if len(layers) > 1), None):
        layers = ", ".join(map(str, having[module]))
        problem = f"the adapter changes {module} in one of layers {layers}, which share its weights"
        raise ConfigError.because("merge_lora", problem, "serve it with the base model: enable_lora")
