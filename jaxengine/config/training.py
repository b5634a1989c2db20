"""Options of engines that train: what requests may ask for beyond what a plain step computes. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxengine.config.errors import ConfigError

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The fields of EngineConfig about rollouts.

    Attributes:
      enable_trace_replay: let requests name the tokens that they decode (trace_decode_token_ids). Every slot keeps
        max_model_len more numbers on the devices.
    """

    enable_trace_replay: bool = False


def check_training(options: Mapping[str, Any], model: ModelConfig) -> None:
    """Raises ConfigError for an option that the model has no use for."""
    if options["enable_trace_replay"] and model.pooler is not None:
        problem = f"enable_trace_replay is given, but {model.architecture} pools and generates nothing"
        raise ConfigError.because("enable_trace_replay", problem, "leave it False")
