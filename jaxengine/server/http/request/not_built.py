"""Absent routes: routes of vLLM, OpenAI and Anthropic that are not built, and routes that only an option adds."""

from __future__ import annotations

_AUDIO = "models take text, images, videos and sounds, and write text; see docs/media.md and docs/audio.md"
_ONE_CALL = (
    "POST /update_weights replaces weights in one call, by a folder or by a safetensors file as its body; backends "
    "between devices (nccl, ipc, sparse_nccl, sharded_rdt, nccl_m2n) are not served; see docs/reinforcement_learning.md"
)
_TOKENS = "POST /inference/v1/generate takes and returns token ids; see docs/reinforcement_learning.md"
_LORA = "POST /v1/load_lora_adapter; see docs/lora.md"
_PAUSES = "POST /pause and /resume; see docs/reinforcement_learning.md"
_SLEEP = "POST /sleep and /wake_up; see docs/reinforcement_learning.md"
_SCORED = "POST /generative_scoring, or logprobs with logprob_token_ids of /v1/completions; see docs/serving.md"
_CONVERSATIONS = "conversations go on with previous_response_id of /v1/responses; see docs/serving.md"

# Path, which stands for all paths below it too -> what to use. The status is 404, as clients repeat calls after a 501.
NOT_BUILT: dict[str, str] = {
    # vLLM
    "/collective_rpc": "workers run no code of callers; see docs/reinforcement_learning.md for weights and sleep",
    "/fault_tolerance": "the server restarts its engine itself; see docs/serving.md",
    "/finish_weight_update": _ONE_CALL,
    "/init_weight_transfer_engine": _ONE_CALL,
    "/is_scaling_elastic_ep": "the devices are those of the start; see docs/parallelism.md",
    "/kv_event_sources": "--kv-events-config names the endpoint of events; see docs/serving.md",
    "/reset_encoder_cache": "POST /reset_mm_cache; see docs/media.md",
    "/scale_elastic_ep": "the devices are those of the start; see docs/parallelism.md",
    "/shutdown_weight_transfer_engine": _ONE_CALL,
    "/start_draft_weight_update": _ONE_CALL,
    "/start_weight_update": _ONE_CALL,
    "/v1/decisions": _SCORED,
    "/v1/realtime": _AUDIO,
    "/v1/systemone": _SCORED,
    "/weight_checker": "GET /weight_info?checksum=true; see docs/reinforcement_learning.md",
    # Trainers: SGLang's routes (slime, AReaL), TRL's server, and what SkyRL, prime-rl and AReaL add to vLLM
    "/abort_request": "POST /abort_requests, or /pause, which by default aborts all; see docs/serving.md",
    "/areal_init_weights_update_group": _ONE_CALL,
    "/areal_set_update_weight_meta": _ONE_CALL,
    "/areal_set_update_weight_meta_lora": _LORA,
    "/areal_update_weights_lora": _LORA,
    "/areal_update_weights_lora_xccl": _LORA,
    "/areal_update_weights_xccl": _ONE_CALL,
    "/batch_update_named_params": _ONE_CALL,
    "/chat": "POST /v1/chat/completions; see docs/reinforcement_learning.md",
    "/close_communicator": _ONE_CALL,
    "/continue_generation": _PAUSES,
    "/destroy_weights_update_group": _ONE_CALL,
    "/finish_session": "DELETE /v1/sessions/{id}; see docs/kv_offload.md",
    "/flush_cache": "POST /reset_prefix_cache; see docs/serving.md",
    "/generate": _TOKENS,
    "/get_server_info": "GET /server_info, with --enable-admin; see docs/serving.md",
    "/get_weight_version": "GET /weight_info; see docs/reinforcement_learning.md",
    "/health_generate": "GET /health; see docs/serving.md",
    "/init_broadcaster": _ONE_CALL,
    "/init_communicator": _ONE_CALL,
    "/init_weights_update_group": _ONE_CALL,
    "/pause_generation": _PAUSES,
    "/post_process_weights": _ONE_CALL,
    "/pull_weights": _ONE_CALL,
    "/release_memory_occupation": _SLEEP,
    "/reload_weights": _ONE_CALL,
    "/resume_memory_occupation": _SLEEP,
    "/skyrl/v1/load_lora_adapter": _LORA,
    "/update_named_param": _ONE_CALL,
    "/update_weight_version": _ONE_CALL,
    "/update_weights_from_disk": _ONE_CALL,
    "/update_weights_from_distributed": _ONE_CALL,
    "/update_weights_from_ipc": _ONE_CALL,
    "/update_weights_from_tensor": _ONE_CALL,
    "/v1/chat/completions/tokens": _TOKENS,
    "/v1/loads": "GET /load; see docs/serving.md",
    "/weights_checker": "GET /weight_info?checksum=true; see docs/reinforcement_learning.md",
    # OpenAI, some of them also vLLM's
    "/v1/assistants": _CONVERSATIONS,
    "/v1/audio/speech": _AUDIO,
    "/v1/audio/voices": _AUDIO,
    "/v1/conversations": _CONVERSATIONS,
    "/v1/fine_tuning": "models are not trained here; adapters are served, see docs/lora.md",
    "/v1/images": _AUDIO,
    "/v1/moderations": "POST /classify serves a classifier; see docs/pooling_models.md",
    "/v1/responses/compact": "ask the model for a summary in a request of its own; see docs/serving.md",
    "/v1/threads": _CONVERSATIONS,
    "/v1/vector_stores": "/v1/embeddings and /rerank serve searches; see docs/pooling_models.md",
    # Anthropic
    "/v1/complete": "/v1/messages; see docs/serving.md",
    "/v1/messages/batches": "/v1/batches, or one request to /v1/messages each; see docs/serving.md",
}


