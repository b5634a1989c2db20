"""What a user may set, checked once. Names and meaning are vLLM's wherever vLLM has the option.

`EngineConfig` is frozen; `None` in it means "as the model and platform suggest" and `resolved` fills that in. An option
that is not built yet is refused with its name, never accepted and forgotten.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxengine.config.chat_template import read_chat_template
from jaxengine.config.compilation_config import CompilationConfig
from jaxengine.config.encoder import EncoderOptions, check_encoder, settle_encoder
from jaxengine.config.errors import ConfigError
from jaxengine.config.extensions import extension_options
from jaxengine.config.kv_cache import KV_CACHE_DTYPES, check_scales, kv_dtype
from jaxengine.config.lora import LoraOptions, check_lora, check_lora_model
from jaxengine.config.multimodal import READERS, MediaOptions
from jaxengine.config.option_names import chosen_options
from jaxengine.config.pipeline import check_stages, read_layers
from jaxengine.config.platforms import Platform
from jaxengine.config.pooler_config import POOLING_TASKS, PoolerConfig, read_hf_overrides
from jaxengine.config.prefix_caching import settle_snapshots
from jaxengine.config.speculation import SpeculativeConfig, check_speculation
from jaxengine.config.step_tokens import step_tokens
from jaxengine.config.structured_outputs_config import StructuredOutputsConfig
from jaxengine.config.values import dtype_name, kind_missed, plain, read_size, whole_number
from scheduler.buckets import Buckets
from scheduler.config import POLICIES, SchedulerConfig
from scheduler.token_params import MAX_LOGPROBS
from sharding.layout import GATHER, RAGGED, MeshLayout

if TYPE_CHECKING:
    from models.config.model_config import ModelConfig

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "gguf", "orbax", "dummy")
DTYPES = ("auto", "float32", "bfloat16")
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
SIZES = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes")  # options that also take "4k" or "4G"
# Options that are more than a value.
_READERS = {
    "compilation_config": CompilationConfig.read,
    "structured_outputs_config": StructuredOutputsConfig.read,
    "pooler_config": PoolerConfig.read,
    "speculative_config": SpeculativeConfig.read,
    "hf_overrides": read_hf_overrides,
    "chat_template": read_chat_template,
    **READERS,
}


@dataclass(frozen=True)
class EngineConfig(EncoderOptions, LoraOptions, MediaOptions):
    """Engine options, beside those of EncoderOptions, LoraOptions and MediaOptions.

    Attributes:
      model: a GGUF file, a Hugging Face folder, or a hub id to download, of a GGUF file as org/name/FILE.gguf or
        org/name:Q4_K_M; None for the embedded SmolLM2-135M-Instruct.
      tokenizer: a folder with a tokenizer.json or a hub id, when it is not the model's own.
      tokenizer_revision: the branch, tag or commit of the tokenizer on the hub.
      skip_tokenizer_init: token ids in and out, no text.
      load_format: "auto", "safetensors", "gguf", "orbax" (of `jaxengine convert`), or "dummy" for random weights.
      revision: the hub's branch, tag or commit.
      download_dir: where hub downloads go.
      hf_token: a token for the hub; True or None for the stored one, if there is any, False for none.
      dtype: of weights and activations; "auto" is float32 on CPU and bfloat16 elsewhere. "half" and "float16" are run
        in bfloat16, which is as large and has float32's range.
      quantization: what the checkpoint's quantization_config says, or None for that; of one without, "int8", "fp8" or
        "int4" rounds the matrices of layers as they are read. "gguf" keeps those of a GGUF file as they are stored;
        else they are dequantised.
      kv_cache_dtype: of the KV pages; "auto" is what the checkpoint says, or else dtype. "fp8" is "fp8_e4m3"; codes of
        fp8 and int8 have a scale for each layer and kv head. "int8_per_token_head" and "fp8_per_token_head", on CPU and
        cards without kernels of their own, have one for each token and kv head, which is nothing to measure.
      kv_cache_scales: those of codes: a file of `jaxengine calibrate`, "calibrate" to measure them at start on random
        tokens, "unit" for 1; "auto" takes the checkpoint's, or else measures.
      seed: of everything random that has no seed of its own.
      max_model_len: longest prompt and output together, in tokens. Models with longrope (Phi-3 of 128k tokens,
        Phi-4-mini) run with their short factors where it is at most their original context, else with the long ones.
      max_num_seqs: requests that run at once, in each of data_parallel_size.
      max_num_batched_tokens: tokens of one step, in each of data_parallel_size.
      block_size: tokens of one page (page_size).
      gpu_memory_utilization: share of the device's memory the engine may use, and does. A CPU's memory is not filled
        unless this is given: the KV pool then has room for 512 tokens of each of max_num_seqs requests, at least for
        two requests of max_model_len, within half of the memory.
      kv_cache_memory_bytes: size of the KV pool; overrides gpu_memory_utilization.
      num_gpu_blocks_override: number of pages; overrides both.
      enable_prefix_caching: reuse the KV of known prefixes.
      num_state_snapshots: states of prefixes to keep, where layers have states; None for a quarter of max_num_seqs.
      disable_hybrid_kv_cache_manager: keep the KV of all tokens in layers with sliding windows too, instead of giving
        pages back as the windows leave them behind.
      enable_chunked_prefill: let a prompt span several steps.
      long_prefill_token_threshold: longest prefill chunk, 0 for no limit of its own.
      scheduling_policy: who is next: "fcfs", the first to come; "priority", of the lowest value; "fair", of the client
        that was served least, in input tokens and twice its output tokens (a client is who has a key of the server, or
        a `client` in Python), so that nobody waits behind a crowd of another's requests.
      async_scheduling: dispatch a step before the tokens of the one before are read.
      enforce_eager: no warm-up; a shape is compiled when it first occurs. For debugging.
      tensor_parallel_size: devices that split the weights of a layer. Where the model has fewer kv heads, or a number
        of them that does not divide, some of these devices split the sequences instead of the heads of attention.
      replicate_kv_heads: split the heads over all of tensor_parallel_size, storing kv heads more than once.
      data_parallel_size: times that weights are stored (but for experts), each with sequences and pages of its own.
      enable_expert_parallel: whole experts on devices of tensor_parallel_size * data_parallel_size, not slices of all.
      all2all_backend: how tokens reach whole experts: "allgather_reducescatter", every token to every device, or
        "ragged_all_to_all", to those that hold its experts. The latter is for TPUs; a CPU, which has no such exchange,
        plays it slowly, for tests.
      pipeline_parallel_size: groups of devices that each have a run of the layers.
      pipeline_layers: numbers of layers of these groups; None splits by the bytes of the weights.
      nnodes: processes of the engine, this one included; the others are started as `jaxengine worker`.
      master_addr: where this process listens for them.
      master_port: the port for that.
      cluster_key_file: a file with the secret that all of them know.
      cluster_timeout: seconds that a start-up waits for a process.
      compilation_config: which shapes are compiled; a CompilationConfig or a dict of its fields.
      structured_outputs_config: how schemas are read where a request does not say; a dict of disable_any_whitespace,
        disable_additional_properties and lenient, which mean what they do in a request's structured_outputs.
      compile_cache_dir: where compiled steps are kept, JAXENGINE_CACHE_DIR if not given, else ~/.cache/jaxengine
        (XDG_CACHE_HOME is heeded); "" keeps none. A folder of root's is only read by other users.
      max_logprobs: most logprobs of a token that a request may ask for, at most 1024; -1: the whole vocabulary, where
        it is no larger.
      logprobs_mode: "raw_logprobs", "raw_logits", "processed_logprobs" or "processed_logits".
      generation_config: "auto" takes default sampling parameters from the model's generation_config.json, "vllm" none,
        the name of a folder those of its file.
      override_generation_config: default sampling parameters that go before those, such as {"temperature": 0.5}.
      chat_template: a Jinja template to use instead of the model's, or the name of a file that holds it.
      runner: "generate" text, or answer with embeddings, labels and scores, "pooling"; "auto" is as the checkpoint is.
      convert: what a pooling model is made of a checkpoint: "embed", "classify", "none" where it is one, or "auto".
      pooler_config: how it pools, over what the checkpoint says: a dict of task, pooling_type, use_activation and
        dimensions.
      hf_overrides: fields to put over those of config.json: architectures, and what says how a model pools.
      speculative_config: drafts that steps verify, a dict of method ("ngram", "draft_model", "mtp", "eagle3",
        "grammar"), num_speculative_tokens (1 to 7), and as the method has it prompt_lookup_max and _min, or model.
        Tokens are those without.
      disable_log_stats: no periodic log line, no progress bars at start-up.
    """

    model: str | None = None
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    revision: str | None = None
    download_dir: str | None = None
    hf_token: str | bool | None = dataclasses.field(default=None, repr=False)
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_scales: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
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
    chat_template: str | None = None
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: PoolerConfig | None = None
    hf_overrides: Mapping[str, Any] | None = None
    speculative_config: SpeculativeConfig | None = None
    disable_log_stats: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, self._read(field))
        for name, choices in (
            ("load_format", LOAD_FORMATS),
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("scheduling_policy", POLICIES),
            ("logprobs_mode", LOGPROBS_MODES),
            ("all2all_backend", (GATHER, RAGGED)),
            ("runner", ("auto", "generate", "pooling")),
            ("convert", ("auto", "none", *POOLING_TASKS)),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(name, getattr(self, name), ", ".join(choices))
        for field in dataclasses.fields(self):
            if wanted := kind_missed(getattr(self, field.name), str(field.type)):
                raise ConfigError(field.name, getattr(self, field.name), wanted)
        for name, least, most in (
            ("seed", -(2**63), 2**63 - 1),
            ("max_model_len", 2, 2**24),
            ("max_num_seqs", 1, 4096),
            ("max_num_batched_tokens", 1, 2**20),
            ("block_size", 1, 1024),
            ("kv_cache_memory_bytes", 1, 2**60),
            ("num_gpu_blocks_override", 1, 2**31 - 1),
            ("long_prefill_token_threshold", 0, 2**24),
            ("max_logprobs", -1, MAX_LOGPROBS),
            ("num_state_snapshots", 0, 2**16),
            *((f"{kind}_parallel_size", 1, 1024) for kind in ("tensor", "data", "pipeline")),
            ("nnodes", 1, 1024),
            ("master_port", 1, 65535),
            ("cluster_timeout", 1, 86400),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(name, value, f"{least} to {most}")
        check_scales(self.kv_cache_dtype, self.kv_cache_scales)
        check_lora(self, self.nnodes)
        check_encoder(self)
        if (share := self.gpu_memory_utilization) is not None and not 0 < share <= 1:
            raise ConfigError("gpu_memory_utilization", share, "more than 0, at most 1")
        if self.all2all_backend != GATHER and not self.enable_expert_parallel:
            raise ConfigError("all2all_backend", self.all2all_backend, f"{GATHER} without enable_expert_parallel")
        if self.hf_token is not None and not isinstance(self.hf_token, (str, bool)):
            raise ConfigError.because("hf_token", "hf_token is no text", "give the token, True, False or None")
        if self.override_generation_config is not None and not isinstance(self.override_generation_config, Mapping):
            raise ConfigError("override_generation_config", self.override_generation_config, "a dict, or None")
        if self.pipeline_layers is not None:
            layers = read_layers(self.pipeline_layers, self.pipeline_parallel_size)
            object.__setattr__(self, "pipeline_layers", layers)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """A config from keyword options; one that is unknown or not built yet is refused with its name."""
        return cls(**chosen_options({field.name for field in dataclasses.fields(cls)}, options))

    def resolved(
        self, model: ModelConfig, platform: Platform, pictures: Sequence[tuple[int, int]] = ()
    ) -> ResolvedConfig:
        """This config with nothing left open. pictures: sizes of settle_encoder.

        Raises:
          ConfigError: values that do not go together, or that the model cannot do.
        """
        longest, vocab_size = model.max_position_embeddings, model.vocab_size
        if self.max_logprobs == -1 and vocab_size > MAX_LOGPROBS:
            problem = f"max_logprobs is -1, the whole vocabulary, which has {vocab_size} tokens"
            raise ConfigError.because("max_logprobs", problem, f"give at most {MAX_LOGPROBS}")
        if self.max_model_len is not None and self.max_model_len > longest:
            raise ConfigError("max_model_len", self.max_model_len, f"at most {longest}, the model's context length")
        max_model_len = self.max_model_len or longest
        max_num_seqs = self.max_num_seqs or platform.max_num_seqs
        chunks = self.enable_chunked_prefill, self.long_prefill_token_threshold
        asked, usual = self.max_num_batched_tokens, platform.max_num_batched_tokens
        tokens = step_tokens(asked, usual, max_num_seqs, max_model_len, *chunks)
        check_stages(self.pipeline_parallel_size, self.pipeline_layers, model.num_layers)
        if self.enable_expert_parallel and model.experts is None:
            raise ConfigError("enable_expert_parallel", True, f"False: {model.architecture} has no experts")
        if self.all2all_backend == RAGGED and platform.name not in ("tpu", "cpu"):
            allowed = f"{GATHER} on CUDA devices; nobody has tried XLA's ragged all-to-all there"
            raise ConfigError("all2all_backend", RAGGED, allowed)
        check_lora_model(self, model.pooler is not None)
        mesh = self.mesh_layout(model)
        # Ranks that split one batch share its limits.
        max_num_seqs, tokens = -(-max_num_seqs // mesh.attn), -(-tokens // mesh.attn)
        dtype = platform.dtype if self.dtype == "auto" else self.dtype
        chosen = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        chosen.update(
            dtype=dtype,
            kv_cache_dtype=kv_dtype(self.kv_cache_dtype, model.quantization, dtype, platform.name),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=tokens,
            compilation_config=self.compilation_config.divided(mesh.attn),
            block_size=self.block_size or platform.page_size,
            **settle_snapshots(chosen, model, max_num_seqs),
            gpu_memory_utilization=self.gpu_memory_utilization or platform.memory_utilization,
            default_seq_tokens=platform.seq_tokens if self.gpu_memory_utilization is None else None,
            max_logprobs=vocab_size if self.max_logprobs == -1 else min(self.max_logprobs, vocab_size),
            runner="generate" if model.pooler is None else "pooling",
        )
        chosen.update(settle_encoder(chosen, model, platform, pictures))
        check_speculation(chosen, model)
        return ResolvedConfig(**chosen)

    def mesh_layout(self, model: ModelConfig) -> MeshLayout:
        """The sizes of the mesh that one pipeline stage runs on."""
        return MeshLayout.for_heads(
            model.num_kv_heads,
            tensor=self.tensor_parallel_size,
            data=self.data_parallel_size,
            replicate=self.replicate_kv_heads,
            expert_parallel=self.enable_expert_parallel,
            all2all_backend=self.all2all_backend,
        )

    def _read(self, field: dataclasses.Field[Any]) -> Any:
        """A field's value in the form that is kept, or as it came where it has none."""
        name, value = field.name, plain(getattr(self, field.name))
        if value is None:
            return field.default
        if name in _READERS:
            return _READERS[name](value)
        if name in ("dtype", "kv_cache_dtype"):
            if (value := dtype_name(value)) == "float16":
                logger.warning("%s: float16 is run in bfloat16, which is as large and has float32's range", name)
                return "bfloat16"
        if name in SIZES and isinstance(value, str):
            try:
                return read_size(value)
            except ValueError as error:
                raise ConfigError.because(name, f"{name} cannot be read: {error}", "write 4096, 4k or 4G") from None
        return whole_number(value) if str(field.type).startswith("int") else value


