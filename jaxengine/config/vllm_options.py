"""Options of vLLM that this engine does not have.

The names are those of vLLM 0.33's EngineArgs and of its server's FrontendArgs, with a few of earlier versions that
programs still use. Each option is in one table: `HARMLESS` options do not affect results (the table gives the reason);
`NOT_BUILT` options are refused unless they have a value that has no effect; `ELSEWHERE` options belong to other
commands.
"""

from __future__ import annotations

import logging
import math
from typing import Any, cast

from jaxengine.config.base.errors import ConfigError, not_built
from jaxengine.config.base.values import kind_missed
from jaxengine.config.features.pooler_config import EARLIER as POOLER_NAMES
from jaxengine.config.features.speculation import FLAT

logger = logging.getLogger(__name__)

_XLA = "XLA makes the exchanges between devices"
_NO_CODE = "no code of a model is run, whatever its folder holds"
_LOADER = "weights are mapped and go to their devices one by one"
_COMPILED = "every step is compiled whole before anything is served"
_LOGGED = "requests have a line each, /health, /live, /ping, /metrics and /status.json only when they fail"
_HEADERS = "jaxengine serve --max-header-bytes bounds all headers together"
_EXECUTOR = "one process runs all devices of its host; nnodes is for more hosts"

HARMLESS: dict[str, str] = {
    "aggregate_engine_logging": "all replicas belong to one engine with one log line",
    "allow_deprecated_quantization": "no quantisation method is deprecated",
    "calculate_kv_scales": "scales missing from the checkpoint are measured at start, see kv_cache_scales",
    "code_revision": _NO_CODE,
    "data_parallel_backend": _EXECUTOR,
    "disable_cascade_attn": "there is no cascade attention",
    "disable_custom_all_reduce": _XLA,
    "disable_nccl_for_dp_synchronization": _XLA,
    "distributed_executor_backend": _EXECUTOR,
    "enable_flashinfer_autotune": "there are no FlashInfer kernels",
    "enable_flash_late_interaction": "vectors of tokens are compared in one way only",
    "enable_sleep_mode": "every engine has sleep and wake_up",
    "fail_on_environ_validation": "JAXENGINE_CACHE_DIR is the one option that the environment may set",
    "ignore_patterns": "only the files that are needed are downloaded",
    "jit_monitor_mode": "nothing is compiled while serving, and jaxengine:compilations_since_ready counts",
    "jit_monitor_verbose": "nothing is compiled while serving, and jaxengine:compilations_since_ready counts",
    "mamba_cache_mode": "see num_state_snapshots",
    "max_parallel_loading_workers": _LOADER,
    "optimization_level": _COMPILED,
    "prefix_caching_hash_algo": "prefixes are identified by SHA-256",
    "pt_load_map_location": _LOADER,
    "safetensors_load_strategy": _LOADER,
    "safetensors_prefetch_block_size": _LOADER,
    "safetensors_prefetch_num_threads": _LOADER,
    "served_model_name": "it is an option of the server: jaxengine serve --served-model-name",
    "show_hidden_metrics_for_version": "no metric is hidden",
    "skip_mm_profiling": "nothing is profiled",
    "swap_space": "see kv_offloading_size and preemption_mode",
    "trust_remote_code": _NO_CODE,
    "use_tqdm_on_load": "disable_log_stats switches progress bars off",
    "watchdog_config": "the server watches its engine: jaxengine serve --engine-hang-timeout",
    # Of the server.
    "disable_access_log_for_endpoints": _LOGGED,
    "disable_uvicorn_access_log": "jaxengine serve --disable-access-log switches it off",
    "enable_log_deltas": "outputs are not logged",
    "enable_offline_docs": "the page at /docs loads nothing from other hosts",
    "enable_prompt_tokens_details": "usage always has prompt_tokens_details",
    "enable_request_id_headers": "every answer has X-Request-Id",
    "enable_scale_out": "/inference/v1/generate is always served",
    "enable_server_load_tracking": "/load is always available",
    "enable_ssl_refresh": "files of a certificate that have changed are always read again",
    "h11_max_header_count": _HEADERS,
    "h11_max_incomplete_event_size": _HEADERS,
    "log_error_stack": "faults of the server are always logged with their stacks",
    "ssl_cert_reqs": "with ssl_ca_certs clients must present a certificate",
    "trust_request_mm_kwargs": "mm_processor_kwargs of requests are always read, within max_media_pixels",
    "uvicorn_log_level": _LOGGED,
    # Of earlier versions.
    "disable_frontend_multiprocessing": "the engine always has a process of its own",
    "disable_log_requests": "requests are logged with enable_log_requests only",
    "guided_decoding_backend": "grammars are llguidance's",
    "max_seq_len_to_capture": _COMPILED,
    "use_v2_block_manager": "there is only one block manager",
}

