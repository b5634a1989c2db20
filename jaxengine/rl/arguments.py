"""Checks of the arguments of trainers' forward pass: shapes, dtypes and ranges, before jax clamps an index silently.

Values that jax traces, in a function under `jax.jit`, cannot be read: if one is out of range, its token's results are
NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.unpaged import check_unpaged

_INT32 = np.iinfo(np.int32)


class Arguments(NamedTuple):
    """Checked arguments.

    Attributes:
      tokens: int32[B, T].
      segment_ids, positions: int32[B, T], or None; see `jaxengine.rl.forward`.
      experts: int32[B * T, k] by layer number, or None.
      fits: bool[B, T], whether a token's values are in range; None if all were read and are.
    """

    tokens: jax.Array
    segment_ids: jax.Array | None
    positions: jax.Array | None
    experts: dict[int, jax.Array] | None
    fits: jax.Array | None

    def marked(self, values: jax.Array) -> jax.Array:
        """Return values [B, T, ...] with NaN for tokens that do not fit."""
        if self.fits is None:
            return values
        return jnp.where(self.fits.reshape(self.fits.shape + (1,) * (values.ndim - 2)), values, jnp.nan)


def checked(
    model: CausalLM,
    params: Any,
    tokens: Any,
    segment_ids: Any,
    positions: Any,
    routed_experts: Any = None,
) -> Arguments:
    """Check the arguments of `jaxengine.rl.forward` and return them as jax arrays.

    Values that are traced are checked on the device, and the result has which tokens fit. Positions that are None stay
    None, unless a row is longer than the model's learned position embeddings: then they count from 0 in each segment.
    Raises ValueError for arguments whose structure, shape, dtype or range does not fit, and for a model without such a
    forward pass.
    """
    check_unpaged(model)
    _check_params(model, params)
    tokens = _integers("tokens", tokens, None)
    _check_axes({"params": params, "tokens": tokens})
    shape = tokens.shape
    ranges = [("tokens", tokens, 0, model.config.vocab_size)]
    if segment_ids is not None:
        segment_ids = _integers("segment_ids", segment_ids, shape)
        _in_range("segment_ids", segment_ids, _INT32.min, _INT32.max + 1, None)
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
    most = _num_positions(model)
    if positions is None and most is not None and shape[1] > most:
        positions = _counted(segment_ids, shape)
    if positions is not None:
        positions = _integers("positions", positions, shape)
        ranges.append(("positions", positions, 0, _INT32.max + 1 if most is None else most))
    if routed_experts is not None:
        experts_shape, count = _experts_shape(model, shape)
        routed_experts = _integers("routed_experts", routed_experts, experts_shape)
        ranges.append(("routed_experts", routed_experts, _INT32.min, count))
    fits = [_in_range(*each, segment_ids) for each in ranges]
    traced = [each for each in fits if each is not None]
    return Arguments(
        jnp.asarray(tokens, jnp.int32),
        segment_ids,
        None if positions is None else jnp.asarray(positions, jnp.int32),
        None if routed_experts is None else _by_layer(model, jnp.asarray(routed_experts, jnp.int32)),
        jnp.logical_and.reduce(jnp.stack(traced)) if traced else None,
    )


def _check_params(model: CausalLM, params: Any) -> None:
    """Raise ValueError for params whose structure or shapes differ from the model's, or that are not floats where the
    model's are floats.
    """
    expected = nnx.state(model)
    if jax.tree.structure(params) != jax.tree.structure(expected):
        text = "params must be an nnx.State of the model's structure, as nnx.state(model) gives"
        raise ValueError(f"{text}, got {type(params).__name__} with {len(jax.tree.leaves(params))} leaves")
    for (path, leaf), own in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(expected), strict=True):
        dtype = leaf.dtype if isinstance(leaf, jax.Array) else np.asarray(leaf).dtype
        is_float = jnp.issubdtype(dtype, jnp.floating) or not jnp.issubdtype(own.dtype, jnp.floating)
        if np.shape(leaf) != own.shape or not is_float:
            found = f"{dtype}{list(np.shape(leaf))}"
            text = f"params{jax.tree_util.keystr(path)} must be {own.dtype}{list(own.shape)}, or of another float dtype"
            raise ValueError(f"{text}, got {found}")


def _experts_shape(model: CausalLM, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return (shape of routed_experts for tokens of this shape, number of routed experts). Raises ValueError for a
    model without experts, or whose layers pick different numbers of them.
    """
    experts = model.config.experts
    if experts is None:
        raise ValueError(f"routed_experts must be None for {model.config.architecture}, which has no experts")
    if experts.by_layer:
        text = f"{model.config.architecture}, whose layers pick different numbers of experts"
        raise ValueError(f"routed_experts must be None for {text}")
    return (*shape, len(_expert_layers(model)), experts.num_per_token), experts.num_routed


