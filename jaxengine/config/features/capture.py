"""The options capture and capture_layers: which activations requests may ask for (SamplingParams.capture,
return_hidden_states).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxengine.config.base.errors import ConfigError
from jaxengine.models.config.taps import (
    FINAL_NORM,
    FORM,
    HIDDEN_STATES,
    RESIDUAL,
    Tap,
    TapError,
    all_taps,
    check_form,
    read_taps,
    split_names,
)
from jaxengine.scheduler.base.errors import RequestError

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

TAPS, NAME = "capture", "capture_layers"


def read_tap_names(option: str, value: Any) -> tuple[str, ...]:
    """Return the tap names in the value of an option, unresolved. option: the option's name, for errors. value: a list
    of names, or text with commas.

    Raises ConfigError for other values, and for names that no model can have.
    """
    try:
        names = split_names(value)
        check_form(names)
    except TapError as error:
        raise ConfigError(option, error.name, error.allowed) from None
    except TypeError:
        raise ConfigError(option, value, f"a list of at least one name such as {FORM}") from None
    return names


def read_capture_layers(value: Any) -> tuple[int, ...]:
    """Return the layers in the option `capture_layers`, unresolved, as ints. value: a list, tuple or range of integers,
    an integer array, or text like "0,5,-1".

    Raises ConfigError for other values and for an empty list.
    """
    numbers: Any = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, str):
        words = [word.strip() for word in value.strip("[]() ").split(",")]
        numbers = [int(word) if re.fullmatch(r"-?\d{1,9}", word) else word for word in words]
    listed = isinstance(numbers, (list, tuple, range)) and len(numbers) > 0
    if not listed or not all(type(number) is int for number in numbers):
        raise ConfigError(NAME, value, 'a list of at least one integer, or such as "0,5,-1"')
    return tuple(numbers)


def settle_capture(options: Mapping[str, Any], model: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Return the options capture and capture_layers, resolved for a model: one name for each tap, and layers counted
    from 0. An option that is not given is left out.

    options: options of the engine, by name. Raises ConfigError for a layer or a tap that the model does not have, a
    layer named twice, a pooling model, and any layer but the last for a model with several hidden states per token.
    """
    found: dict[str, tuple[Any, ...]] = {}
    if options[TAPS] is not None:
        refuse_engine(TAPS, options, model)
        found[TAPS] = tuple(tap.name for tap in taps_for(TAPS, options[TAPS], model))
    if options[NAME] is not None:
        refuse_engine(NAME, options, model)
        found[NAME] = _settle_layers(options[NAME], model)
    return found


def taps_for(option: str, names: tuple[str, ...], model: ModelConfig, **kinds: Any) -> tuple[Tap, ...]:
    """Return the taps of a model that an option names.

    option: the option's name, for errors. names: tap names. kinds: keyword arguments of `all_taps`, which lists the
    model's taps. Raises ConfigError for a name that the model does not have.
    """
    try:
        return read_taps(names, all_taps(model, **kinds))
    except TapError as error:
        why = "" if model.num_streams == 1 else ", in which a token has several hidden states before the last norm"
        raise ConfigError(option, error.name, f"{error.allowed}, of {model.architecture}{why}") from None


def check_captured(names: Iterable[str], config: Any) -> None:
    """Raise RequestError if a request asks for activations and the engine was started without the option for them.

    names: activations that the request asks for. config: the engine's. Hidden states need capture_layers, other
    activations capture.
    """
    for name in names:
        field, option = ("return_hidden_states", NAME) if name == HIDDEN_STATES else (TAPS, TAPS)
        if getattr(config, option) is None:
            raise RequestError(f"{field}: the engine was started without {option}", param=field)


def hidden_state_taps(layers: tuple[int, ...], num_layers: int) -> tuple[Tap, ...]:
    """Return the tap of the hidden states of each of `layers`, counted as in transformers: layer num_layers is taken
    after the final norm, a lower one is the residual stream before the layer of that number.
    """
    return tuple(Tap(FINAL_NORM, 0) if layer == num_layers else Tap(RESIDUAL, layer) for layer in layers)


def _settle_layers(layers: tuple[int, ...], model: ModelConfig) -> tuple[int, ...]:
    """Return layers counted from 0, in the order given: -1 is num_layers, the number after the last layer.

    Raises ConfigError for a layer that the model does not have, a layer named twice, and any layer but the last for a
    model with several hidden states per token.
    """
    last = model.num_layers
    if outside := [layer for layer in layers if not -last - 1 <= layer <= last]:
        allowed = f"0 (the embeddings) to {last} (after the last of {last} layers), or -{last + 1} to -1 from the end"
        raise ConfigError(NAME, outside[0], allowed)
    found = tuple(layer % (last + 1) for layer in layers)
    if len(set(found)) < len(found):
        raise ConfigError(NAME, list(layers), f"different layers; they are {list(found)} counted from 0")
    if model.num_streams > 1 and set(found) != {last}:
        allowed = f"{last}, after the last norm: before it a token of {model.architecture} has several hidden states"
        raise ConfigError(NAME, list(layers), allowed)
    return found


def refuse_engine(option: str, options: Mapping[str, Any], model: ModelConfig, *sizes: str) -> None:
    """Raise ConfigError if the model pools, or if one of the options `sizes` is above 1.

    option: the option that was given, for the message. options: options of the engine, by name.
    """
    for why, is_so in (
        (f"{model.architecture} pools and generates nothing", model.pooler is not None),
        *((f"{name} is more than 1", options[name] > 1) for name in sizes),
    ):
        if is_so:
            problem = f"{option} is given, but {why}, which is not supported yet"
            raise ConfigError.because(option, problem, "leave one out")
