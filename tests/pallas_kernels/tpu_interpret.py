"""TPU kernels on the CPU: jax's interpreter with every race of every kernel, and with semaphores that must end at 0.

    install()                                             # once per process
    kernel(..., interpret=interpret_params("on_wait"))    # and again with "eager"
    assert not problems()

Both orders are needed: a copy that nobody waits for is read too early when it runs "on_wait" (NaN), and is a race when
it runs "eager". A wait for a copy that nobody started never returns: run under a time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.state.indexing import NDIndexer
from jax._src.state.types import BitcastTransform, ReshapeTransform
from jax.experimental.pallas import tpu as pltpu

from tests.pallas_kernels import faster_interpreters, findings

_clear_shared_memory = interpreter._clear_shared_memory


def install() -> None:
    """Make jax's interpreter report here; RuntimeError on a jax release this was not fitted to."""
    findings.check_version()
    faster_interpreters.install()
    findings.record_races(interpreter)
    interpreter._clear_shared_memory = _end_of_kernel
    interpreter.get, interpreter.swap = _get_of_view(interpreter.get), _swap_of_view(interpreter.swap)


def interpret_params(dma: Literal["on_wait", "eager"]) -> pltpu.InterpretParams:
    return pltpu.InterpretParams(detect_races=True, dma_execution_mode=dma, **findings.go_on_after_races())


def reset() -> None:
    """Forget findings, and what a kernel that raised has left behind."""
    interpreter.reset_tpu_interpret_mode_state()
    findings.clear()


def problems() -> list[str]:
    """What was found since `reset`; call it after the results are ready."""
    return findings.found()


def _end_of_kernel() -> None:
    semaphores = interpreter._get_shared_memory().sem.values()
    if any(semaphore.count_by_core.any() or any(semaphore.tasks) for semaphore in semaphores):
        findings.add("a kernel ends with copies that nobody has waited for")
    _clear_shared_memory()


def _get_of_view(get: Callable) -> Callable:
    """The interpreter's `get`, which also reads references that are reshaped and bitcast after they are indexed."""

    def get_of_view(token, device, core, space, buffer, transforms, *rest, **options):
        indexers, views = _split(transforms)
        token, found = get(token, device, core, space, buffer, indexers, *rest, **options)
        for view in views:
            found = _viewed(np.asarray(found), view)
        return token, found

    get_of_view.__wrapped__ = get.__wrapped__  # which copies call
    return get_of_view


def _swap_of_view(swap: Callable) -> Callable:
    """The interpreter's `swap`, which also writes the whole of such a reference."""

    def swap_of_view(token, device, core, space, buffer, transforms, value, mask, **options):
        indexers, views = _split(transforms)
        if not views:
            return swap(token, device, core, space, buffer, transforms, value, mask, **options)
        token, old = interpreter.get(token, device, core, space, buffer, indexers)
        found = [np.asarray(old)]
        for view in views:
            found.append(_viewed(found[-1], view))
        value = np.asarray(value)
        assert mask is None and found[-1].shape == value.shape, "only the whole of a view can be written"
        for before in reversed(found[:-1]):
            value = _unviewed(value, before)
        token, _ = swap(token, device, core, space, buffer, indexers, value, None, **options)
        return token, found[-1]

    return swap_of_view


def _split(transforms: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the indexers before the first transform of another kind, and the other transforms."""
    first = next((at for at, each in enumerate(transforms) if not isinstance(each, NDIndexer)), len(transforms))
    return transforms[:first], transforms[first:]


def _viewed(found: np.ndarray, view: Any) -> np.ndarray:
    """Return what a reference to `found` [..., rows, lanes] holds after a transform. Rows that share words of a wider
    dtype are neighbours, the first in the lowest bits.
    """
    match view:
        case ReshapeTransform():
            return found.reshape(view.shape)
        case BitcastTransform():
            dtype = np.dtype(view.dtype)
            rows = dtype.itemsize // found.dtype.itemsize
            words = found.reshape(*found.shape[:-2], -1, rows, found.shape[-1])
            return np.ascontiguousarray(np.moveaxis(words, -2, -1)).view(dtype)[..., 0]
        case NDIndexer():
            indices = jax.tree.map(int, view).indices
            return found[tuple(map(interpret_utils._transform_slice_or_index, indices))]
    raise NotImplementedError(view)


def _unviewed(value: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the array of the shape and dtype of `before` that a reshape, bitcast or index of all makes `value`."""
    rows = value.dtype.itemsize // before.dtype.itemsize
    parts = np.ascontiguousarray(value).view(before.dtype).reshape(*value.shape, rows)
    return np.moveaxis(parts, -1, -2).reshape(before.shape)
