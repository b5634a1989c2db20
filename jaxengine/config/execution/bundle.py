"""The options `bundle` and `bundle_key_file`: compiled steps that `jaxengine build` made, in place of compilation."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.lengths import AUTO_LENGTH
from jaxengine.config.execution.placement import PLAIN

# Options that affect neither what is compiled nor the number of pages. Options that are not listed are compared.
_FREE = """
    model tokenizer tokenizer_revision skip_tokenizer_init tokenizer_mode config_format load_format revision
    download_dir hf_token kv_cache_scales seed enable_prefix_caching scheduling_policy async_scheduling
    master_addr master_port cluster_key_file
    cluster_timeout structured_outputs_config compile_cache_dir bundle bundle_key_file generation_config
    override_generation_config chat_template hf_overrides logits_processors plugins stream_interval sleep_idle_seconds
    profiler_config disable_log_stats kernel_proof record_trace steering_vectors fit long_prefill_token_threshold
    allowed_media_domains allowed_local_media_path media_loading_thread_count media_io_kwargs media_fetch_timeout
    max_media_bytes max_image_pixels max_media_pixels mm_processor_cache_gb mm_processor_cache_type
    mm_shm_cache_max_object_size_mb kv_offloading_path kv_offloading_disk_size max_cpu_loras
    kv_cache_metrics kv_cache_metrics_sample enable_mfu_metrics
    attention_backend decode_context_parallel_size numa_bind numa_bind_nodes numa_bind_cpus
"""


@dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """The fields of EngineConfig about steps that were compiled elsewhere.

    Attributes:
      bundle: folder that `jaxengine build` wrote: its steps are loaded and none is compiled. Options on which steps
        depend must be as when it was built, and the number of KV pages is that of the bundle. Loading runs code from
        it; see docs/security.md.
      bundle_key_file: file with the secret that the bundle is signed with; a bundle with another signature, or none, is
        refused. Without it, the folder must be your own or root's, and nobody else may write to it.
    """

    bundle: str | None = None
    bundle_key_file: str | None = None


def check_bundle(config: Any) -> None:
    """Raise ConfigError for options that contradict `bundle` (enforce_eager, fit, nnodes > 1, max_model_len "auto",
    record_steps, attention_backend "XLA"), for a bundle_key_file without a bundle, and for "" as `bundle`.

    config: an EngineConfig.
    """
    if config.bundle is None:
        if config.bundle_key_file is not None:
            raise ConfigError.because("bundle_key_file", "bundle_key_file is given, but no bundle", "give bundle, too")
        return
    if not config.bundle:
        raise ConfigError("bundle", config.bundle, "a folder that `jaxengine build` wrote")
    for name, bad, why in (
        ("enforce_eager", config.enforce_eager, "which compiles steps when they first occur"),
        ("fit", config.fit, "which chooses sizes"),
        ("nnodes", config.nnodes > 1, "and bundles are for one process"),
        ("max_model_len", config.max_model_len == AUTO_LENGTH, "which is found by compiling"),
        ("record_steps", config.record_steps is not None, "whose steps copy what they compute"),
        ("attention_backend", config.attention_backend == PLAIN, "and bundles have the platform's own kernels"),
    ):
        if bad:
            problem = f"a bundle is given, but also {name} ({getattr(config, name)!r}), {why}"
            raise ConfigError.because(name, problem, "leave one out")


def compiled_options(config: Any) -> dict[str, Any]:
    """Return the options of a resolved config that decide what is compiled or the number of pages, by name, as JSON
    values.
    """
    return {
        field.name: _plain(getattr(config, field.name)) for field in fields(config) if field.name not in _FREE.split()
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON values: a dataclass becomes a dict without its field `model`, a tuple a list, and another
    object its repr.
    """
    if is_dataclass(value) and not isinstance(value, type):
        # The location of a draft model's files does not affect the programs.
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.name != "model"}
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
