"""Engine options, which are checked once. If vLLM has an option, its name and meaning here are vLLM's.

`EngineConfig` is frozen. A None in it stands for the default of the model or platform, which `resolved` fills in. An
option that is not implemented is refused by name, never ignored.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxengine.config.base.errors import ConfigError, printable
from jaxengine.config.base.lengths import WORDS, given_length
from jaxengine.config.base.platforms import Platform
from jaxengine.config.base.values import dtype_name, plain, read_size, whole_number
from jaxengine.config.checks import check_options
from jaxengine.config.execution.bundle import BundleOptions
from jaxengine.config.execution.compilation_config import CompilationConfig
from jaxengine.config.execution.fit import FitOptions, refuse_fit
from jaxengine.config.execution.pipeline import check_stages, read_layers
from jaxengine.config.execution.placement import PLACEMENT_READERS, PlacementOptions, checked_mesh
from jaxengine.config.execution.plugins import read_plugins
from jaxengine.config.execution.profiler_config import ProfilerConfig
from jaxengine.config.execution.recording import RecordOptions, settle_recording
from jaxengine.config.execution.step_tokens import rank_tokens, step_tokens
from jaxengine.config.extensions import extension_options
from jaxengine.config.features.capture import read_capture_layers, read_tap_names, settle_capture
from jaxengine.config.features.exact import settle_exact
from jaxengine.config.features.logits_processors import (
    processor_classes,
    processors_digest,
    read_processors,
    source_file,
)
from jaxengine.config.features.lora import LoraOptions
from jaxengine.config.features.pooler_config import PoolerConfig, read_hf_overrides
from jaxengine.config.features.speculation import SpeculativeConfig, check_speculation
from jaxengine.config.features.steering import SteeringOptions, read_steering_vectors, settle_steering
from jaxengine.config.features.structured_outputs_config import StructuredOutputsConfig
from jaxengine.config.features.training import TrainingOptions, check_training
from jaxengine.config.inputs.chat_template import TemplateOptions, read_chat_template
from jaxengine.config.inputs.encoder import EncoderOptions, settle_encoder
from jaxengine.config.inputs.multimodal import READERS, MediaOptions
from jaxengine.config.inputs.prompt_embeds import settle_prompt_embeds
from jaxengine.config.kv.compressed import check_compressed
from jaxengine.config.kv.kv_cache import check_pages, kv_dtype
from jaxengine.config.kv.kv_events import KVEventOptions, KVEventsConfig, settle_kv_events
from jaxengine.config.kv.offload import KVOffloadOptions, KVTransferConfig, settle_offload
from jaxengine.config.kv.prefix_caching import settle_snapshots
from jaxengine.config.option_names import chosen_options
from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.token_params import MAX_LOGPROBS
from jaxengine.scheduler.batches.buckets import Buckets
from jaxengine.sharding.layout import GATHER, RAGGED, MeshLayout

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

logger = logging.getLogger(__name__)

# Options that may also be written as "4k" or "4G".
SIZES = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes", "record_steps_bytes")
# Readers of structured options.
_READERS = {
    "compilation_config": CompilationConfig.read,
    "kv_events_config": KVEventsConfig.read,
    "kv_transfer_config": KVTransferConfig.read,
    "structured_outputs_config": StructuredOutputsConfig.read,
    "pooler_config": PoolerConfig.read,
    "speculative_config": SpeculativeConfig.read,
    "hf_overrides": read_hf_overrides,
    "logits_processors": read_processors,
    "chat_template": read_chat_template,
    "capture": partial(read_tap_names, "capture"),
    "capture_layers": read_capture_layers,
    "steer": partial(read_tap_names, "steer"),
    "steering_vectors": read_steering_vectors,
    "plugins": read_plugins,
    "profiler_config": ProfilerConfig.read,
    **(READERS | PLACEMENT_READERS),
}


@dataclass(frozen=True)
class EngineConfig(
    BundleOptions,
    EncoderOptions,
    FitOptions,
    KVEventOptions,
    KVOffloadOptions,
    LoraOptions,
    MediaOptions,
    PlacementOptions,
    RecordOptions,
    SteeringOptions,
    TemplateOptions,
    TrainingOptions,
):
    """Engine options, in addition to those of its base classes.

    Attributes:
      model: a GGUF file, a Hugging Face folder, or a hub id to download; a GGUF file on the hub is org/name/FILE.gguf
        or org/name:Q4_K_M. A URL that begins with s3://, gs://, https:// or file:// names a folder elsewhere, from
        which only the weights that are needed are read. None for the embedded SmolLM2-135M-Instruct.
      tokenizer: a folder with a tokenizer.json or a hub id, if not the model's own.
      tokenizer_revision: branch, tag or commit of the tokenizer on the hub.
      skip_tokenizer_init: load no tokenizer; requests use token ids instead of text.
      tokenizer_mode: "hf" for transformers' files, "mistral" for Mistral AI's own and its chat format; "auto" for the
        first that there is; "deepseek_v32", "deepseek_v4" and "deepseek_v41" for "hf" with that model's chat format;
        "inkling" for "hf".
      config_format: "hf" for config.json, "mistral" for Mistral AI's params.json, "auto" for the first that there is.
      load_format: "auto", "safetensors", "mistral" (consolidated.safetensors), "gguf", "orbax" (from `jaxengine
        convert`), or "dummy" for random weights. "runai_streamer", "fastsafetensors" and "instanttensor" mean
        "safetensors", which reads the weights of a model at a URL in ranges.
      revision: branch, tag or commit of the model on the hub.
      download_dir: folder for hub downloads, and for configuration and tokenizer of a model at a URL.
      hf_token: token for the hub; True or None for the stored one, if there is one; False for none.
      dtype: dtype of weights and activations; "auto" is float32 on CPU and bfloat16 elsewhere. "half" and "float16" run
        in bfloat16, which has the same size and float32's range.
      quantization: method of the checkpoint's quantization_config, or None. For a checkpoint without one, "int8", "fp8"
        or "int4" quantises the layers' matrices while they are loaded. "gguf" keeps the matrices of a GGUF file as they
        are stored; otherwise they are dequantised.
      kv_cache_dtype: dtype of the KV pages; "auto" uses the checkpoint's, or else dtype. "fp8" means "fp8_e4m3". "fp8"
        and "int8" have a scale per layer and KV head. "int8_per_token_head" and "fp8_per_token_head" have a scale per
        token and KV head, which needs no calibration; they run on CPUs and, as plain XLA, on GPUs other than Hopper.
      kv_cache_scales: scales of an 8-bit KV cache: a file from `jaxengine calibrate`; "calibrate" to measure them on
        random tokens at start-up; "unit" for 1; "auto" uses the checkpoint's, or else measures them.
      seed: seed of everything random that has no seed of its own.
      max_model_len: limit of prompt plus output, in tokens; "auto" or -1 for the longest that fits, at most the model's
        context. Models with longrope (Phi-3 with 128k tokens, Phi-4-mini) use their short factors if it is at most
        their original context, otherwise the long ones.
      max_num_seqs: limit of requests that run at once, per data-parallel replica. None means 32 on a CPU and 256 on
        other devices, or for encoders an eighth of max_num_batched_tokens if that is more; at most
        max_num_batched_tokens.
      max_num_batched_tokens: limit of tokens in a step, per data-parallel replica.
      block_size: tokens per page (page_size).
      gpu_memory_utilization: share of the device's memory that the engine uses. If it is not given, the KV pool on a
        CPU has room for 512 tokens of each of max_num_seqs requests, and at least for two requests of max_model_len,
        within half of the memory.
      kv_cache_memory_bytes: size of the KV pool; overrides gpu_memory_utilization.
      num_gpu_blocks_override: number of pages; overrides both.
      enable_prefix_caching: reuse the KV pages of prefixes that earlier requests have computed.
      num_state_snapshots: number of prefixes whose recurrent states are kept, for models with such states; None for a
        quarter of max_num_seqs, at least 4.
      disable_hybrid_kv_cache_manager: keep the KV of all tokens in sliding-window layers too, instead of freeing pages
        that have left the window.
      enable_chunked_prefill: let a prompt span several steps.
      long_prefill_token_threshold: limit of a prefill chunk; 0 for none.
      scheduling_policy: order of waiting requests: "fcfs", first come, first served; "priority", lowest value first;
        "fair", the client served least so far first, so that one client's many requests do not delay another's. An
        output token counts twice as much as an input token. A client is an API key of the server, or `client` in
        Python.
      async_scheduling: dispatch a step before the tokens of the previous one are read.
      enforce_eager: compile nothing at start-up; a shape is compiled when it first occurs. For debugging.
      tensor_parallel_size: devices that split the weights of a layer. If the KV heads cannot be split evenly over them,
        some of these devices split the sequences instead of the attention heads.
      replicate_kv_heads: split the heads over all of tensor_parallel_size, storing KV heads more than once.
      data_parallel_size: replicas of the weights (except experts), each with its own sequences and pages.
      enable_expert_parallel: distribute whole experts over tensor_parallel_size * data_parallel_size devices, instead
        of a slice of every expert to each device. Devices that do not divide them have room for equally many.
      all2all_backend: how tokens reach whole experts: "allgather_reducescatter" sends every token to every device;
        "ragged_all_to_all" sends it only to the devices that hold its experts. The latter is for TPUs; a CPU emulates
        it slowly, for tests.
      pipeline_parallel_size: groups of devices that each hold a range of the layers.
      pipeline_layers: number of layers of each group; None splits by the bytes of the weights.
      nnodes: number of processes of the engine, including this one; the others are started by `jaxengine worker`.
      master_addr: address on which this process listens for the others.
      master_port: port on which this process listens for the others.
      cluster_key_file: file with the secret that all processes share.
      cluster_timeout: seconds for which start-up waits for each process.
      compilation_config: step shapes to compile; a CompilationConfig or a dict of its fields.
      structured_outputs_config: how schemas are read unless a request overrides it; a dict of disable_any_whitespace,
        disable_additional_properties and lenient, with the same meaning as in a request's structured_outputs.
      compile_cache_dir: folder for compiled steps: yours, root's (read only then), or at s3:// or gs://. None uses
        $JAXENGINE_CACHE_DIR, or else jaxengine in XDG_CACHE_HOME or ~/.cache; "" stores nothing.
      max_logprobs: limit of the logprobs per token that a request may ask for, at most 1024; -1 for the whole
        vocabulary, if that is not larger than 1024.
      logprobs_mode: "raw_logprobs", "raw_logits", "processed_logprobs" or "processed_logits".
      generation_config: source of default sampling parameters: "auto", the model's generation_config.json; "vllm",
        none; or a folder with such a file.
      override_generation_config: default sampling parameters that override those, such as {"temperature": 0.5}. Its
        max_new_tokens, or that of a named folder's file, is also a limit for requests to the server.
      runner: "generate" for text, or "pooling" for embeddings, labels and scores; "auto" follows the checkpoint.
      convert: kind of pooling model to make of a checkpoint: "embed", "classify", "none" if it already is one, or
        "auto".
      pooler_config: overrides how the checkpoint pools: a dict of task, pooling_type, use_activation and dimensions.
      hf_overrides: fields that override config.json, such as {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 32768}}; see docs/serving.md. rope_scaling and rope_theta are options of
        their own as well.
      speculative_config: how drafts are proposed for each step to verify: a dict of method ("ngram", "draft_model",
        "mtp", "eagle", "eagle3", "dflash", "dspark", "grammar"), num_speculative_tokens (1 to 15), and depending on it
        prompt_lookup_max and prompt_lookup_min, or model. Output tokens are the same as without drafts.
      logits_processors: classes of your own that change logits, or their names as module:Class; see
        docs/sampling_params.md.
      capture: activations that requests may ask for (SamplingParams.capture), by names such as "residual:3",
        "attention_output:*", "mlp_output:0-5", "router_logits:2" or "final_norm".
      capture_layers: layers whose hidden states requests may ask for (return_hidden_states), counted as transformers
        does: 0 for the embeddings, n for the output of layer n, and -1, the last, after the final norm.
      rl_exact: compute every token with the same order of operations, so that its log-probability has the same bits in
        any batch and chunk, and in jaxengine.rl.forward(exact=True). Slower, and on one CPU device only.
      plugins: modules or .py files that register model families of your own, in every process of the engine; see
        docs/models.md. A plugin is code: name only what you would run.
      stream_interval: number of tokens that a stream sends together; the first and the last are sent at once.
      sleep_idle_seconds: seconds without a request after which the engine sleeps at level 1, which frees device
        memory; the next request wakes it. None for never. Not for `LLM`; see docs/reinforcement_learning.md.
      profiler_config: a dict of profiler_dir, the folder into which jax.profiler writes profiles. It enables
        /start_profile and /stop_profile (`start_profile` and `stop_profile` in Python). If there are several hosts,
        only the first is profiled.
      disable_log_stats: log no periodic statistics, and show no progress bars at start-up.
      enable_mfu_metrics: count the operations and bytes of steps (vllm:estimated_...). See docs/serving.md.
    """

    model: str | None = None
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    skip_tokenizer_init: bool = False
    tokenizer_mode: str = "auto"
    config_format: str = "auto"
    load_format: str = "auto"
    revision: str | None = None
    download_dir: str | None = None
    hf_token: str | bool | None = dataclasses.field(default=None, repr=False)
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_scales: str = "auto"
    seed: int = 0
    max_model_len: int | None = dataclasses.field(default=None, metadata={"words": WORDS})
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    num_state_snapshots: int | None = None
    disable_hybrid_kv_cache_manager: bool = False
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    async_scheduling: bool = True
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    replicate_kv_heads: bool = False
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    all2all_backend: str = GATHER
    pipeline_parallel_size: int = 1
    pipeline_layers: tuple[int, ...] | None = None
    nnodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    cluster_key_file: str | None = None
    cluster_timeout: int = 300
    compilation_config: CompilationConfig = CompilationConfig()
    structured_outputs_config: StructuredOutputsConfig = StructuredOutputsConfig()
    compile_cache_dir: str | None = None
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: PoolerConfig | None = None
    hf_overrides: Mapping[str, Any] | None = None
    speculative_config: SpeculativeConfig | None = None
    logits_processors: tuple[str, ...] = dataclasses.field(default=(), metadata={"nargs": "+"})
    capture: tuple[str, ...] | None = None
    capture_layers: tuple[int, ...] | None = None
    rl_exact: bool = False
    plugins: tuple[str, ...] = ()
    stream_interval: int = 1
    sleep_idle_seconds: float | None = None
    profiler_config: ProfilerConfig | None = None
    disable_log_stats: bool = False
    enable_mfu_metrics: bool = False

    def __post_init__(self):
        """Convert each field to the form in which it is stored, then check all options. Raises ConfigError, which names
        the option.
        """
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, self._read(field))
        check_options(self)
        if self.pipeline_layers is not None:
            layers = read_layers(self.pipeline_layers, self.pipeline_parallel_size)
            object.__setattr__(self, "pipeline_layers", layers)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Return a config made of keyword options, in which earlier names of options are translated.

        Raises ConfigError, which names the option, for an unknown or unimplemented one, and for a value that is not
        allowed.
        """
        return cls(**chosen_options({field.name for field in dataclasses.fields(cls)}, options))

    def resolved(
        self, model: ModelConfig, platform: Platform, pictures: Mapping[str, tuple[int, int]] | None = None
    ) -> ResolvedConfig:
        """Return a config with all defaults filled in for a model and platform. Its limits are those of one replica.

        pictures: sizes of the media items, as `sizes` of settle_encoder takes them; only needed for a model with a
        vision tower. compile_cache_dir becomes "" if a logits processor's code cannot be hashed. Raises ConfigError if
        values contradict each other, the model or the platform, or if `fit` is set.
        """
        refuse_fit(self.fit)
        longest, vocab_size = model.max_position_embeddings, model.vocab_size
        if self.max_logprobs == -1 and vocab_size > MAX_LOGPROBS:
            problem = f"max_logprobs is -1, the whole vocabulary, which has {vocab_size} tokens"
            why = "each step with logprobs sorts as many for every row"
            raise ConfigError.because("max_logprobs", problem, f"give at most {MAX_LOGPROBS}, as {why}")
        if (given := given_length(self.max_model_len)) is not None and given > longest:
            raise ConfigError("max_model_len", self.max_model_len, f"at most {longest}, the model's context length")
        max_model_len = given or longest
        asked, usual = self.max_num_batched_tokens, platform.max_num_batched_tokens
        max_num_seqs = self.max_num_seqs or platform.seqs_of(model.is_causal, asked or usual)
        # A token that attends to later tokens needs them in its step.
        chunks = self.enable_chunked_prefill and model.is_causal, self.long_prefill_token_threshold
        tokens = step_tokens(asked, usual, max_num_seqs, max_model_len, *chunks)
        if platform.name == "tpu" and any(layer.window and not layer.causal for layer in model.attending):
            problem = f"{model.architecture} attends to windows on both sides of a token, which the TPU kernel does not"
            raise ConfigError.because("model", problem, "serve it on a CPU or a GPU")
        check_stages(self.pipeline_parallel_size, self.pipeline_layers, model.num_layers)
        if self.enable_expert_parallel and model.experts is None:
            raise ConfigError("enable_expert_parallel", True, f"False: {model.architecture} has no experts")
        if self.all2all_backend == RAGGED and platform.name not in ("tpu", "cpu"):
            allowed = f"{GATHER} on CUDA devices, where XLA's ragged all-to-all is untested"
            raise ConfigError("all2all_backend", RAGGED, allowed)
        mesh = checked_mesh(self.mesh_layout(model), self.decode_context_parallel_size)
        # Ranks that split a batch share its limits.
        max_num_seqs = -(-max_num_seqs // mesh.attn)
        tokens = rank_tokens(tokens, asked, mesh.attn, max_model_len, chunks[0])
        dtype = platform.dtype if self.dtype == "auto" else self.dtype
        chosen = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        chosen.update(
            dtype=dtype,
            kv_cache_dtype=kv_dtype(self.kv_cache_dtype, model.quantization, dtype, platform.name),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=tokens,
            enable_chunked_prefill=chunks[0],
            compilation_config=self.compilation_config.divided(mesh.attn),
            block_size=self.block_size or platform.page_size,
            **settle_snapshots(chosen, model, max_num_seqs),
            **settle_capture(chosen, model),
            **settle_steering(chosen, model),
            gpu_memory_utilization=self.gpu_memory_utilization or platform.memory_utilization,
            default_seq_tokens=platform.seq_tokens if self.gpu_memory_utilization is None else None,
            max_logprobs=vocab_size if self.max_logprobs == -1 else min(self.max_logprobs, vocab_size),
            runner="generate" if model.pooler is None else "pooling",
        )
        check_pages(self.kv_cache_dtype, model, chosen["kv_cache_dtype"], self.kv_cache_memory_bytes)
        chosen.update(settle_encoder(chosen, model, platform, pictures or {}) | settle_prompt_embeds(chosen, model))
        for settle in (settle_recording, settle_offload, settle_kv_events, check_speculation, check_training):
            settle(chosen, model)
        chosen.update(check_compressed(chosen, model, platform.name) | settle_exact(chosen, model, platform.name))
        # The code of a class without a source file cannot be compared in the next process, so nothing is cached.
        processors = self.logits_processors
        no_file = any(source_file(each) is None for each in processor_classes(processors))
        if no_file or (processors and processors_digest(processors) is None):
            chosen["compile_cache_dir"] = ""
        return ResolvedConfig(**chosen)

    def mesh_layout(self, model: ModelConfig) -> MeshLayout:
        """Return the mesh of one pipeline stage, of tensor_parallel_size * data_parallel_size devices. How the tensor
        size is split over its axes depends on the model's number of KV heads.
        """
        return MeshLayout.for_heads(
            model.num_kv_heads,
            tensor=self.tensor_parallel_size,
            data=self.data_parallel_size,
            replicate=self.replicate_kv_heads,
            expert_parallel=self.enable_expert_parallel,
            all2all_backend=self.all2all_backend,
        )

    def _read(self, field: dataclasses.Field[Any]) -> Any:
        """Return a field's value in the form in which it is stored: None becomes the default; names, sizes and
        structured options are converted.

        Most values of a wrong type are returned unchanged; `check_options` refuses them. Logs a warning for float16,
        which becomes bfloat16. Raises ConfigError for a value that an option's own reader refuses, or a text that is
        not a size.
        """
        name, value = field.name, plain(printable(field.name, getattr(self, field.name)))
        if value is None:
            return field.default
        if name in _READERS:
            return _READERS[name](value)
        if name in ("dtype", "kv_cache_dtype"):
            value = dtype_name(value)
            if isinstance(value, str) and value == "float16":
                logger.warning("%s: float16 is run in bfloat16, which is as large and has float32's range", name)
                return "bfloat16"
        if isinstance(value, str) and value in (words := field.metadata.get("words", {})):
            return words[value]
        if name in SIZES and isinstance(value, str):
            try:
                return read_size(value)
            except ValueError as error:
                raise ConfigError.because(name, f"{name} cannot be read: {error}", "write 4096, 4k or 4G") from None
        return whole_number(value) if str(field.type).startswith("int") else value


@dataclass(frozen=True)
class ResolvedConfig(EngineConfig):
    """EngineConfig with all defaults filled in. Its limits are those of one replica. Fields that it declares again are
    never None.

    Attributes:
      default_seq_tokens: Platform.seq_tokens, if the size of the KV pool is left to the platform; otherwise None.
      num_encoder_rows, max_encoder_patches, max_sound_patches, whole_pictures, uses_mrope: num_rows, max_patches,
        max_sound_patches, whole and mrope of jaxengine.scheduler.extensions.pictures.PictureOptions.
      attends_to_sounds, attends_to_pictures: whether the tower's rows are sounds, or images, that layers attend to
        (TowerConfig.crosses).
    """

    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    block_size: int = 0
    gpu_memory_utilization: float = 0.0
    num_state_snapshots: int = 0
    default_seq_tokens: int | None = None
    num_encoder_rows: int = 0
    max_encoder_patches: int = 0
    max_sound_patches: int = 0
    whole_pictures: bool = False
    uses_mrope: bool = False
    attends_to_sounds: bool = False
    attends_to_pictures: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of tokens that a decode may have in a step (its last token and drafts), ascending, without 1; () if
        there are no drafts.
        """
        return () if self.speculative_config is None else self.speculative_config.widths

    @property
    def max_in_flight(self) -> int:
        """Limit of steps in flight, which are dispatched and not yet collected: 2 with async_scheduling, else 1, and at
        least the number of pipeline stages.
        """
        return max(2 if self.async_scheduling else 1, self.pipeline_parallel_size)

    @property
    def ends_at_once(self) -> bool:
        """Whether every request takes a single step, which computes its whole prompt: pooling without chunked
        prefill.
        """
        return self.runner == "pooling" and not self.enable_chunked_prefill

    @property
    def fixes_pages(self) -> bool:
        """Whether num_gpu_blocks_override or kv_cache_memory_bytes sets the size of the KV pool."""
        return self.num_gpu_blocks_override is not None or self.kv_cache_memory_bytes is not None

    def buckets(self, platform: Platform, *, sections: tuple[str, ...] = ()) -> Buckets:
        """Return the shapes of steps to compile. Sizes that were not given are the platform's, but a pooling model has
        none of its decode-only shapes.

        sections: message sections that some steps have in addition to the usual ones. Raises ConfigError for sizes
        beyond the limits.
        """
        # A pooling model has no decodes; a step without prefill would only hold one-token prompts.
        platform = platform if self.runner == "generate" else dataclasses.replace(platform, decode_sizes=())
        limits = self.max_num_seqs, self.max_num_batched_tokens, self.widths
        return self.compilation_config.buckets(platform, *limits, sections=sections)

    def scheduler_config(
        self, num_pages: int, num_ranks: int = 1, windows: tuple[int | None, ...] = (None,)
    ) -> SchedulerConfig:
        """Return the scheduler's options.

        num_pages: pages of each replica. num_ranks: number of replicas, each with its own sequences and pages. windows:
        for each cache group, how many keys a token attends to, itself included; None for all.
        """
        return SchedulerConfig(
            num_pages=num_pages,
            page_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_chunked_prefill=self.enable_chunked_prefill,
            enable_prefix_caching=self.enable_prefix_caching,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            policy=self.scheduling_policy,
            num_ranks=num_ranks,
            num_micro_batches=self.pipeline_parallel_size,
            windows=windows,
            num_snapshots=self.num_state_snapshots,
            widths=self.widths,
            extensions=extension_options(self),
        )
