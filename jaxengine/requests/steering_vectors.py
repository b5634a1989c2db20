"""What the vectors of a request add at each tap of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxengine.checkpoint.control_vectors import control_vector_of
from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.taps import STEERED, TapError, all_taps, layers_of, read_taps
from jaxengine.requests.activations import Steer
from jaxengine.scheduler.errors import RequestError, show_value
from jaxengine.scheduler.token_params import TokenParams


def steered(params: TokenParams, steer: Sequence[Steer], config: ResolvedConfig, model: ModelConfig) -> TokenParams:
    """Return the parameters with `steer` replaced by what the entries of a request add at each tap together.

    Raises RequestError for what the engine or the model does not have, and for sums that are not finite in float32.
    """
    if config.steer is None:
        raise RequestError("the engine was started without steer", param="steer")
    every, total = all_taps(model, STEERED), dict[str, np.ndarray]()
    known = layers_of(read_taps(config.steer, every))
    for entry in steer:
        for at, vector in _vectors(entry, config, model).items():
            try:
                taps = read_taps([at], known, every)
            except TapError as error:
                problem = f"steer is at {error.name!r}; the engine was started with {error.allowed}"
                raise RequestError(problem, param="steer", value=error.name) from None
            for tap in taps:
                with np.errstate(over="ignore", invalid="ignore"):
                    total[tap.name] = total.get(tap.name, np.float32(0)) + np.float32(entry.scale) * vector
    if not all(np.isfinite(each).all() for each in total.values()):
        raise RequestError("steer adds numbers that are not finite in float32", param="steer")
    return replace(params, steer=tuple((at, total[at].astype("<f4").tobytes()) for at in sorted(total)))


def _vectors(entry: Steer, config: ResolvedConfig, model: ModelConfig) -> Mapping[str, np.ndarray]:
    """The vectors f32[D] of an entry by the names of their taps, before `scale`. Raises RequestError for another size,
    and for a name or a tap that the engine does not have.
    """
    if isinstance(entry.vector, bytes):
        assert entry.at is not None
        vector = np.frombuffer(entry.vector, np.float32)
        if vector.size != model.hidden_size:
            problem = f"steer has a vector of {vector.size} numbers; the model's hidden size is {model.hidden_size}"
            raise RequestError(problem, param="steer", value=vector.size)
        return {entry.at: vector}
    named = config.steering_vectors or {}
    if entry.vector not in named:
        has = f"steering_vectors {', '.join(sorted(named))}" if named else "no steering_vectors"
        problem = f"steer names the vector {show_value(entry.vector)}; the engine was started with {has}"
        raise RequestError(problem, param="steer", value=entry.vector)
    found = control_vector_of(named[entry.vector], model.hidden_size, model.num_layers)
    if entry.at is None:
        return found
    try:
        every = all_taps(model, STEERED)
        wanted = {tap.name for tap in read_taps([entry.at], layers_of(read_taps(found, every)), every)}
    except TapError as error:
        problem = f"steer is at {error.name!r}; the vector {entry.vector!r} has {error.allowed}"
        raise RequestError(problem, param="steer", value=error.name) from None
    return {at: vector for at, vector in found.items() if at in wanted}