EngineArgs = EngineConfig  # vLLM's name for the dataclass of all options


@dataclass(frozen=True)
class ResolvedConfig(EngineConfig):
    """A config in which model and platform have filled in what the user left open. Its limits are of one rank.

    Attributes:
      default_seq_tokens: Platform.seq_tokens, where the user leaves the size of the KV pool to the platform.
      num_encoder_rows, max_encoder_patches, whole_pictures, uses_mrope: as scheduler.extensions.pictures.PictureOptions
        has them.
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
    whole_pictures: bool = False
    uses_mrope: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens that a decode may have beside 1."""
        return () if self.speculative_config is None else self.speculative_config.widths

    @property
    def max_in_flight(self) -> int:
        """Steps whose tokens are not known."""
        return max(2 if self.async_scheduling else 1, self.pipeline_parallel_size)

    @property
    def fixes_pages(self) -> bool:
        """Whether the size of the KV pool is said outright."""
        return self.num_gpu_blocks_override is not None or self.kv_cache_memory_bytes is not None

    def buckets(self, platform: Platform, *, sections: tuple[str, ...] = ()) -> Buckets:
        """The shapes to compile; sections: message sections that some steps have besides their own."""
        # A prompt of one token is all that steps without prompts have to do where nothing is generated.
        platform = platform if self.runner == "generate" else dataclasses.replace(platform, decode_sizes=())
        limits = self.max_num_seqs, self.max_num_batched_tokens, self.widths
        return self.compilation_config.buckets(platform, *limits, sections=sections)

    def scheduler_config(
        self, num_pages: int, num_ranks: int = 1, windows: tuple[int | None, ...] = (None,)
    ) -> SchedulerConfig:
        """What the scheduler must know; num_pages of each rank, windows of the cache groups."""
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
