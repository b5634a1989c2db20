"""Options of engines that train: what requests may ask for beyond what a plain step computes. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxengine.config.base.errors import ConfigError

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig


EXPERTS = "enable_return_routed_experts"


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The fields of EngineConfig about rollouts.

    Attributes:
      enable_trace_replay: let requests prescribe the tokens that they decode (trace_decode_token_ids). Every slot keeps
        max_model_len more numbers on the devices.
      enable_sampling_mass: let requests ask for raw and processed log-probabilities at once, and for the log of the
        probability that truncation kept (return_sampling_mass).
      return_sampling_mask: return, for each token, which tokens could have been sampled (sampling_mask). Requests may
        leave it out; the others need a temperature above 0 and a top_k.
      enable_return_routed_experts: return the experts that each token of a request was sent to (routed_experts).
    """

    enable_trace_replay: bool = False
    enable_sampling_mass: bool = False
    return_sampling_mask: bool = False
    enable_return_routed_experts: bool = False


def check_training(options: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise ConfigError for one of TrainingOptions with a pooling model, and for enable_return_routed_experts with a
    model without experts, or whose layers pick different numbers of them, or with rl_exact.

    options: options of the engine, by name.
    """
    for name in ("enable_trace_replay", "enable_sampling_mass", "return_sampling_mask", EXPERTS):
        if options[name] and model.pooler is not None:
            problem = f"{name} is given, but {model.architecture} pools and generates nothing"
            raise ConfigError.because(name, problem, "leave it False")
    if not options[EXPERTS]:
        return
    if model.experts is None:
        raise ConfigError(EXPERTS, True, f"False: {model.architecture} has no experts")
    if model.experts.by_layer:
        raise ConfigError(EXPERTS, True, f"False: layers of {model.architecture} pick different numbers of experts")
    if options["rl_exact"]:
        problem = f"{EXPERTS} is given, but rl_exact is given, which picks the trainer's experts anyway"
        raise ConfigError.because(EXPERTS, problem, "leave one out")
