"""Scales of 8-bit cached keys and values: from the checkpoint, from a file, or measured.

To measure, prompts run through the model with a pool in the model's dtype and steps of their own, and the largest
magnitudes of each layer and KV head are read from the pool.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxengine.checkpoint.model_source import ModelSource
from jaxengine.config.base.files import named_path
from jaxengine.config.base.platforms import Platform
from jaxengine.config.engine_config import ConfigError, ResolvedConfig
from jaxengine.config.execution.compilation_config import CompilationConfig
from jaxengine.config.kv.kv_cache import AUTO, CALIBRATE, UNIT
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import POOLED
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import read_object
from jaxengine.models.registry import model_for_hf
from jaxengine.models.weights.formats.orbax import load_scales
from jaxengine.models.weights.views.kv_scales import (
    BEYOND,
    STORED_FOR,
    KVScales,
    KVShape,
    of_object,
    read_scales,
    scales_for,
    to_object,
)
from jaxengine.models.weights.views.renamed import RenamedSource
from jaxengine.runner.extensions.build import step_programs
from jaxengine.runner.model_runner import ModelRunner, Progress
from jaxengine.runner.stage_runner import StageRunner
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_NUM_TOKENS = 512  # of the random prompt that is measured if the caller gives none


def known_scales(source: ModelSource, config: ResolvedConfig) -> KVScales | None:
    """Return the scales that need no measuring: ones for kv_cache_scales "unit", those computed from the named file,
    or, with "auto", the checkpoint's. Return None if they must be measured: "calibrate", or "auto" if the checkpoint
    has none or has them for another dtype.

    The source must be open. Logs a warning for "unit", and that scales for another dtype are not used. Raises
    ConfigError for a file that cannot be used, ModelFileError for invalid scales in a checkpoint.
    """
    shape = _shape(source.config)
    if config.kv_cache_scales == UNIT:
        logger.warning("kv_cache_scales is unit: what is beyond the range of %s saturates", config.kv_cache_dtype)
        ones = np.ones((shape.num_layers, shape.num_heads), np.float32)
        return KVScales(ones, None if shape.values_in_keys else ones)
    if config.kv_cache_scales not in (AUTO, CALIBRATE):
        path = named_path("kv_cache_scales", config.kv_cache_scales)
        return scales_of(read_largest(path, shape), config.kv_cache_dtype)
    if config.kv_cache_scales == CALIBRATE:
        return None
    found = stored_scales(source)
    if found is not None and config.kv_cache_dtype != STORED_FOR:
        logger.info("the checkpoint's scales of keys and values are for %s: measured instead", STORED_FOR)
        return None
    return found


def stored_scales(source: ModelSource) -> KVScales | None:
    """Return the checkpoint's scales, converted or not, for codes of dtype STORED_FOR; None if it has none, or if the
    source has no weights.

    The source must be open. Raises ModelFileError if only some layers have scales, or if one is invalid.
    """
    if source.weights is None:
        return None
    shape = _shape(source.config)
    if isinstance(source.weights, Path):
        return load_scales(source.weights, shape)
    names = model_for_hf(source.config.architecture).checkpoint_names
    return read_scales(RenamedSource(source.weights, names), shape)


def scales_of(largest: KVScales, dtype: str) -> KVScales:
    """Return the scales with which codes of `dtype` cover these largest magnitudes, layer by layer and head by head."""
    return largest.each(lambda magnitudes: scales_for(magnitudes, dtype))


def measure(
    stages: Sequence[StageRunner],
    config: ResolvedConfig,
    platform: Platform,
    prompts: Sequence[np.ndarray] | None = None,
    *,
    progress: Progress | None = None,
) -> KVScales:
    """Run prompts through the model and return the largest magnitudes of its keys and values: f32[layers, K KV heads]
    each, 0 for layers without pages. The values' are None if values lie in keys (latent attention).

    stages: stages with their weights, which are not changed. prompts: i32[n] each; None for a single prompt of random
    tokens. Compiles two additional steps, and stores their executables. progress(done, total, what): called after each
    prompt. Raises ModelFileError for keys or values that are not finite or that no scale covers, ConfigError if memory
    does not suffice.
    """
    most = min(_NUM_TOKENS, config.max_model_len - 1)
    if prompts is None:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, stages[0].programs.model.config.vocab_size, most).astype(np.int32)]
    longest = max(2, *map(len, prompts))
    pages = -(-(longest + 1) // config.block_size) + 1
    plain = replace(
        config,
        kv_cache_dtype=config.dtype,
        kv_cache_scales=AUTO,
        max_model_len=longest + 1,
        max_num_seqs=1,
        max_num_batched_tokens=min(most, config.max_num_batched_tokens),
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        num_state_snapshots=0,
        speculative_config=None,
        # One KV group with an index for every layer; one page more than a prompt needs.
        disable_hybrid_kv_cache_manager=True,
        num_gpu_blocks_override=pages,
        kv_cache_memory_bytes=None,
        compilation_config=CompilationConfig(cudagraph_capture_sizes=(1,), prefill_sizes=()),
    )
    own = []
    for stage in stages:
        own.append(stage.with_programs(step_programs(stage.programs.model, plain, platform, stage.programs.mesh)))
    runner = ModelRunner(own, plain)
    model = stages[0].programs.model.config
    k = np.zeros((model.num_layers, model.num_kv_heads), np.float32)
    v = np.zeros_like(k)
    for number, prompt in enumerate(prompts, 1):
        _run(runner, prompt)
        for stage in (each for each in own if each.programs.paged_layers):
            layers, (keys, values) = stage.programs.paged_layers, stage.largest()
            k[layers] = np.maximum(k[layers], keys)
            if values is not None:
                v[layers] = np.maximum(v[layers], values)
        if not (k.max() < BEYOND and v.max() < BEYOND):
            layer = int(np.argmax(np.maximum(k, v).max(axis=1)))
            text = f"keys or values of layer {layer} are not finite after prompt {number}: its weights are damaged"
            raise ModelFileError(config.model or "the embedded model", text)
        if progress is not None:
            progress(number, len(prompts), f"{len(prompt)} tokens")
    return KVScales(k, None if _shape(model).values_in_keys else v)


def _run(runner: ModelRunner, prompt: np.ndarray) -> None:
    """Run one prompt i32[n] through the model and wait for it, so that the runner's pages then hold its keys and
    values. The sampled token is ignored.
    """
    config = runner.config.scheduler_config(runner.plan.num_pages, runner.num_ranks, runner.windows)
    scheduler = Scheduler(config)
    pools = "pooling" in runner.extensions
    stop_token_ids = (POOLED,) if pools else ()
    scheduler.add_request(Request("0", prompt, TokenParams(), 0 if pools else 1, stop_token_ids))
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        pending = runner.execute(runner.packer.pack(step))
        runner.sample(pending)
        scheduler.update(step, pending.token_ids())


def write_largest(path: Path, largest: KVScales) -> None:
    """Write largest magnitudes to a JSON file that `read_largest` can read; an existing file is replaced. Raises
    ConfigError if it cannot be written.
    """
    try:
        path.write_text(json.dumps(to_object(largest)) + "\n")
    except OSError as error:
        problem = f"output {str(path)!r} cannot be written ({error.strerror})"
        raise ConfigError.because("output", problem, "name a file in a folder with room") from None


def read_largest(path: Path, shape: KVShape) -> KVScales:
    """Return the largest magnitudes from a file that `write_largest` wrote.

    shape: layers and KV heads of the model. Raises ConfigError for a file that is missing, invalid or of another model.
    """
    try:
        content, why = read_object(path.parent, path.name), "there is no such file"
    except ModelFileError as error:
        content, why = None, str(error)
    if content is None:
        problem = f"kv_cache_scales {str(path)!r} cannot be read ({why})"
        raise ConfigError.because("kv_cache_scales", problem, "give a file that `jaxengine calibrate` wrote")
    try:
        return of_object(content, shape)
    except ValueError as error:
        problem = f"kv_cache_scales {str(path)!r} is not of this model, which needs {error}"
        raise ConfigError.because("kv_cache_scales", problem, "calibrate this one") from None


def _shape(config: ModelConfig) -> KVShape:
    """Return the KVShape of a model's scales: its number of layers, the layers with pages, its number of KV heads,
    whether values lie in keys in all of these layers, and the checkpoint's number of each layer.
    """
    paged = tuple(layer for layer, attention in enumerate(config.attention) if attention.has_pages)
    in_keys = all(config.attention[layer].values_in_keys for layer in paged)
    stored = tuple(map(config.stored_layer, range(config.num_layers)))
    return KVShape(config.num_layers, paged, config.num_kv_heads, in_keys, stored)
