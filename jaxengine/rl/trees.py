"""Trees of a trainer's parameters as names and arrays, and conversions of their shapes to those of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

# Number of unknown names in an error's text.
MAX_SHOWN = 10


def named_arrays(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, array) for each array of `tree`, nested mappings, sequences and variables. The name is its path
    joined by dots; None is left out.

    An `nnx.Module` is replaced by its parameters, a box of flax.linen by its value.
    """
    yield from _walk(nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree, ())


def _walk(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (name, array) for each array of a tree. Names begin with `path` and are joined by dots.

    Variables and boxes of flax.linen are replaced by their values; items of sequences are named by index; None is
    skipped; any other value is yielded as an array.
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
    """Raise ValueError if `is_known` is false for some names; the error shows the first MAX_SHOWN of these and counts
    the rest. kind: description of the known names, for the error.
    """
    if unknown := [name for name in names if not is_known(name)]:
        more = f" and {len(unknown) - MAX_SHOWN} more" if len(unknown) > MAX_SHOWN else ""
        raise ValueError(f"params has names that are not {kind}: {', '.join(unknown[:MAX_SHOWN])}{more}")


def same(array: np.ndarray) -> np.ndarray:
    """Return the array unchanged."""
    return array


def in_first(array: np.ndarray) -> np.ndarray:
    """Return an array [in, ...] as [out, in]; the axes after the first, such as heads and their dimensions, are
    joined.
    """
    return array.reshape(array.shape[0], -1).T


def out_last(array: np.ndarray) -> np.ndarray:
    """Return an array [..., out] as [out, in]; the axes before the last, such as heads and their dimensions, are
    joined.
    """
    return array.reshape(-1, array.shape[-1]).T


def flat(array: np.ndarray) -> np.ndarray:
    """Return an array of any shape, such as [heads, head dimension], with one axis."""
    return array.reshape(-1)


def in_float32(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that applies `function` to its argument in float32, and converts the result to the argument's
    dtype.
    """
    return lambda array: function(array.astype(np.float32)).astype(array.dtype)