# Options of other commands, with their flags.
ELSEWHERE: dict[str, str] = {
    "enable_auto_tool_choice": "jaxengine serve --enable-auto-tool-choice",
    "enable_log_requests": "jaxengine serve --enable-log-requests",
    "grpc": "jaxengine serve --grpc-port",
    "headless": "jaxengine worker --node-rank",
    "lora_modules": "jaxengine serve --lora-modules",
    "max_log_len": "jaxengine serve --max-log-len",
    "max_num_queued_reqs": "jaxengine serve --max-num-queued-reqs",
    "max_num_queued_tokens": "jaxengine serve --max-num-queued-tokens",
    "node_rank": "jaxengine worker --node-rank",
    "otlp_traces_endpoint": "jaxengine serve --otlp-traces-endpoint",
    "reasoning_parser": "jaxengine serve --reasoning-parser",
    "shutdown_timeout": "jaxengine serve --shutdown-timeout",
    "tool_call_parser": "jaxengine serve --tool-call-parser",
}

_SWITCHES_ELSEWHERE = ("enable_auto_tool_choice", "enable_log_requests", "grpc", "headless")

# Options of earlier vLLM versions or of transformers, with their replacements.
GONE: dict[str, str] = {
    "lora_extra_vocab_size": "vLLM has removed it: adapters add no tokens to the vocabulary; merge one that does",
    "quantization_param_path": "vLLM has removed it: kv_cache_scales takes a file that jaxengine calibrate wrote",
    "torch_dtype": "it is called dtype",
}

# Earlier names of options, which EngineConfig.from_options reads.
EARLIER = frozenset((*POOLER_NAMES, *FLAT))

