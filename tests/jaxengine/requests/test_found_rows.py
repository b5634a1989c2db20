"""Rows of a sequence's tokens: every output has those that it should have, and what was sent is not copied again."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.requests.output.found_rows import FoundRows

PLAIN, NAMED = np.dtype((np.float32, (3,))), np.dtype([("a", np.float32, (2,)), ("b", np.int32)])
# Of each step how many rows it brings, and how many are to be known after it; None: nothing is taken after it.
STEPS = [(5, 4), (0, 4), (1, 5), (3, None), (1, 10), (2, 11), (4, 12)]


def some_rows(dtype: np.dtype, count: int) -> np.ndarray:
    size = dtype.itemsize // 4 * count
    values = np.arange(size, dtype=np.float32)
    return values.view(dtype) if dtype.names else values.reshape(count, *dtype.shape)


@pytest.mark.parametrize("only_new", [False, True])
@pytest.mark.parametrize("dtype", [PLAIN, NAMED], ids=["plain", "named"])
def test_each_output_has_its_rows(dtype, only_new):
    every, found, added, sent, outputs = some_rows(dtype, 16), FoundRows(), 0, 0, []
    for brought, known in STEPS:
        found.add(every[added : added + brought])
        added += brought
        if known is None:
            continue
        wanted, sent = every[sent if only_new else 0 : min(known, added)], min(known, added)
        outputs.append((found.take(known, only_new), wanted))
    for taken, wanted in outputs:  # later rows change none of those that were returned
        own = {None: taken} if wanted.dtype.names is None else taken
        for name, each in own.items():
            np.testing.assert_array_equal(each, wanted if name is None else wanted[name])


@pytest.mark.parametrize("only_new, most", [(True, 1), (False, 2000)])
def test_rows_that_were_sent_are_not_copied_again(only_new, most):
    """Each new buffer is a copy: with only_new of the new row alone, otherwise of all, and seldom."""
    found, rows = FoundRows(), some_rows(PLAIN, 1000)
    outputs: list[np.ndarray] = []
    for index in range(1000):
        found.add(rows[index : index + 1].copy())
        taken = found.take(index + 1, only_new)
        assert isinstance(taken, np.ndarray)
        outputs.append(taken)
    buffers = {id(each.base): len(each.base) for each in outputs if each.base is not None}
    assert max(buffers.values()) <= most and (only_new or len(buffers) <= 12)
