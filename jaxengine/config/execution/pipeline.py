"""The option pipeline_layers: the number of layers of each pipeline stage, if the user gives it."""

from __future__ import annotations

from typing import Any

from jaxengine.config.base.errors import ConfigError


def read_layers(layers: Any, num_stages: int) -> tuple[int, ...]:
    """Return pipeline_layers as a tuple with the number of layers of each of `num_stages` stages.

    Raises ConfigError for anything but a list or tuple of `num_stages` integers of at least 1.
    """
    listed = isinstance(layers, (list, tuple)) and all(type(count) is int and count > 0 for count in layers)
    if not listed or len(layers) != num_stages:
        raise ConfigError("pipeline_layers", layers, f"{num_stages} integers of at least 1, one for each stage")
    return tuple(layers)


def check_stages(num_stages: int, layers: tuple[int, ...] | None, num_layers: int) -> None:
    """Raise ConfigError if there are more stages than layers, or if the numbers of layers do not add up to the model's.

    layers: number of layers of each stage; None to split by bytes. num_layers: number of the model's layers.
    """
    if num_stages > num_layers:
        raise ConfigError("pipeline_parallel_size", num_stages, f"at most {num_layers} layers")
    if layers is not None and sum(layers) != num_layers:
        raise ConfigError("pipeline_layers", layers, f"numbers that add up to {num_layers}")
