"""ExpertsConfig: what a model's mixture-of-experts layers are."""

from __future__ import annotations

from dataclasses import dataclass

from models.config.fields import MAX_EXPERTS, MAX_INTERMEDIATE, ModelConfigError, check_size


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
        check_size("experts: num_experts", self.num_experts, MAX_EXPERTS)
        check_size("experts: num_per_token", self.num_per_token, MAX_EXPERTS)
        check_size("experts: intermediate_size", self.intermediate_size, MAX_INTERMEDIATE)
        if self.num_per_token > self.num_experts:
            raise ModelConfigError(
                f"experts: num_per_token must be at most num_experts = {self.num_experts}, got {self.num_per_token}"
            )
