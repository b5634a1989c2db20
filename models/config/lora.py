"""LoraSpec: room of a model for adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass

# Up to this many slots all of them are read where any is: they are a few percent of a model.
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
        """Whether there are enough slots for a product that reads only those of a step's rows."""
        return self.max_loras > _FEW

    @property
    def columns(self) -> int:
        """Columns of all slots of one module."""
        return self.max_loras * self.max_lora_rank
