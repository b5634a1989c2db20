"""capture_layers: which layers' hidden states a request may ask for (SamplingParams.return_hidden_states)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxengine.config.errors import ConfigError

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

NAME = "capture_layers"


def read_capture_layers(value: Any) -> tuple[int, ...]:
    """Read the option as given: a list of integers, or text like "0,5,-1". Raises ConfigError."""
    numbers: Any = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, str):
        words = [word.strip() for word in value.strip("[]() ").split(",")]
        numbers = [int(word) if word.lstrip("-").isdecimal() else word for word in words]
    listed = isinstance(numbers, (list, tuple, range)) and len(numbers) > 0
    if not listed or not all(type(number) is int for number in numbers):
        raise ConfigError(NAME, value, 'a list of at least one integer, or such as "0,5,-1"')
    return tuple(numbers)


def settle_capture(options: Mapping[str, Any], model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the option for a model with negative numbers resolved; empty without it.

    options: of the engine. Raises ConfigError for a layer that the model does not have, a layer named twice, and an
    engine that cannot return hidden states.
    """
    if (layers := options[NAME]) is None:
        return {}
    last = model.num_layers
    if outside := [layer for layer in layers if not -last - 1 <= layer <= last]:
        allowed = f"0 (the embeddings) to {last} (after the last of {last} layers), or -{last + 1} to -1 from the end"
        raise ConfigError(NAME, outside[0], allowed)
    found = tuple(layer % (last + 1) for layer in layers)
    if len(set(found)) < len(found):
        raise ConfigError(NAME, list(layers), f"different layers; they are {list(found)} counted from 0")
    for why, is_so in (
        (f"{model.architecture} pools and generates nothing", model.pooler is not None),
        ("speculative_config is given, whose drafts may be wrong", options["speculative_config"] is not None),
        ("pipeline_parallel_size is more than 1", options["pipeline_parallel_size"] > 1),
        ("nnodes is more than 1", options["nnodes"] > 1),
    ):
        if is_so:
            raise ConfigError.because(NAME, f"{NAME} is given, but {why}, which is not supported yet", "leave one out")
    return {NAME: found}
