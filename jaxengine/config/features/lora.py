"""Options of LoRA adapters: memory for them on the devices and on the host. Names and defaults are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from jaxengine.config.base.errors import ConfigError
from jaxengine.models.config.lora import LoraSpec

RANKS = (8, 16, 32, 64, 128, 256)
MAX_LORAS, MAX_CPU_LORAS = 256, 65536


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """The fields of EngineConfig about adapters.

    Attributes:
      enable_lora: let requests name a LoRA adapter to be added to the model.
      max_loras: adapters that can run at the same time; each occupies device memory from the start. A step in which any
        request has an adapter reads all of them; with more than 16, on CPUs, TPUs and Hopper GPUs, only those in use.
      max_lora_rank: largest rank of an adapter: 8, 16, 32, 64, 128 or 256. Every adapter takes the memory of this rank.
      max_cpu_loras: adapters that are kept in host memory; others are read again. None for max_loras.
    """

    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None

    @property
    def lora_spec(self) -> LoraSpec | None:
        """LoRA sizes to build the model with; None without adapters."""
        return LoraSpec(self.max_loras, self.max_lora_rank) if self.enable_lora else None

    @property
    def num_cpu_loras(self) -> int:
        """Number of adapters kept in host memory: max_cpu_loras, by default max_loras."""
        return self.max_cpu_loras or self.max_loras


def check_lora(options: LoraOptions, nnodes: int) -> None:
    """Raise ConfigError for ranks and numbers of adapters out of range, for such sizes without enable_lora, and for
    adapters with several processes.

    nnodes: processes of the engine.
    """
    if options.max_lora_rank not in RANKS:
        raise ConfigError("max_lora_rank", options.max_lora_rank, ", ".join(map(str, RANKS)))
    if not 1 <= options.max_loras <= MAX_LORAS:
        raise ConfigError("max_loras", options.max_loras, f"1 to {MAX_LORAS}")
    most = options.max_cpu_loras
    if most is not None and not options.max_loras <= most <= MAX_CPU_LORAS:
        raise ConfigError("max_cpu_loras", most, f"max_loras, {options.max_loras}, to {MAX_CPU_LORAS}")
    if not options.enable_lora:
        for name in ("max_loras", "max_lora_rank", "max_cpu_loras"):
            if (value := getattr(options, name)) != getattr(LoraOptions, name):
                raise ConfigError.because(name, f"{name} is {value!r}, but there are no adapters", "set enable_lora")
    elif nnodes > 1:
        raise ConfigError.because("enable_lora", "adapters over several processes are not supported", "leave it False")
