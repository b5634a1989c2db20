"""A function of float32 arrays computed in float64: what it would give without rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_DTYPES = ("new_dtype", "dtype", "preferred_element_type")  # parameters of primitives

_SCALES = {float(np.float32(size**-0.5)): size**-0.5 for size in range(1, 1025)}


def in_float64(function: Callable, *args: Any) -> Any:
    """Return the value of a function of trees of arrays, with every float32 of its computation in float64.

    The function is traced in float32, so it does what it does there, casts included. Scalar constants have the number
    that their shortest decimal says, 1e-5 for float32(1e-5); arrays of constants have the digits of float32.
    """
    traced, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    with jax.enable_x64(True):
        wide = [_widened(np.asarray(each)) for each in jax.tree.leaves(args)]
        found = [np.asarray(each) for each in jax.jit(partial(_closed, traced))(*wide)]
    return jax.tree.unflatten(jax.tree.structure(shape), found)


def _widened(values: Any) -> Any:
    return values.astype(jnp.float64) if values.dtype == jnp.float32 else values


def _constant(literal: Literal) -> Any:
    aval: Any = literal.aval
    number, dtype = np.asarray(literal.val), aval.dtype
    if dtype != jnp.float32:
        return np.asarray(number, dtype)
    return _SCALES.get(float(number), np.float64(str(np.float32(number))))


def _closed(traced: ClosedJaxpr, *args: Any) -> list[Any]:
    return _values(traced.jaxpr, [_widened(jnp.asarray(each)) for each in traced.consts], args)


def _values(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr of float32 arrays, from those of float64."""
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for equation in jaxpr.eqns:
        own = [_constant(each) if isinstance(each, Literal) else known[each] for each in equation.invars]
        known |= zip(equation.outvars, _applied(equation.primitive, equation.params, own), strict=True)
    return [_constant(each) if isinstance(each, Literal) else known[each] for each in jaxpr.outvars]


def _applied(primitive: Any, params: dict[str, Any], own: list[Any]) -> list[Any]:
    """The results of one equation. Those with functions of their own are made again from the functions' results."""
    name = primitive.name
    if name == "scan":
        return _scanned(params, own)
    if name == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        goes_on = partial(_closed, params["cond_jaxpr"], *own[:first])
        body = partial(_closed, params["body_jaxpr"], *own[first:second])
        return jax.lax.while_loop(lambda state: goes_on(*state)[0], lambda state: body(*state), own[second:])
    if name == "cond":
        return jax.lax.switch(own[0], [partial(_closed, each) for each in params["branches"]], *own[1:])
    if name.startswith("scatter"):
        kept = {key: params[key] for key in ("indices_are_sorted", "unique_indices", "mode")}
        return [getattr(jax.lax, name.replace("-", "_"))(*own, params["dimension_numbers"], **kept)]
    inner = [each for each in params.values() if isinstance(each, (ClosedJaxpr, Jaxpr))]
    if inner:  # calls of functions
        (function,) = inner
        return _closed(function, *own) if isinstance(function, ClosedJaxpr) else _values(function, (), own)
    dtypes = {key: jnp.dtype("float64") for key in _DTYPES if params.get(key) == jnp.float32}
    found = primitive.bind(*own, **params | dtypes)
    return list(found) if primitive.multiple_results else [found]


def _scanned(params: dict[str, Any], own: list[Any]) -> list[Any]:
    first, count = params["num_consts"], params["num_carry"]
    carried, stacked = own[first : first + count], own[first + count :]

    def body(carry: list[Any], each: list[Any]) -> tuple[list[Any], list[Any]]:
        found = _closed(params["jaxpr"], *own[:first], *carry, *each)
        return found[:count], found[count:]

    last, found = jax.lax.scan(body, carried, stacked, length=params["length"], reverse=params["reverse"])
    return [*last, *found]
