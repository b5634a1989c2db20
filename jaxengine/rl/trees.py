"""Trees of a trainer's parameters as names and arrays, and conversions of their shapes to those of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

# Number of unknown names in an error's text.
MAX_SHOWN = 10


def named_arrays(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, array) for each array of `tree`, nested mappings, sequences and variables, under its path joined by
    dots; None is left out.

    An `nnx.Module` stands for its parameters, a box of flax.linen for its value.
    """
    yield from _walk(nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree, ())


def _walk(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a tree, under names that begin with `path`, joined by dots.

    Variables and boxes of flax.linen stand for their values; sequences are named by index; None is no array; anything
    else is one.
    """
    if isinstance(tree, nnx.Variable):
        tree = tree.get_value()
    elif hasattr(tree, "unbox"):
        tree = tree.unbox()
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _walk(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _walk(value, (*path, str(index)))
    elif tree is not None:
        yield ".".join(path), tree


def refuse_unknown(names: Iterable[str], is_known: Callable[[str], bool], kind: str) -> None:
    """Raise ValueError, with the first ones, if there are unknown names. kind: whose names are known, for its text."""
    if unknown := [name for name in names if not is_known(name)]:
        more = f" and {len(unknown) - MAX_SHOWN} more" if len(unknown) > MAX_SHOWN else ""
        raise ValueError(f"params has names that are not {kind}: {', '.join(unknown[:MAX_SHOWN])}{more}")


def same(array: np.ndarray) -> np.ndarray:
    """Return the array unchanged."""
    return array


def in_first(array: np.ndarray) -> np.ndarray:
    """Return an array [in, ...] as [out, in]; heads and their dimensions are joined."""
    return array.reshape(array.shape[0], -1).T


def out_last(array: np.ndarray) -> np.ndarray:
    """Return an array [..., out] as [out, in]; heads and their dimensions are joined."""
    return array.reshape(-1, array.shape[-1]).T


def flat(array: np.ndarray) -> np.ndarray:
    """Return an array of any shape, such as [heads, head dimension], with one axis."""
    return array.reshape(-1)


def in_float32(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Wrap a function of arrays so that it computes in float32 and returns the dtype of its argument."""
    return lambda array: function(array.astype(np.float32)).astype(array.dtype)
