"""Vectors of a request, summed for each tap of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxengine.checkpoint.input_source import ControlVector
from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.taps import STEERED, TapError, all_taps, layers_of, read_taps
from jaxengine.requests.params.activations import Steer
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.scheduler.base.token_params import TokenParams

# Limit of the numbers that a request's entries add up, which takes a server a few milliseconds.
MAX_ADDED = 1 << 22


def steered(
    params: TokenParams,
    steer: Sequence[Steer],
    config: ResolvedConfig,
    model: ModelConfig,
    vectors: Mapping[str, ControlVector],
) -> TokenParams:
    """Return a copy of `params` with `steer` replaced by one vector for each tap, sorted by name: the sum of all
    entries' scaled vectors there.

    vectors: the engine's named vectors. Raises RequestError for taps or vectors that the engine or the model does not
    have, for more than MAX_ADDED numbers, and for sums that are not finite in float32.
    """
    if config.steer is None:
        raise RequestError("the engine was started without steer", param="steer")
    every = all_taps(model, STEERED)
    known = layers_of(read_taps(config.steer, every))
    terms = list(_terms(steer, model, vectors, known, every))
    num_added = sum(len(taps) for taps, _, _ in terms) * model.hidden_size
    if num_added > MAX_ADDED:
        problem = f"steer adds {num_added} numbers (entries x taps x hidden size); allowed: at most {MAX_ADDED}"
        raise RequestError(problem, param="steer", value=num_added)
    total: dict[str, np.ndarray] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for taps, vector, scale in terms:
            added = np.float32(scale) * vector
            for at in taps:
                total[at] = total[at] + added if at in total else added
    if not all(np.isfinite(each).all() for each in total.values()):
        raise RequestError("steer adds numbers that are not finite in float32", param="steer")
    return replace(params, steer=tuple((at, total[at].astype("<f4").tobytes()) for at in sorted(total)))


def _terms(
    steer: Sequence[Steer],
    model: ModelConfig,
    vectors: Mapping[str, ControlVector],
    known: Mapping[str, Sequence[int]],
    every: Mapping[str, Sequence[int]],
) -> Iterator[tuple[list[str], np.ndarray, float]]:
    """Yield (names of taps, vector f32[D] to add at each of them, scale) for the entries of `steer`.

    Entries with equal taps and vector are merged, with their scales summed. known: numbers of the layers, by kind of
    tap, at which the engine was started to add vectors. every: those of the model. Raises RequestError for taps and
    vectors that the engine or the model does not have.
    """
    scales: dict[tuple[str | None, bytes | str], float] = {}
    for entry in steer:
        key = entry.at, entry.vector
        scales[key] = scales.get(key, 0.0) + entry.scale
    for (given, vector), scale in scales.items():
        for at, values in _vectors(given, vector, model, vectors, every).items():
            try:
                taps = read_taps([at], known, every)
            except TapError as error:
                problem = f"steer is at {error.name!r}; the engine was started with {error.allowed}"
                raise RequestError(problem, param="steer", value=error.name) from None
            yield [tap.name for tap in taps], values, scale


def _vectors(
    at: str | None,
    vector: bytes | str,
    model: ModelConfig,
    named: Mapping[str, ControlVector],
    every: Mapping[str, Sequence[int]],
) -> ControlVector:
    """Return the vectors f32[D] of one entry of `steer`, before its scale, by the names of the taps to which they are
    added; numbers have the one key `at`, which is not checked and may name several taps. They are not copies and must
    not be changed.

    at, vector: fields of the entry. A named control vector has its own taps, of which `at` selects some. named: control
    vectors by name. every: numbers of the layers, by kind of tap, at which vectors can be added to the model. Raises
    RequestError for numbers of another size than the hidden size, for a name that the engine does not have, and for
    taps that the named vector does not have.
    """
    if isinstance(vector, bytes):
        assert at is not None
        values = np.frombuffer(vector, np.float32)
        if values.size != model.hidden_size:
            problem = f"steer has a vector of {values.size} numbers; the model's hidden size is {model.hidden_size}"
            raise RequestError(problem, param="steer", value=values.size)
        return {at: values}
    if vector not in named:
        has = f"steering_vectors {', '.join(sorted(named))}" if named else "no steering_vectors"
        problem = f"steer names the vector {show_value(vector)}; the engine was started with {has}"
        raise RequestError(problem, param="steer", value=vector)
    found = named[vector]
    if at is None:
        return found
    try:
        wanted = {tap.name for tap in read_taps([at], layers_of(read_taps(found, every)), every)}
    except TapError as error:
        problem = f"steer is at {error.name!r}; the vector {vector!r} has {error.allowed}"
        raise RequestError(problem, param="steer", value=error.name) from None
    return {name: values for name, values in found.items() if name in wanted}
