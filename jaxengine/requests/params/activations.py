"""Fields `capture` and `steer` of SamplingParams: the activations that a request gets, and the vectors that it adds.

Importing this needs no numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxengine.models.config.taps import (
    FORM,
    HIDDEN_STATES,
    ROUTER,
    STEERED,
    TapError,
    all_taps,
    check_form,
    layers_of,
    read_taps,
    split_names,
)
from jaxengine.scheduler.base.errors import RequestError, refuse
from jaxengine.scheduler.base.token_params import CAPTURE

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

_CAPTURE = "capture"
MAX_STEER = 64
_KEYS = ("at", "vector", "scale")
_FORM = (
    'a list of dicts such as {"at": "residual:3", "vector": numbers, "scale": 1.0}, or {"vector": "name"} of '
    "steering_vectors"
)
_LIMIT = 1e20


class Steer(NamedTuple):
    """One steering vector of a request.

    Attributes:
      at: name of the taps to which it is added; None for the taps of a named vector.
      vector: f32[D] as bytes, or a name among the engine's steering_vectors; `scale` multiplies it.
    """

    at: str | None
    vector: bytes | str
    scale: float


def read_captured(name: str, value: Any) -> tuple[str, ...] | None:
    """Return the names of taps in `value`, a list or a text with commas, without repeats; None for an empty list.

    name: name of the field, for the RequestError that any other value raises. Whether the engine has the taps is not
    checked.
    """
    if isinstance(value, (list, tuple)) and not value:
        return None
    try:
        names = split_names(value)
        check_form(names)
    except (TapError, TypeError):
        raise refuse(name, value, f"None or a list of names such as {FORM}") from None
    return tuple(dict.fromkeys(names))


def captured_bytes(names: Sequence[str], config: Any, model: ModelConfig, *, hidden_states: bool) -> int:
    """Return the bytes of the captured activations of one token. names: taps of the request. hidden_states: whether to
    include the activations of capture_layers.

    config: configuration of the engine. Raises RequestError for activations that the engine was started without.
    """
    number_bytes, total = 4 if str(config.dtype) == "float32" else 2, 0
    for field, option, asked in (
        (_CAPTURE, _CAPTURE, names),
        ("return_hidden_states", "capture_layers", hidden_states),
    ):
        if asked and getattr(config, option) is None:
            raise RequestError(f"{field}: the engine was started without {option}", param=field)
    if hidden_states:
        total += len(config.capture_layers) * model.hidden_size * number_bytes
    if names:
        known = all_taps(model)
        try:
            taps = read_taps(names, layers_of(read_taps(config.capture, known)), known)
        except TapError as error:
            problem = f"{_CAPTURE} names {error.name!r}; the engine was started with {error.allowed}"
            raise RequestError(problem, param=_CAPTURE, value=error.name) from None
        total += sum(tap.width(model) * (4 if tap.kind == ROUTER else number_bytes) for tap in taps)
    return total


def captured_fields(hidden_states: bool, names: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields capture, reads_prompt and capabilities of TokenParams for a request that gets hidden states, or
    the activations at the taps `names`; {} for one that gets neither.
    """
    captured = (*((HIDDEN_STATES,) if hidden_states else ()), *(names or ()))
    return {"capture": captured, "reads_prompt": True, "capabilities": CAPTURE} if captured else {}


def read_steer(name: str, value: Any) -> tuple[Steer, ...] | None:
    """Return the field `steer` as a tuple of Steer; None for an empty list. name: name of the field, for errors. Raises
    RequestError for values that are not a list of at most MAX_STEER valid entries.
    """
    if not isinstance(value, (list, tuple)) or len(value) > MAX_STEER:
        raise refuse(name, value, f"{_FORM}, at most {MAX_STEER}")
    return tuple(_entry(name, each) for each in value) or None


def _entry(name: str, value: Any) -> Steer:
    """Return one entry of `steer`, a Steer or a dict of its fields, as a Steer with its vector as f32 bytes or a name.
    A missing scale is 1.

    Raises RequestError, which names `name`, for unknown keys, a missing or invalid vector, invalid taps, a scale above
    1e20 in size, and numbers without `at`.
    """
    if isinstance(value, (list, tuple)) and len(value) == len(_KEYS):  # a Steer, also one from a message
        value = dict(zip(_KEYS, value, strict=True))
    if not isinstance(value, Mapping) or "vector" not in value or not set(value) <= set(_KEYS):
        raise refuse(name, value, _FORM)
    at, vector, scale = value.get("at"), value["vector"], value.get("scale", 1.0)
    if not isinstance(scale, Real) or isinstance(scale, bool) or not -_LIMIT <= scale <= _LIMIT:  # pyright: ignore
        raise refuse(f"{name} scale", scale, "a finite number, at most 1e20 in size")
    if at is not None:
        _check_at(name, at)
    if isinstance(vector, str):
        return Steer(at, vector, float(scale))
    if at is None:
        raise refuse(name, value, 'a dict with "at" where "vector" is numbers')
    return Steer(at, _numbers(name, vector), float(scale))


def _check_at(name: str, at: Any) -> None:
    """Raise RequestError unless `at` has the form of a name of taps that can be steered. name: name of the field, for
    the error.
    """
    try:
        if not isinstance(at, str):
            raise TapError(at, "text")
        check_form([at])
        if at.split(":")[0] not in STEERED:
            raise TapError(at, "one that can be steered")
    except TapError:
        raise refuse(f"{name} at", at, 'such as "residual:3", "attention_output:*" or "mlp_output:0-5"') from None


def _numbers(name: str, vector: Any) -> bytes:
    """Return a vector, f32 bytes or numbers, as the bytes of a float32 array. Raises RequestError, which names `name`,
    unless it has one dimension and finite real numbers, at least one. Imports numpy.
    """
    import numpy as np

    try:
        found = np.frombuffer(vector, np.float32) if isinstance(vector, bytes) else np.asarray(vector)
        fits = found.ndim == 1 and found.size > 0 and found.dtype.kind not in "bcmMOSU"
        with np.errstate(over="ignore"):
            values = found.astype(np.float32) if fits else found
    except (TypeError, ValueError):  # lists of several lengths
        fits, values = False, np.empty(0)
    if not fits or not np.isfinite(values).all():
        raise refuse(f"{name} vector", vector, "a list or an array of finite numbers, as many as the hidden size")
    return values.tobytes()
