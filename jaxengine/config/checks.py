"""Checks of engine options that need neither a model nor a platform."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import named_path
from jaxengine.config.base.lengths import check_length, given_length
from jaxengine.config.base.values import kind_missed
from jaxengine.config.execution.bundle import check_bundle
from jaxengine.config.execution.fit import check_fit
from jaxengine.config.execution.idle_sleep import check_idle_sleep
from jaxengine.config.execution.placement import check_placement
from jaxengine.config.execution.recording import check_recording
from jaxengine.config.features.lora import check_lora
from jaxengine.config.features.pooler_config import POOLING_TASKS
from jaxengine.config.inputs.chat_template import CONTENT_FORMATS
from jaxengine.config.inputs.encoder import check_encoder
from jaxengine.config.kv.kv_cache import KV_CACHE_DTYPES, check_scales
from jaxengine.config.kv.offload import check_offload
from jaxengine.models.params.files import FORMATS
from jaxengine.scheduler.base.config import POLICIES
from jaxengine.scheduler.base.token_params import MAX_LOGPROBS
from jaxengine.sharding.layout import GATHER, RAGGED

# vLLM's names of other readers of the same files, which are read here in one way.
READERS_OF_SAFETENSORS = ("runai_streamer", "fastsafetensors", "instanttensor")
LOAD_FORMATS = ("auto", "safetensors", "mistral", "gguf", "orbax", "dummy", *READERS_OF_SAFETENSORS)
# vLLM's formats that are refused -> why.
_UNREAD_FORMATS = {
    **dict.fromkeys(("pt", "npcache"), "its files are pickles, which can run code and are never read"),
    "tensorizer": "its files have a format of their own",
    "bitsandbytes": "the checkpoint's configuration says how its weights are stored",
    "sharded_state": "its files fit one arrangement of devices; `jaxengine convert` writes such a folder",
}
# DeepSeek's choose a chat template (tokens.usual_templates.registry.TEMPLATE_MODES); Inkling's files have theirs.
TOKENIZER_MODES = (*FORMATS, "deepseek_v32", "deepseek_v4", "deepseek_v41", "inkling")
DTYPES = ("auto", "float32", "bfloat16")
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
_CHOICES = {
    "chat_template_content_format": CONTENT_FORMATS,
    "config_format": FORMATS,
    "tokenizer_mode": TOKENIZER_MODES,
    "load_format": LOAD_FORMATS,
    "dtype": DTYPES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "scheduling_policy": POLICIES,
    "logprobs_mode": LOGPROBS_MODES,
    "all2all_backend": (GATHER, RAGGED),
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", *POOLING_TASKS),
}
# Option -> its least and its largest value.
_RANGES = {
    "seed": (-(2**63), 2**63 - 1),
    "max_model_len": (2, 2**24),
    "max_num_seqs": (1, 4096),
    "max_num_batched_tokens": (1, 2**20),
    "block_size": (1, 1024),
    "kv_cache_memory_bytes": (1, 2**60),
    "num_gpu_blocks_override": (1, 2**31 - 1),
    "long_prefill_token_threshold": (0, 2**24),
    "max_logprobs": (-1, MAX_LOGPROBS),
    "num_state_snapshots": (0, 2**16),
    **{f"{kind}_parallel_size": (1, 1024) for kind in ("tensor", "data", "pipeline")},
    "decode_context_parallel_size": (1, 1024),
    "nnodes": (1, 1024),
    "stream_interval": (1, 2**20),
    "master_port": (1, 65535),
    "cluster_timeout": (1, 86400),
}


def check_options(config: Any) -> None:
    """Raise ConfigError for the first option whose value has the wrong type, is not among the choices or out of range,
    or contradicts another option.

    config: an EngineConfig. Also runs the checks of the other modules' options, which need neither a model nor a
    platform.
    """
    if isinstance(config.load_format, str) and (why := _UNREAD_FORMATS.get(config.load_format)) is not None:
        problem = f"load_format {config.load_format!r} is not read: {why}"
        raise ConfigError.because("load_format", problem, f"allowed: {', '.join(LOAD_FORMATS)}")
    for name, choices in _CHOICES.items():
        value = getattr(config, name)
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(name, value, ", ".join(choices))
    for field in dataclasses.fields(config):
        if wanted := kind_missed(getattr(config, field.name), str(field.type)):
            raise ConfigError(field.name, getattr(config, field.name), wanted)
    for name, (least, most) in _RANGES.items():
        value = given_length(config.max_model_len) if name == "max_model_len" else getattr(config, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(name, value, f"{least} to {most}")
    for name in ("bundle", "compile_cache_dir", "download_dir", "record_steps", "record_trace"):
        if (value := getattr(config, name)) is not None:
            named_path(name, value)
    check_length(config.max_model_len, config.nnodes)
    check_scales(config.kv_cache_dtype, config.kv_cache_scales)
    check_lora(config, config.nnodes)
    check_encoder(config)
    check_recording(config)
    check_offload(config, config.nnodes, config.cluster_key_file)
    check_idle_sleep(config.sleep_idle_seconds, config.nnodes)
    check_bundle(config)
    check_fit(config.fit, config.nnodes)
    check_placement(config)
    for name in ("gpu_memory_utilization", "kv_cache_metrics_sample"):
        if (share := getattr(config, name)) is not None and not 0 < share <= 1:
            raise ConfigError(name, share, "more than 0, at most 1")
    if config.all2all_backend != GATHER and not config.enable_expert_parallel:
        raise ConfigError("all2all_backend", config.all2all_backend, f"{GATHER} without enable_expert_parallel")
    if config.hf_token is not None and not isinstance(config.hf_token, (str, bool)):
        raise ConfigError.because("hf_token", "hf_token is not a string", "give the token, True, False or None")
