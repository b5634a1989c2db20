"""LoraSpec: room of a model for adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass

# Up to this number of slots, a product that uses any slot reads all of them, which is a few percent of a model.
_FEW = 16


@dataclass(frozen=True)
class LoraSpec:
    """Room for LoRA adapters on a device.

    Attributes:
      max_loras: number of slots, which is the number of adapters that the rows of one step may use.
      max_lora_rank: the largest LoRA rank of an adapter.
    """

    max_loras: int
    max_lora_rank: int

    @property
    def may_group(self) -> bool:
        """Whether there are so many slots (more than 16) that a matrix product may read only those used by a step's
        rows (the grouped form).
        """
        return self.max_loras > _FEW

    @property
    def columns(self) -> int:
        """Number of columns of all slots of one module together: max_loras * max_lora_rank."""
        return self.max_loras * self.max_lora_rank
