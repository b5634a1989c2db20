"""ExpertsConfig: what a model's mixture-of-experts layers are."""

from __future__ import annotations

from dataclasses import dataclass

from models.config.fields import ModelConfigError


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture-of-experts layers of a model.

    Attributes:
      num_per_token: experts that each token goes to.
      intermediate_size: feed-forward size of one expert.
      norm_weights: a token's weights are scaled to add up to one.
      dense_layers: indices of the layers that have a dense MLP instead, ascending.
    """

    num_experts: int
    num_per_token: int
    intermediate_size: int
    norm_weights: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_per_token", "intermediate_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelConfigError(f"experts: {name} must be an integer >= 1, got {value!r}")
        if self.num_per_token > self.num_experts:
            raise ModelConfigError(
                f"experts: num_per_token must be at most num_experts = {self.num_experts}, got {self.num_per_token}"
            )