_SWITCHES = """
    cudagraph_metrics data_parallel_external_lb data_parallel_hybrid_lb
    data_parallel_multi_port_external_lb disable_sliding_window enable_batch_sharded_sampling
    enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_fault_tolerance
    enable_hc_sp enable_layerwise_nvtx_tracing
    enable_logging_iteration_details enable_mamba_cache_stochastic_rounding
    enable_mamba_shared_prefix_checkpoint enable_mixed_moe_lora_format
    enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend
    enable_shm_tensor_arena enable_tower_connector_lora
    fully_sharded_loras interleave_mm_strings kv_sharing_fast_prefill
    long_prefill_token_threshold_adaptive mm_encoder_only monokernel ray_workers_use_nsight
    sleep_mode_offload_cudagraph specialize_active_lora tokens_only
    use_fp64_gumbel use_replayssm
    dcp_q_replicate
    allow_credentials enable_log_outputs
"""
_UNSET = """
    additional_config attention_config
    aux_output_config collect_detailed_traces cp_kv_cache_interleave_size cpu_distributed_timeout_seconds
    cpu_offload_params custom_histogram_buckets data_parallel_address data_parallel_rank data_parallel_rpc_port
    data_parallel_size_local data_parallel_start_rank dcp_comm_backend default_mm_loras device_ids diffusion_config
    distributed_timeout_seconds ec_manager_config ec_transfer_config elastic_ep_max_dp_size engram_config eplb_config
    fault_tolerance_config gdn_prefill_backend hf_config_path io_processor_plugin ir_op_priority
    kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype_skip_layers
    log_config_file log_level logging_config
    lora_target_modules mamba_block_size mamba_config mamba_ssu_algorithm
    max_lora_cls_labels max_num_active_seqs max_num_scheduled_tokens mm_encoder_attn_backend
    mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
    model_class_overrides model_loader_extra_config model_weights offload_params
    prefix_match_unit quantization_config
    reasoning_config reasoning_parser_plugin scheduler_cls sleep_preserve_parameter_names
    video_pruning_rate
    watermark_config weight_transfer_config worker_extension_cls
    fingerprint_value prompt_adapters reasoning_effort_map ssl_ciphers tool_parser_plugin
    tool_server tool_strict_level
"""
# Of these, and of HARMLESS, options whose flags take several words.
_LISTS = """
    collect_detailed_traces cpu_offload_params device_ids ignore_patterns kv_cache_dtype_skip_layers lora_target_modules
    offload_params sleep_preserve_parameter_names
"""
LISTS = frozenset(_LISTS.split())
# Name -> values that have no effect, besides None, False and empty ones.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "anthropic_disabled_thinking_effort": ("auto", "none"),
    "allowed_headers": (["*"],),
    "allowed_methods": (["*"],),
    "cohere_format": ("cmd4",),
    "cohere_is_reasoning_model": (True,),
    "cpu_offload_gb": (0,),
    "dbo_decode_token_threshold": (32,),
    "dbo_prefill_token_threshold": (512,),
    "data_parallel_supervisor_port": (9256,),
    "dcp_kv_cache_interleave_size": (1,),
    "dp_supervisor_probe_failure_threshold": (3,),
    "dp_supervisor_probe_interval_s": (5,),
    "dp_supervisor_probe_timeout_s": (5,),
    "dp_sync_interval": (16,),
    "expert_placement_strategy": ("linear",),
    "fingerprint_mode": ("full", "none"),
    "kv_offloading_backend": ("native",),
    "linear_backend": ("auto",),
    "lora_dtype": ("auto",),
    "mamba_backend": ("triton",),
    "mamba_cache_dtype": ("auto",),
    "mamba_cache_philox_rounds": (0,),
    "mamba_ssm_cache_dtype": ("auto", "float32"),
    "mm_device_do_normalize": (True,),
    "mm_encoder_fp8_scale_save_margin": (1.5,),
    "mm_hasher_algorithm": ("blake3",),
    "mm_ipc_gpu_memory_gb": (0,),
    "mm_processor_device": ("auto",),
    "mm_tensor_ipc": ("direct_rpc",),
    "model_impl": ("auto", "vllm"),
    "moe_backend": ("auto",),
    "offload_backend": ("auto",),
    "offload_group_size": (0,),
    "offload_num_in_group": (1,),
    "offload_prefetch_step": (1,),
    "per_request_spec_decode_metrics": ("none",),
    "performance_mode": ("balanced",),
    "prefill_context_parallel_size": (1,),
    "prefill_schedule_interval": (1,),
    "prefix_cache_retention_interval": (0,),
    "renderer_num_workers": (1,),
    "replayssm_buffer_len": (16,),
    "scheduler_reserve_full_isl": (True,),
    "sleep_mode_backend": ("cumem",),
    "sparse_indexer_topk_backend": ("auto",),
    "swa_bounded_replay": (True,),
    "ubatch_size": (0,),
    "video_pruning_method": ("evs",),
    "watermark": (0,),
    "worker_cls": ("auto",),
}
# Switches that are on by default; switching them off would have an effect.
_ON = frozenset(name for name, values in _DEFAULTS.items() if values == (True,))

