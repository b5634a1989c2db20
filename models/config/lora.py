"""How much room a model has for adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass

# Up to so many slots all of them are read where any is: they are a few hundredths of a model.
_FEW = 16


@dataclass(frozen=True)
class LoraSpec:
    """Room for adapters on a device.

    Attributes:
      max_loras: slots, adapters that rows of one step may have.
      max_lora_rank: the largest rank of an adapter.
    """

    max_loras: int
    max_lora_rank: int

    @property
    def may_group(self) -> bool:
        """Whether reading only the slots that a step's rows have is worth a form of its own."""
        return self.max_loras > _FEW

    @property
    def columns(self) -> int:
        """Of all slots of one module."""
        return self.max_loras * self.max_lora_rank
