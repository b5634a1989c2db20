"""Options that record what an engine does and find devices that compute wrongly.

record_steps: an engine writes the inputs and results of its last steps to files, for `jaxengine replay`. kernel_proof:
kernels are compared with plain XLA before the engine serves. record_trace: an engine writes when requests came and how
long they were, for `jaxengine simulate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import is_writable_folder, named_path, writable_folder

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

DETAILS = ("tokens", "layers")
PROOFS = ("quick", "full", "off")
# Options that a record leaves out: secrets, code to run, folders of a machine, and what does not affect what a step
# computes.
_LEFT_OUT = """
    tokenizer tokenizer_revision skip_tokenizer_init download_dir hf_token plugins logits_processors chat_template
    generation_config override_generation_config compile_cache_dir bundle bundle_key_file kernel_proof
    kv_cache_scales
    gpu_memory_utilization
    kv_cache_memory_bytes num_gpu_blocks_override enable_prefix_caching enable_chunked_prefill
    long_prefill_token_threshold scheduling_policy async_scheduling enforce_eager pipeline_parallel_size pipeline_layers
    nnodes master_addr master_port cluster_key_file cluster_timeout structured_outputs_config pooler_config
    speculative_config stream_interval sleep_idle_seconds fit profiler_config disable_log_stats record_steps
    kv_events_config kv_cache_metrics kv_cache_metrics_sample enable_mfu_metrics
    record_steps_limit record_steps_bytes record_trace default_seq_tokens steering_vectors allowed_media_domains
    allowed_local_media_path media_loading_thread_count media_io_kwargs media_fetch_timeout media_proxy
    max_media_bytes max_image_pixels max_media_pixels mm_processor_cache_gb mm_processor_cache_type
    mm_shm_cache_max_object_size_mb
    attention_backend decode_context_parallel_size numa_bind numa_bind_nodes numa_bind_cpus
"""


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """The fields of EngineConfig about recorded steps and requests, and the proof of kernels.

    Attributes:
      record_steps: a folder for the last steps, which `jaxengine replay` runs again on this or another machine; see
        docs/troubleshooting.md. Each step then waits for the one before it and for the disk. The folder then contains
        users' prompts and answers.
      record_steps_limit: steps to keep; the oldest makes room for the next.
      record_steps_bytes: bytes that all of them may take; a step that is larger alone is left out.
      record_steps_detail: "tokens" keeps inputs, pages written, logits and tokens; "layers" also the hidden states
        after each layer, whose steps are compiled for that.
      kernel_proof: at the first start on a kind of device, run the kernels beside plain XLA before serving, and replace
        those that fail or are slower: "quick", those of the largest and smallest steps; "full", those of all steps,
        with more mixes of lengths; "off", none. CPUs have no such kernels; see docs/troubleshooting.md.
      record_trace: a new file that records when each request came, its lengths and the prefixes that it shares, for
        `jaxengine simulate`; see docs/simulate.md. It contains no text and no token ids. If the file exists, a number
        is added to its name.
    """

    record_steps: str | None = None
    record_steps_limit: int = 16
    record_steps_bytes: int = 1 << 30
    record_steps_detail: str = "tokens"
    kernel_proof: str = "quick"
    record_trace: str | None = None


def check_recording(options: RecordOptions) -> None:
    """Raise ConfigError for a value out of range or not among the choices, and for record_steps_limit, _bytes or
    _detail other than the default without record_steps, for an empty record_steps, and for a record_trace without a
    file's name.
    """
    if options.kernel_proof not in PROOFS:
        raise ConfigError("kernel_proof", options.kernel_proof, ", ".join(PROOFS))
    for name, most in (("record_steps_limit", 10**8), ("record_steps_bytes", 2**60)):
        if not 1 <= (value := getattr(options, name)) <= most:
            raise ConfigError(name, value, f"1 to {most}")
    if options.record_steps_detail not in DETAILS:
        raise ConfigError("record_steps_detail", options.record_steps_detail, ", ".join(DETAILS))
    if options.record_trace is not None and not Path(options.record_trace).name:
        raise ConfigError("record_trace", options.record_trace, "the name of a new file")
    if options.record_steps is None:
        for name in ("record_steps_limit", "record_steps_bytes", "record_steps_detail"):
            if (value := getattr(options, name)) != getattr(RecordOptions, name):
                raise ConfigError.because(name, f"{name} is {value!r}, but nothing is recorded", "give record_steps")
    elif not options.record_steps:
        raise ConfigError("record_steps", options.record_steps, "the name of a folder")


def settle_recording(options: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise ConfigError for record_steps with an engine whose steps cannot be recorded, for record_trace with a pooling
    model, and for a folder of steps or of the trace that cannot be written.

    options: options of the engine, by name. Steps cannot be recorded for pooling models, models with a tower, without
    keys and values or with pages of different sizes, nor with adapters, drafts, logits processors, steering, trace
    replay, several pipeline stages or nodes.
    """
    if (trace := options["record_trace"]) is not None:
        if not is_writable_folder(named_path("record_trace", trace).absolute().parent):
            raise ConfigError("record_trace", trace, "a new file in a folder that can be written")
        if model.pooler is not None:
            problem = f"record_trace is given, but {model.architecture} pools and generates nothing"
            raise ConfigError.because("record_trace", problem, "leave it out")
    if (folder := options["record_steps"]) is None:
        return
    for why, is_so in (
        (f"{model.architecture} pools and generates nothing", model.pooler is not None),
        (f"{model.architecture} keeps no keys and values", not model.attending),
        (
            f"{model.architecture} takes images or sounds (language_model_only leaves them out)",
            model.tower is not None,
        ),
        (f"layers of {model.architecture} keep pages of different sizes", not model.has_equal_pages),
        ("enable_lora is given", options["enable_lora"]),
        ("speculative_config is given", options["speculative_config"] is not None),
        ("logits_processors are given", bool(options["logits_processors"])),
        ("steer is given", options["steer"] is not None),
        ("enable_trace_replay is given", options["enable_trace_replay"]),
        ("pipeline_parallel_size is more than 1", options["pipeline_parallel_size"] > 1),
        ("nnodes is more than 1", options["nnodes"] > 1),
    ):
        if is_so:
            problem = f"record_steps is given, but {why}, which is not supported yet"
            raise ConfigError.because("record_steps", problem, "leave one out")
    writable_folder("record_steps", folder)


def replayed_options(config: Any) -> dict[str, Any]:
    """Return the options of a resolved config that affect what its steps compute, by name; values that are dataclasses
    become dicts.
    """
    left_out = _LEFT_OUT.split()
    found = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in left_out}
    is_record = {name: is_dataclass(each) and not isinstance(each, type) for name, each in found.items()}
    return {name: asdict(each) if is_record[name] else each for name, each in found.items()}
