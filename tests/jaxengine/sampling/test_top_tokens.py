"""The best tokens of a row against numpy's stable sort, ties and forbidden tokens included."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.sampling.top_tokens import (
    _blockwise_best,
    _reduced_best,
    best_token,
    first_true,
    top_tokens,
    top_values,
)

jit_top_tokens = jax.jit(top_tokens, static_argnums=1)
jit_top_values = jax.jit(top_values, static_argnums=1)


def rows(kind: str, vocab_size: int) -> np.ndarray:
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0, 3, (20, vocab_size)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "equal":
        logits[:] = 1.5
    elif kind == "forbidden":
        logits[rng.random(logits.shape) < 0.97] = -np.inf
    elif kind == "rising":
        logits = np.sort(logits, axis=1)
    return logits


@pytest.mark.parametrize(
    ("vocab_size", "num_top"), [(1, 1), (7, 7), (300, 1), (300, 20), (1000, 5), (1031, 64), (1031, 120), (500, 400)]
)
@pytest.mark.parametrize("kind", ["spread", "ties", "equal", "forbidden", "rising"])
def test_top_tokens_are_those_of_a_stable_sort(kind, vocab_size, num_top):
    logits = rows(kind, vocab_size)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :num_top]
    values, ids = jit_top_tokens(logits, num_top)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order, axis=1))
    np.testing.assert_array_equal(jit_top_values(logits, num_top), values)


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("kind", ["spread", "ties", "equal", "forbidden", "rising"])
def test_best_token_is_the_first_maximum(kind, vocab_size):
    logits = rows(kind, vocab_size)
    logits[0] = -np.inf
    best, ids = jax.jit(best_token)(logits)
    np.testing.assert_array_equal(best[:, 0], logits.max(axis=1))
    np.testing.assert_array_equal(ids, logits.argmax(axis=1))


@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("column", [0, 500, 999])
def test_best_token_marks_rows_that_are_not_finite(poison, column):
    logits = rows("spread", 1000)
    logits[3, column] = poison
    best, ids = jax.jit(best_token)(logits)
    assert np.flatnonzero(~np.isfinite(best[:, 0])).tolist() == [3]
    keep = np.arange(20) != 3
    np.testing.assert_array_equal(np.asarray(ids)[keep], logits[keep].argmax(axis=1))
    assert int(ids[3]) >= 0


@pytest.mark.parametrize("num_top", [1, 20, 128, 1024])
def test_no_row_as_long_as_the_vocabulary_is_ordered_on_a_gpu(num_top):
    logits = jax.ShapeDtypeStruct((2, 128_256), jnp.float32)
    lowered = jit_top_tokens.trace(logits, num_top).lower(lowering_platforms=("cuda",))
    ordering = [line for line in lowered.as_text().splitlines() if re.search(r"top_?k\b", line, re.I)]
    widths = [int(width) for line in ordering for width in re.findall(r"tensor<2x(\d+)xf32>", line)]
    assert widths and max(widths) <= 128_256 // 7, ordering


def test_both_ways_to_the_best_token_agree():
    for kind in ("spread", "ties", "equal", "rising"):
        for first, second in zip(_reduced_best(rows(kind, 1000)), _blockwise_best(rows(kind, 1000)), strict=True):
            np.testing.assert_array_equal(first, second)


def test_first_true():
    mask = np.array([[0, 1, 1], [0, 0, 0], [1, 0, 1], [0, 0, 1]], bool)
    assert first_true(mask).tolist() == [1, 3, 0, 2]