_ADMIN = "--enable-admin"
_ADAPTERS = "--enable-admin and --enable-lora"
_BATCHES = "--enable-batch-api and --batch-storage-dir"
_PROFILES = "--enable-admin and --profiler-config"
# Path -> options of `jaxengine serve` with which it is served.
SWITCHED_OFF: dict[str, str] = {
    **dict.fromkeys(("/abort_requests", "/inference/v1/abort_requests", "/get_world_size", "/server_info"), _ADMIN),
    **dict.fromkeys(("/is_paused", "/is_sleeping", "/pause", "/resume", "/sleep", "/wake_up"), _ADMIN),
    **dict.fromkeys(("/areal_continue_generation", "/areal_pause_generation", "/areal_update_weights"), _ADMIN),
    **dict.fromkeys(("/release_kv_cache_memory", "/reset_mm_cache", "/reset_prefix_cache"), _ADMIN),
    **dict.fromkeys(("/update_weights", "/weight_info"), _ADMIN),
    **dict.fromkeys(("/adapters", "/load_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _ADAPTERS),
    **dict.fromkeys(("/v1/batches", "/v1/files"), _BATCHES),
    **dict.fromkeys(("/start_profile", "/stop_profile"), _PROFILES),
    "/tokenizer_info": "--enable-tokenizer-info-endpoint",
}


def about_missing(path: str, has_route: bool) -> str | None:
    """Return the error message for a path that is in NOT_BUILT or below a path there, or that is in SWITCHED_OFF and
    has no route; None for others. A "/" at the end is ignored.

    has_route: whether the path has a route for another method: then its option is set.
    """
    plain = path.rstrip("/")
    if plain in SWITCHED_OFF and not has_route:
        return f"{plain} is only served with {SWITCHED_OFF[plain]}; see docs/serving.md"
    parts = plain.split("/")
    for count in range(len(parts), 1, -1):
        if (known := "/".join(parts[:count])) in NOT_BUILT:
            return f"{known} is not built; instead: {NOT_BUILT[known]}"
    return None
