"""Opens the model of a recorded step on this machine, with the step programs of its engine for the chosen kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.records.step_file import RecordError
from jaxengine.replay.backends import INTERPRET, Backend
from jaxengine.runner.recorded_engine import model_digest
from jaxengine.runner.stage_runner import StageRunner
from jaxengine.runner.start.devices import open_stages

# Fields of `engine.json` that describe its model.
_MODEL = ("architecture", "layers", "hidden_size", "vocab_size")


def open_stage(
    about: Mapping[str, Any],
    backend: Backend,
    *,
    model: str | None = None,
    layers: bool = False,
    plugins: Sequence[str] = (),
    compile_cache_dir: str | None = None,
) -> StageRunner:
    """Load the model of a record into a StageRunner that can compile its steps. Call it within the backend's context.

    about: content of engine.json. model: model to load instead of the recorded one, without its revision; dummy weights
    are then read from files. layers: make forward passes return the hidden states after each layer. plugins,
    compile_cache_dir: as the engine's options; nothing is cached for interpreted kernels.

    Raises RecordError if the model's configuration is not the recorded one, for options or a platform that this version
    does not have, and for missing devices; ConfigError and ModelFileError for a model that cannot be opened.
    """
    options = {**about["options"], "plugins": tuple(plugins), "skip_tokenizer_init": True, "disable_log_stats": True}
    options |= {"record_steps": "replay" if layers else None, "record_steps_detail": "layers" if layers else "tokens"}
    if model is not None:
        options |= {"model": model, "revision": None}
        if options.get("load_format") == "dummy":
            options["load_format"] = "auto"
    # Interpreted kernels call Python, which no file can hold.
    options["compile_cache_dir"] = "" if backend.name == INTERPRET else compile_cache_dir
    try:
        config = ResolvedConfig(**options, gpu_memory_utilization=1.0)
    except (TypeError, KeyError) as error:
        raise RecordError(f"engine.json has other options than this version of jaxengine ({error})") from None
    platform = PLATFORMS.get(about["platform"])
    if platform is None:
        raise RecordError(f"engine.json names the platform {about['platform']!r}; there are {', '.join(PLATFORMS)}")
    devices = backend.devices(config.tensor_parallel_size * config.data_parallel_size)
    source = open_model(config, keep_tables=platform.keeps_tables)
    with source.closing_on_error():
        recorded = about["model"]
        if (digest := model_digest(source.config)) != recorded["digest"]:
            own, found = source.config, model or config.model or "the embedded model"
            raise RecordError(
                f"the steps are of {_sizes(*(recorded[name] for name in _MODEL))}, and {found} is "
                f"{_sizes(own.architecture, own.num_layers, own.hidden_size, own.vocab_size)}, with "
                f"configuration {digest[:8]} in place of {str(recorded['digest'])[:8]}; give the steps' model by "
                "--model"
            )
    # The recorded platform determines the shapes of steps, the backend determines kernels and layouts.
    platform = replace(platform, name=backend.platform)
    (stage,) = open_stages(source, config, platform, devices, None, progress=lambda done, total, what: None)
    return stage


def _sizes(architecture: str, layers: int, hidden_size: int, vocab_size: int) -> str:
    """Return the architecture and the sizes of a model as text."""
    return f"{architecture} with {layers} layers of width {hidden_size} and {vocab_size} tokens"