NOT_BUILT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SWITCHES.split(), (False,)),
    **dict.fromkeys(_UNSET.split(), (None,)),
    **_DEFAULTS,
}
# Types of the values of HARMLESS options that are no switches, or the values themselves.
KINDS: dict[str, str | tuple[Any, ...]] = {
    **dict.fromkeys(("code_revision", "disable_access_log_for_endpoints", "distributed_executor_backend"), "str"),
    **dict.fromkeys(("guided_decoding_backend", "show_hidden_metrics_for_version"), "str"),
    **dict.fromkeys(("ignore_patterns", "served_model_name"), "str | list"),
    "data_parallel_backend": ("mp", "ray"),
    "jit_monitor_mode": ("warn", "error"),
    "mamba_cache_mode": ("none", "align", "all"),
    "optimization_level": (0, 1, 2, 3),
    "prefix_caching_hash_algo": ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "sha256_cbor_64bit", "builtin"),
    "pt_load_map_location": "str | dict",
    "safetensors_load_strategy": ("lazy", "eager", "prefetch", "torchao"),
    "ssl_cert_reqs": (0, 1, 2),
    "swap_space": "float",
    "uvicorn_log_level": ("critical", "error", "warning", "info", "debug", "trace"),
    "watchdog_config": "dict",
    **dict.fromkeys(("h11_max_header_count", "h11_max_incomplete_event_size", "max_seq_len_to_capture"), "int"),
    **dict.fromkeys(("safetensors_prefetch_block_size", "safetensors_prefetch_num_threads"), "int"),
    "max_parallel_loading_workers": "int",
}
NAMES = frozenset((*HARMLESS, *ELSEWHERE, *NOT_BUILT, *GONE, *EARLIER))

# Names that are not suggested for a misspelt one: they are refused, or change nothing here.
WITHOUT_EFFECT = NAMES - EARLIER


def is_switch(name: str) -> bool:
    """Return whether vLLM's option `name`, which the engine does not have, takes no value on the command line (--NAME
    or --no-NAME); False for unknown names.
    """
    harmless = name in HARMLESS and name not in KINDS
    return harmless or name in _SWITCHES_ELSEWHERE or isinstance(NOT_BUILT.get(name, (None,))[0], bool)


def settle(name: str, value: Any) -> None:
    """Log the reason if the option `name`, one of NAMES, is harmless and `value` asks for something; do nothing for a
    value without effect. Of a dict of options the same is done with each.

    Raises ConfigError for a value of an unsupported option that would have an effect, for one that vLLM would not take,
    and for an option that was removed or belongs to another command.
    """
    if isinstance(value, dict) and NOT_BUILT.get(name) == (None,):  # of options, such as kernel_config
        for key in filter(HARMLESS.__contains__, value):
            settle(key, value[key])
        others = ((key, each) for key, each in value.items() if key not in HARMLESS)
        value = {key: each for key, each in others if not asks_for_nothing(str(key), each)}
    if asks_for_nothing(name, value):
        return
    if name in HARMLESS:
        kind, given = KINDS.get(name, "bool"), cast(Any, value)
        if (wanted := kind_missed(value, kind)) or kind in ("int", "float") and not (kind == "int") <= given < math.inf:
            raise ConfigError(name, value, wanted or ("at least 1" if kind == "int" else "at least 0"))
        logger.info("%s=%r changes nothing here: %s", name, value, HARMLESS[name])
    elif name in GONE:
        raise ConfigError.because(name, f"there is no option {name}", GONE[name])
    elif name in ELSEWHERE:
        raise ConfigError.because(
            name, f"{name} is not an option of the engine", f"it belongs to another command: {ELSEWHERE[name]}"
        )
    else:
        raise not_built(name, name, value, NOT_BUILT[name])


def asks_for_nothing(name: str, value: Any) -> bool:
    """Return whether a value of the option `name` has no effect: None, empty, False for an option that is not on by
    default, or one of the option's values in NOT_BUILT.
    """
    if value is None or (value is False and name not in _ON):
        return True
    if isinstance(value, (str, dict, list, tuple, set)) and not value:
        return True
    kinds = {bool: (bool,), int: (int, float), float: (int, float)}
    defaults = NOT_BUILT.get(name, ())
    return any(type(value) in kinds.get(type(each), (type(each),)) and value == each for each in defaults)
