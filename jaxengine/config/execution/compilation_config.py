"""Step shapes that are compiled before serving."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields, replace
from enum import IntEnum
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.platforms import Platform
from jaxengine.config.base.values import kind_missed, plain, whole_number
from jaxengine.scheduler.batches.buckets import Buckets

logger = logging.getLogger(__name__)

# Fields of vLLM's CompilationConfig about how torch compiles and CUDA graphs are taken, by the type of their values.
# None can change an answer.
_OF_TORCH = {
    "bool": """
        compile_mm_encoder cudagraph_copy_inputs cudagraph_decoder_replay cudagraph_mm_encoder cudagraph_specialize_lora
        fast_moe_cold_start full_cuda_graph ir_enable_torch_wrap use_cudagraph use_inductor use_inductor_graph_partition
    """,
    "dict": "dynamic_shapes_config inductor_compile_config inductor_passes pass_config",
    "int": """
        cudagraph_num_of_warmups decoder_replay_trim_threshold encoder_cudagraph_max_frames_per_batch
        encoder_cudagraph_max_vision_items_per_batch
    """,
    "list": """
        compile_ranges_endpoints compile_sizes custom_ops decoder_replay_cudagraph_capture_sizes
        encoder_cudagraph_token_budgets splitting_ops
    """,
    "str": "backend cache_dir compile_cache_save_format cudagraph_mode debug_dump_path",
}
_KINDS = {name: f"{kind} | None" for kind, names in _OF_TORCH.items() for name in names.split()}


class CompilationMode(IntEnum):
    """vLLM's names of `CompilationConfig.mode`."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CompilationLevel(IntEnum):
    """Earlier names of CompilationMode."""

    NO_COMPILATION = 0
    DYNAMO_AS_IS = 1
    DYNAMO_ONCE = 2
    PIECEWISE = 3