def _expert_layers(model: CausalLM) -> list[int]:
    """Return the numbers of the layers with experts, ascending. The model must have experts (asserted)."""
    assert model.config.experts is not None
    return [layer for layer in range(model.config.num_layers) if layer not in model.config.experts.dense_layers]


def _by_layer(model: CausalLM, experts: jax.Array) -> dict[int, jax.Array]:
    """Return experts [B, T, L, k], L the number of layers with experts, as arrays [B * T, k] by layer number. The model
    must have experts.
    """
    rows = experts.reshape(-1, *experts.shape[2:])
    return {layer: rows[:, number] for number, layer in enumerate(_expert_layers(model))}


def _num_positions(model: CausalLM) -> int | None:
    """Return the number of learned position embeddings; None for a model without them."""
    form = model.config.declared
    return None if form is None or form.positions is None else model.config.max_position_embeddings


def _counted(segment_ids: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """Return the index of each token in its segment, int32[B, T]. segment_ids: int32[B, T], where neighbours with equal
    ids are a segment; None if each row is one segment. shape: [B, T].
    """
    index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    if segment_ids is None:
        return index
    is_first = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(is_first, index, 0), axis=1)


def _check_axes(arguments: dict[str, Any]) -> None:
    """Raise ValueError, with the argument's name, if an array in `arguments` (trees by name) is sharded over explicit
    mesh axes, as XLA must choose the sharding of arrays between layers.
    """
    for name, tree in arguments.items():
        for leaf in jax.tree.leaves(tree):
            if explicit := jax.typeof(leaf).sharding.mesh.explicit_axes:
                how = "axis_types=(jax.sharding.AxisType.Auto,) * number of axes, of jax.make_mesh"
                raise ValueError(f"{name} must be split over automatic mesh axes ({how}), got explicit {explicit}")


def _integers(name: str, values: Any, shape: tuple[int, ...] | None) -> Any:
    """Return integers as a numpy or jax array of their own dtype. Raises ValueError for other dtypes or shapes. name:
    name of the argument, for the error. shape: required shape; None allows any [B, T] that is not empty.
    """
    values = values if isinstance(values, jax.Array) else np.asarray(values)
    expected = "[B, T] with B, T >= 1" if shape is None else list(shape)
    fits = values.ndim == 2 and values.size > 0 if shape is None else values.shape == shape
    if not fits or not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers {expected}, got {values.dtype}{list(values.shape)}")
    return values


def _in_range(name: str, values: Any, least: int, below: int, segment_ids: Any) -> jax.Array | None:
    """Check that values int[B, T, ...] are at least `least` and below `below`. Padding, where segment_ids are negative,
    always fits; with segment_ids None there is no padding.

    Values that this process can read are checked at once: returns None, or raises ValueError, with the argument's name,
    for the first value that does not fit. Traced values, and those of other processes, are checked on the device:
    returns bool[B, T], whether all values of a token fit.
    """
    is_concrete = not any(isinstance(each, jax.core.Tracer) for each in (values, segment_ids))
    if is_concrete and getattr(values, "is_fully_addressable", True):
        values, segment_ids = jax.device_get((values, segment_ids))
    else:
        values, below = jnp.asarray(values, jnp.int32), min(below, _INT32.max)
    wrong = (values < least) | (values >= below)
    if segment_ids is not None:
        wrong &= (segment_ids >= 0).reshape(segment_ids.shape + (1,) * (values.ndim - 2))
    if not isinstance(wrong, np.ndarray):
        return ~wrong.any(axis=tuple(range(2, wrong.ndim)))
    if wrong.any():
        raise ValueError(f"{name} must be at least {least} and below {below}, got {values[wrong][0]}")
    return None
