"""Options of steering: where requests may add vectors to a model's activations, and control vectors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import named_path
from jaxengine.config.features.capture import refuse_engine, taps_for
from jaxengine.models.config.taps import STEERED

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

TAPS, VECTORS = "steer", "steering_vectors"


@dataclass(frozen=True, kw_only=True)
class SteeringOptions:
    """The fields of EngineConfig about steering.

    Attributes:
      steer: where requests may add vectors (SamplingParams.steer), by names such as "residual:*", "attention_output:3"
        or "mlp_output:0-5". Each layer named takes the memory of max_num_seqs vectors in float32.
      steering_vectors: control vectors that requests may name: a dict from name to a GGUF file as llama.cpp's
        cvector-generator writes it; on the command line a JSON object. Needs steer.
    """

    steer: tuple[str, ...] | None = None
    steering_vectors: Mapping[str, str] | None = None


def read_steering_vectors(value: Any) -> dict[str, str]:
    """Return the option `steering_vectors`, a mapping from names to files (text or Path), as a dict of texts with "~"
    expanded.

    The files are not opened. Raises ConfigError for anything else, such as an empty name.
    """
    named = isinstance(value, Mapping) and all(isinstance(name, str) and name for name in value)
    if not named or not all(isinstance(path, (str, Path)) for path in value.values()):
        raise ConfigError(VECTORS, value, 'a dict such as {"calm": "calm.gguf"}, from name to a GGUF file')
    return {name: str(named_path(VECTORS, path)) for name, path in value.items()}


def settle_steering(options: Mapping[str, Any], model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return {"steer": one name for each tap of the model that the option names}; {} without the option.

    options: options of the engine, by name. Raises ConfigError for a tap that the model does not have or to which no
    vector can be added, for a pooling model, for several pipeline stages, and for steering_vectors without steer.
    """
    if options[TAPS] is None:
        if options[VECTORS]:
            raise ConfigError.because(
                VECTORS, f"{VECTORS} is given, but nothing is steered", 'give steer, "residual:*"'
            )
        return {}
    refuse_engine(TAPS, options, model, "pipeline_parallel_size")
    return {TAPS: tuple(tap.name for tap in taps_for(TAPS, options[TAPS], model, kinds=STEERED))}