@dataclass(frozen=True)
class CompilationConfig:
    """Step shapes that are compiled before serving (vLLM: captured CUDA graphs).

    Attributes:
      cudagraph_capture_sizes: numbers of sequences of decode-only steps, None for the platform's;
        max_num_seqs is always included.
      prefill_sizes: token counts of steps with prefill, None for the platform's; max_num_batched_tokens is always
        included.
      max_cudagraph_capture_size: largest of the platform's numbers of sequences to compile, besides max_num_seqs; None
        for all. With cudagraph_capture_sizes, it may only be the largest of them.
      mode: None, or how much torch compiles, 0 to 3; every step is compiled as a whole whatever it is (`enforce_eager`
        skips warm-up). A CompilationMode and its name mean its number; the argument `level` is the earlier name of
        mode.
    """

    cudagraph_capture_sizes: tuple[int, ...] | None = None
    prefill_sizes: tuple[int, ...] | None = None
    max_cudagraph_capture_size: int | None = None
    mode: int | None = None
    level: InitVar[int | None] = None

    def __post_init__(self, level: int | None):
        """Check and normalise the fields; `level` sets `mode`. Raises ConfigError, which names the field, also if level
        and mode differ.
        """
        if level is not None:
            if self.mode is not None and _mode(self.mode) != _mode(level):
                raise ConfigError("compilation_config.level", level, f"as mode, which is {self.mode!r}, or absent")
            object.__setattr__(self, "mode", level)
        object.__setattr__(self, "mode", whole_number(plain(_mode(self.mode))))
        if self.mode is not None and (type(self.mode) is not int or not 0 <= self.mode <= 3):
            raise ConfigError("compilation_config.mode", self.mode, "None, or 0 to 3")
        for name in ("cudagraph_capture_sizes", "prefill_sizes"):
            sizes = getattr(self, name)
            if sizes is None:
                continue
            listed = isinstance(sizes, (list, tuple))
            read = [whole_number(plain(size)) for size in sizes] if listed else []
            if not listed or not all(type(size) is int and size > 0 for size in read):
                raise ConfigError(f"compilation_config.{name}", sizes, "a list of integers of at least 1")
            object.__setattr__(self, name, tuple(read))
        self._check_max()

    def _check_max(self) -> None:
        """Normalise max_cudagraph_capture_size. Raises ConfigError unless it is None, or a positive integer that is the
        largest of cudagraph_capture_sizes if these are given.
        """
        name, given = "compilation_config.max_cudagraph_capture_size", self.max_cudagraph_capture_size
        if given is None:
            return
        most = whole_number(plain(given))
        if type(most) is not int or most < 1:
            raise ConfigError(name, given, "an integer of at least 1, or None")
        if self.cudagraph_capture_sizes and most != max(self.cudagraph_capture_sizes):
            raise ConfigError(
                name, given, f"{max(self.cudagraph_capture_sizes)}, the largest of cudagraph_capture_sizes"
            )
        object.__setattr__(self, "max_cudagraph_capture_size", most)

    @classmethod
    def read(cls, value: Any) -> CompilationConfig:
        """Return a CompilationConfig for a dict of its fields, a mode (int), or None for the defaults; a
        CompilationConfig is returned unchanged. Fields of _KINDS are left out, with a log line.

        A mode below 3 has a log line too. Raises ConfigError for other values, unknown fields, and fields that are not
        allowed.
        """
        value = whole_number(plain(value))
        if value is None or isinstance(value, cls):
            return value or cls()
        if isinstance(value, int) and not isinstance(value, bool):
            value = {"mode": value}
        if not isinstance(value, Mapping):
            raise ConfigError("compilation_config", value, "a CompilationConfig, a dict of its fields, or 0 to 3")
        known = [field.name for field in fields(cls)]
        foreign = {name: plain(value[name]) for name in sorted(_KINDS) if name in value}
        for name, each in foreign.items():
            if wanted := kind_missed(each, _KINDS[name]):
                raise ConfigError(f"compilation_config.{name}", each, wanted)
        own = {name: each for name, each in value.items() if name not in foreign}
        for name in own:
            if name not in (*known, "level"):
                problem = f"compilation_config has no {name!r} here, where XLA compiles every step whole"
                raise ConfigError.because("compilation_config", problem, f"it has {', '.join(known)}")
        config = cls(**own)
        if config.mode is not None and config.mode < CompilationMode.VLLM_COMPILE:
            foreign = {"mode": config.mode, **foreign}
        if foreign:
            listed = ", ".join(f"compilation_config.{name}={each!r}" for name, each in foreign.items())
            logger.info("%s: changes nothing here, where XLA compiles every step whole", listed)
        return config

    def divided(self, parts: int) -> CompilationConfig:
        """Return a copy whose sizes, as far as given, are divided by `parts`, the number of replicas that share a
        batch, and rounded up.
        """
        names = ("cudagraph_capture_sizes", "prefill_sizes")
        sizes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        parted: dict[str, Any] = {name: tuple(-(-size // parts) for size in each) for name, each in sizes.items()}
        if self.max_cudagraph_capture_size is not None:
            parted["max_cudagraph_capture_size"] = -(-self.max_cudagraph_capture_size // parts)
        return replace(self, **parted)

    def buckets(
        self,
        platform: Platform,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        widths: tuple[int, ...],
        *,
        sections: tuple[str, ...] = (),
    ) -> Buckets:
        """Return the step shapes of one replica under these limits; sizes that were not given are those of the platform
        below the limits.

        widths: numbers of tokens, besides 1, that a decode may have. sections: message sections that some steps with
        prefill have in addition to the usual ones. Raises ConfigError for sizes beyond the limits.
        """
        decode, prefill = self.cudagraph_capture_sizes, self.prefill_sizes
        if decode is None:
            most = self.max_cudagraph_capture_size or max_num_seqs
            decode = tuple(size for size in platform.decode_sizes if size <= most and size < max_num_seqs)
        if prefill is None:
            prefill = tuple(size for size in platform.prefill_sizes if size < max_num_batched_tokens)
        try:
            return Buckets(max_num_seqs, max_num_batched_tokens, decode, prefill, widths, sections=sections)
        except ValueError as error:
            raise ConfigError("compilation_config", self, str(error)) from None


def _mode(value: Any) -> Any:
    """Return the int of a mode that is a name or a member of CompilationMode or CompilationLevel; another value
    unchanged.
    """
    if isinstance(value, str):
        value = {mode.name: mode for kind in (CompilationLevel, CompilationMode) for mode in kind}.get(value, value)
    return int(value) if isinstance(value, IntEnum) else value
