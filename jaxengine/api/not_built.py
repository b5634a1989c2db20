"""Methods and attributes that vLLM's engines have and this engine lacks, with the alternative to each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

_SEE = "docs/coming_from_vllm.md"
_INSIDE = "core.config and core.inputs have the engine's options, limits and tokenizer"
_WEIGHTS = (
    "update_weights(), which takes a trainer's arrays in one call; backends between devices (nccl, ipc, sparse_nccl, "
    "sharded_rdt, nccl_m2n) are not served; docs/reinforcement_learning.md"
)

_LOG = "get_metrics() has the engine's numbers; disable_log_stats switches its log line off"

# Name -> alternative.
NOT_BUILT: dict[str, str] = {
    "apply_model": "capture gives activations and steer changes them, docs/research.md",
    "checkpoint_prepare": _SEE,
    "checkpoint_restore": _SEE,
    "collective_rpc": "jaxengine.register_model and logits_processors put code of yours into the engine",
    "compute_weight_checksums": "weight_info(checksum=True)",
    "dead_error": "check_health() raises it",
    "do_log_stats": _LOG,
    "do_log_stats_with_interval": _LOG,
    "enqueue": "generate() may be called by several threads at once",
    "enqueue_chat": "chat() may be called by several threads at once",
    "finish_weight_update": _WEIGHTS,
    "from_vllm_config": "from_engine_args takes EngineArgs",
    "get_model_config": _INSIDE,
    "get_supported_tasks": _INSIDE,
    "get_vllm_config": _INSIDE,
    "get_weight_version": "weight_version and weight_info()",
    "get_world_size": "core.config has the parallel sizes",
    "input_processor": _INSIDE,
    "init_weight_transfer_engine": _WEIGHTS,
    "is_tracing_enabled": "jaxengine serve --otlp-traces-endpoint traces requests",
    "is_running": "errored says whether the engine has ended",
    "is_stopped": "errored says whether the engine has ended",
    "llm_engine": _INSIDE,
    "model_config": _INSIDE,
    "pin_lora": "max_loras says how many adapters stay on the devices",
    "request_counter": _INSIDE,
    "runner_type": _INSIDE,
    "set_weight_version": _WEIGHTS,
    "shutdown_weight_transfer_engine": _WEIGHTS,
    "start_draft_weight_update": _WEIGHTS,
    "supported_tasks": _INSIDE,
    "update_weight_version": _WEIGHTS,
    "renderer": "get_tokenizer().apply_chat_template writes prompts",
    "reset_encoder_cache": "reset_mm_cache() drops encoded images too",
    "scale_elastic_ep": _SEE,
    "set_tokenizer": "the option tokenizer names another tokenizer",
    "start_weight_update": _WEIGHTS,
    "tokenizer": "get_tokenizer()",
    "vllm_config": _INSIDE,
    "wait_for_completion": "generate() returns all outputs",
}


class NotBuiltError(NotImplementedError, AttributeError):
    """Error for a method or attribute that vLLM has and this engine lacks. It is an AttributeError, so `hasattr`
    returns False.
    """


class VllmMethods:
    """Base class of engines whose errors name the alternative to a missing method or attribute of vLLM's."""

    if not TYPE_CHECKING:  # a type checker would accept every name as an attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raise NotBuiltError, which names the alternative, for a name in NOT_BUILT; else AttributeError."""
            kind = type(self).__name__
            if name in NOT_BUILT:
                raise NotBuiltError(f"{kind}.{name} is not built; see {NOT_BUILT[name]}")
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
