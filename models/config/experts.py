"""ExpertsConfig: configuration of a model's mixture-of-experts layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxengine.models.config.fields import MAX_EXPERTS, MAX_HIDDEN, MAX_INTERMEDIATE, ModelConfigError, check_size

SCORING_FUNCS = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture-of-experts layers of a model.

    Attributes:
      num_per_token: experts to which each token is routed.
      intermediate_size: feed-forward size of one expert.
      num_experts: experts of a layer.
      norm_weights: whether a token's weights are scaled to add up to one.
      dense_layers: indices of the layers that have a dense MLP instead, ascending.
      hashed_layers: indices of the layers in which a table chooses the experts by token id, ascending; scores are only
        their weights.
      scoring_func: function from the router's logits to scores: over all experts (softmax), or elementwise (sigmoid;
        sqrtsoftplus, the square root of softplus).
      correction_bias: whether a learned number is added to each expert's score for the choice of experts, not for their
        weights (Wang et al. 2024, arXiv:2408.15664).
      logit_soft_cap: router logits become cap * tanh(logit / cap); None for no cap.
      corrects_logits: whether that number is added to the router's logits instead of the scores.
      num_expert_group: number of equal groups of experts.
      topk_group: a token's experts are chosen among its best `topk_group` groups (DeepSeek-AI 2024, arXiv:2412.19437).
      routed_scaling_factor: factor of all weights.
      min_weight_sum: least divisor when weights are scaled to add up to one.
      apply_router_weight_on_input: whether weights multiply the experts' inputs instead of their outputs.
      swiglu_alpha, swiglu_limit: parameters of the clamped SwiGLU activation, for families that have it.
      limits: for each layer, the bounds of gate and up (ThenClamped) of experts, and of the shared MLP, each None for
        none; layers beyond the end have none. For families that have them in some layers.
      bias: whether the router and the experts' matrices have biases.
      shared_intermediate_size: feed-forward size of the shared dense MLP that is applied to every token in addition; 0
        for none.
      shared_gate: whether a sigmoid gate multiplies the shared MLP's output.
      output_scale: factor of the sum of the experts' and the shared MLP's outputs.
      router_jitter_noise: half of the relative distance from the best score within which other scores count, for
        families that weight experts so.
      num_zero_experts: experts without weights, numbered after the others, that return their input (LongCat 2025,
        arXiv:2509.01322).
      shortcut: whether experts read the hidden state of one layer and are added to that of the next (Cai et al. 2024,
        arXiv:2404.05019).
      image_intermediate_size: feed-forward size of one of the further experts, `num_experts` of them with a router of
        their own, to which tokens of images are routed instead; 0 for none.
      image_tokens: ids of the tokens that are routed to these.
      num_sinks: shared experts that the router scores, too: their weights and those of a token's experts are computed
        together (Inkling).
      num_idle: scores of a router, after those of experts, that stand for no expert (ZAYA).
      latent_size: elements of an expert's input and output, which are projected from and to the hidden state; None if
        they are the hidden state itself.
      by_layer: for each layer, its (num_per_token, intermediate_size), of any value in dense layers; () where all are
        equal. Those outside of it are the largest of a layer with experts.

    Raises ModelConfigError for sizes out of their limits, groups that do not divide the experts, more experts per token
    than its groups have, another scoring_func, and factors that are not finite and above 0.
    """

    num_experts: int
    num_per_token: int
    intermediate_size: int
    norm_weights: bool = True
    dense_layers: tuple[int, ...] = ()
    hashed_layers: tuple[int, ...] = ()
    scoring_func: str = "softmax"
    correction_bias: bool = False
    corrects_logits: bool = False
    logit_soft_cap: float | None = None
    num_expert_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    min_weight_sum: float = 1e-20
    apply_router_weight_on_input: bool = False
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    limits: tuple[tuple[float | None, float | None], ...] = ()
    bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    output_scale: float = 1.0
    router_jitter_noise: float = 0.01
    num_zero_experts: int = 0
    shortcut: bool = False
    image_intermediate_size: int = 0
    image_tokens: tuple[int, ...] = ()
    latent_size: int | None = None
    num_sinks: int = 0
    num_idle: int = 0
    by_layer: tuple[tuple[int, int], ...] = ()

    def of_layer(self, layer: int) -> ExpertsConfig:
        """Return the configuration with `by_layer`'s experts per token and their size for layer number `layer`, and
        without by_layer; itself if by_layer is (). Raises IndexError for a layer that it lacks.
        """
        if not self.by_layer:
            return self
        count, size = self.by_layer[layer]
        return replace(self, num_per_token=count, intermediate_size=size, by_layer=())

    @property
    def num_routed(self) -> int:
        """Number of experts among which a router chooses: those with weights, and after them those without."""
        return self.num_experts + self.num_zero_experts

    @property
    def num_scored(self) -> int:
        """Number of scores of a router: of experts among which it chooses, and after them of sinks, and of none."""
        return self.num_routed + self.num_sinks + self.num_idle

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_per_token", "num_expert_group", "topk_group"):
            check_size(f"experts: {name}", getattr(self, name), MAX_EXPERTS)
        check_size("experts: intermediate_size", self.intermediate_size, MAX_INTERMEDIATE)
        check_size("experts: shared_intermediate_size", self.shared_intermediate_size, MAX_INTERMEDIATE, 0)
        check_size("experts: image_intermediate_size", self.image_intermediate_size, MAX_INTERMEDIATE, 0)
        check_size("experts: num_idle", self.num_idle, MAX_EXPERTS, 0)
        check_size("experts: num_sinks", self.num_sinks, MAX_EXPERTS, 0)
        check_size("experts: num_zero_experts", self.num_zero_experts, MAX_EXPERTS, 0)
        if self.latent_size is not None:
            check_size("experts: latent_size", self.latent_size, MAX_HIDDEN)
        if self.num_experts % self.num_expert_group or self.topk_group > self.num_expert_group:
            raise ModelConfigError(
                f"experts: num_expert_group must divide num_experts = {self.num_experts} and be at least topk_group = "
                f"{self.topk_group}, got {self.num_expert_group}"
            )
        allowed = self.topk_group * (self.num_experts // self.num_expert_group)
        if self.num_per_token > allowed:
            text = f"num_experts = {allowed}" if self.num_expert_group == 1 else f"the {allowed} of topk_group groups"
            raise ModelConfigError(f"experts: num_per_token must be at most {text}, got {self.num_per_token}")
        if self.scoring_func not in SCORING_FUNCS:
            raise ModelConfigError(
                f"experts: scoring_func must be one of {', '.join(SCORING_FUNCS)}, got {self.scoring_func!r}"
            )
        for name in (
            "routed_scaling_factor",
            "min_weight_sum",
            "swiglu_alpha",
            "swiglu_limit",
            "output_scale",
            "router_jitter_noise",
        ):
            if not 0 < getattr(self, name) < float("inf"):
                raise ModelConfigError(f"experts: {name} must be a finite number > 0, got {getattr(self, name)!r}")
        if self.logit_soft_cap is not None and not 0 < self.logit_soft_cap < float("inf"):
            text = f"a finite number > 0 or None, got {self.logit_soft_cap!r}"
            raise ModelConfigError(f"experts: logit_soft_cap must be {text}")
