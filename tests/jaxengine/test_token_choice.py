"""Truncation thresholds and draws against a float64 oracle that sorts."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.fixed_order import BLOCK, block_sums, running_sums
from jaxengine.token_choice import (
    NUM_CANDIDATES,
    VALUE_PASSES,
    _first_beyond,
    _highest,
    draw,
    lowest_kept,
    uniform,
)

TOP_K = (0, 1, 2, 3, 50, 299, 10**6)
TOP_P = (1.0, 0.9712, 0.7034, 0.3137, 1e-6, float(np.finfo(np.float32).tiny))
MIN_P = (0.0, 1e-3, 0.2, 1.0)
PARAMETERS = np.array(list(itertools.product(TOP_K, TOP_P, MIN_P)))

jit_lowest_kept = jax.jit(lowest_kept)
jit_draw = jax.jit(draw)


def oracle_kept(logits: np.ndarray, temperature: float, top_k: float, top_p: float, min_p: float):
    """Mask of the kept tokens, and how close (in mass) the nearest decision was to going the other way."""
    x = (logits.astype(np.float64) - logits.max()) / temperature
    kept = (logits > -np.inf) & (x >= (np.log(min_p) if min_p else -np.inf))
    if 0 < top_k < len(x):
        kept &= logits >= np.sort(logits)[-int(top_k)]
    mass = np.where(kept, np.exp(x), 0)
    mass /= mass.sum()
    above = np.array([mass[logits > own].sum() for own in logits])
    margin = np.abs(above - top_p)[kept & (above > 0)].min(initial=1.0) if top_p < 1 else 1.0
    if min_p:
        margin = min(margin, np.abs(np.exp(x) - min_p)[np.exp(x) != min_p].min(initial=1.0))
    return kept & (above < top_p if top_p < 1 else True), margin


def columns(parameters: np.ndarray) -> dict[str, np.ndarray]:
    top_k, top_p, min_p = (parameters[:, column : column + 1] for column in range(3))
    return {
        "top_k": np.minimum(top_k, 2**31 - 1).astype(np.int32),
        "top_p": top_p.astype(np.float32),
        "min_p": min_p.astype(np.float32),
    }


def check_kept(logits: np.ndarray, parameters: np.ndarray, temperature: float) -> int:
    """Compares every row; returns how many were too close to call in float32."""
    best = logits.max(axis=1, keepdims=True)
    heat = np.full_like(best, temperature)
    lowest = np.asarray(jit_lowest_kept(logits, best, heat, **columns(parameters)))
    too_close = 0
    for row, threshold, (top_k, top_p, min_p) in zip(logits, lowest, parameters, strict=True):
        kept, margin = oracle_kept(row, temperature, top_k, top_p, min_p)
        if margin < 1e-5:
            too_close += 1
            continue
        # Tokens that are forbidden may fall on either side: their weight is 0.
        np.testing.assert_array_equal((row >= threshold) & (row > -np.inf), kept, f"{top_k=} {top_p=} {min_p=}")
    return too_close


@pytest.mark.parametrize("vocab_size", [1, 127, 300, 4 * NUM_CANDIDATES + 9])
@pytest.mark.parametrize("kind", ["spread", "flat", "ties", "peaked", "forbidden", "tiny"])
def test_kept_tokens_are_the_oracles(kind, vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0, 3, (len(PARAMETERS), vocab_size)).astype(np.float32)
    if kind == "flat":  # nuclei beyond the candidates
        logits *= 0.05
    elif kind == "ties":
        logits = np.round(logits)
    elif kind == "peaked":
        logits[:, rng.integers(vocab_size)] = 60.0
    elif kind == "forbidden":
        logits[:, 1:][rng.random(logits[:, 1:].shape) < 0.9] = -np.inf
    elif kind == "tiny":
        logits *= 1e-30
    assert check_kept(logits, PARAMETERS, 0.7) < len(PARAMETERS) // 10


def test_kept_tokens_are_the_oracles_for_every_small_pattern():
    patterns = np.array(list(itertools.product([-np.inf, -1.0, 0.0, 2.5], repeat=4)), np.float32)
    patterns = patterns[np.isfinite(patterns).any(axis=1)]
    chosen = np.array([(k, p, m) for k in (0, 1, 2, 4) for p in (1.0, 0.8, 0.45) for m in (0.0, 0.3)])
    logits = np.repeat(patterns, len(chosen), axis=0)
    assert check_kept(logits, np.tile(chosen, (len(patterns), 1)), 1.0) < len(logits) // 20


@pytest.mark.parametrize("start", [1.5, -1.5, 3e20])
def test_top_k_separates_neighbouring_floats(start):
    """The search ends at single bit patterns: 64 consecutive float32 values."""
    values = [np.float32(start)]
    while len(values) < 64:
        values.append(np.nextafter(values[-1], np.float32(np.inf)))
    logits = np.tile(np.random.default_rng(0).permutation(np.array(values, np.float32)), (64, 1))
    best = logits.max(axis=1, keepdims=True)
    parameters = np.array([(k, 1.0, 0.0) for k in range(1, 65)])
    lowest = jit_lowest_kept(logits, best, np.ones_like(best), **columns(parameters))
    np.testing.assert_array_equal((logits >= np.asarray(lowest)).sum(axis=1), np.arange(1, 65))


def test_search_takes_a_bounded_number_of_passes():
    """A threshold of 0.0 that many logits share, where halving values would crawl through every exponent."""
    logits = jnp.asarray(np.concatenate([np.zeros(50), np.linspace(-3, 3, 99)])[None], jnp.float32)
    passes = []

    def num_from(threshold):
        jax.debug.callback(lambda _: passes.append(1), threshold)
        num = jnp.sum((logits >= threshold).astype(jnp.float32), axis=1, keepdims=True)
        return num, num

    bounds = jnp.full((1, 1), -3.0), num_from(jnp.full((1, 1), -3.0)), jnp.full((1, 1), 3.0)
    passes.clear()
    found = jax.jit(lambda: _highest(num_from, jnp.full((1, 1), 60.0), *bounds))()
    jax.effects_barrier()
    assert float(found[0, 0]) == 0.0
    assert 1 < len(passes) <= VALUE_PASSES + 32


def test_search_ends_for_rows_with_nan_and_infinity():
    logits = np.zeros((4, 9), np.float32)
    logits[0, 3], logits[1, 0], logits[2, 5], logits[3] = np.nan, np.inf, -np.nan, -np.inf
    best = np.asarray(jnp.max(logits, axis=1, keepdims=True))
    parameters = np.tile([[2, 0.5, 0.1]], (4, 1))
    jit_lowest_kept(logits, best, np.ones_like(best), **columns(parameters)).block_until_ready()


def run_draw(logits: np.ndarray, u: np.ndarray, kept_from: float = -np.inf) -> np.ndarray:
    best = logits.max(axis=1, keepdims=True)
    rest = (np.full_like(best, kept_from), np.ones_like(best), np.asarray(u, np.float32).reshape(-1, 1))
    return np.asarray(jit_draw(logits, best, *rest))


@pytest.mark.parametrize("vocab_size", [1, BLOCK, BLOCK + 1, 3 * BLOCK + 40])
def test_draw_inverts_the_cumulative_distribution(vocab_size):
    u = (np.arange(2000) + 0.37) / 2000
    row = np.random.default_rng(1).normal(0, 2, vocab_size).astype(np.float32)
    drawn = run_draw(np.tile(row, (len(u), 1)), u)
    weights = np.exp(row.astype(np.float64) - row.max())
    running = np.cumsum(weights) / weights.sum()
    close = np.abs(running[None, :] - u[:, None]).min(axis=1) < 1e-5
    expected = np.searchsorted(running, u, side="right")
    np.testing.assert_array_equal(drawn[~close], expected[~close])
    assert close.mean() < 0.1


@pytest.mark.parametrize("vocab_size", [BLOCK + 1, 5 * BLOCK - 3])
def test_draw_never_takes_an_impossible_token(vocab_size):
    """At both ends of [0, 1), with weights made so that running sums lose their small terms."""
    rng = np.random.default_rng(2)
    logits = rng.uniform(-22, 0, (600, vocab_size)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.7] = -np.inf
    logits[np.arange(600), rng.integers(0, vocab_size, 600)] = 0.0
    logits[:200, -BLOCK:] = -np.inf  # nothing in the last block
    logits[:, 0] = -np.inf
    logits[np.isneginf(logits).all(axis=1), 1] = 0.0
    for u in (0.0, 2.0**-24, 0.5, 1 - 2.0**-23, 1 - 2.0**-24):
        drawn = run_draw(logits, np.full(600, u))
        assert drawn.min() >= 0 and drawn.max() < vocab_size
        assert np.isfinite(logits[np.arange(600), drawn]).all()


def test_draw_at_the_steps_takes_the_token_that_begins_there():
    assert run_draw(np.zeros((4, 4), np.float32), np.array([0, 0.25, 0.5, 0.75])).tolist() == [0, 1, 2, 3]


def test_running_sum_that_rises_without_a_weight_picks_nothing_there():
    weights = np.array([[1, 0, 1, 0], [1, 0, 0, 0]], np.float32)
    running = np.array([[1, 1.0000002, 2, 2], [1, 1, 1, 1]], np.float32)  # as a parallel scan may round
    target = np.array([[1], [1]], np.float32)
    assert _first_beyond(jnp.asarray(weights), jnp.asarray(running), jnp.asarray(target)).tolist() == [[2], [0]]


def test_draw_does_not_depend_on_padding_of_the_vocabulary():
    """At targets that are block borders but for their rounding."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, (2000, 15 * BLOCK)).astype(np.float32)
    running = np.asarray(jax.jit(lambda x: running_sums(block_sums(jnp.exp(x - x.max(axis=1, keepdims=True)))))(logits))
    u = running[np.arange(2000), rng.integers(7, 14, 2000)] / running[:, -1]
    padded = np.pad(logits, ((0, 0), (0, 9 * BLOCK)), constant_values=-np.inf)
    np.testing.assert_array_equal(run_draw(padded, u), run_draw(logits, u))


def test_draw_respects_the_threshold():
    logits = np.tile(np.arange(10, dtype=np.float32), (500, 1))
    assert set(run_draw(logits, np.linspace(0, 0.999, 500), kept_from=7.0)) == {7, 8, 9}


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> int:
    """First word of Threefry-2x32 with 20 rounds (Salmon et al. 2011)."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = ((word + own) & 0xFFFFFFFF for word, own in zip(counter, keys[:2], strict=True))
    for group in range(5):
        for distance in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            a = (a + b) & 0xFFFFFFFF
            b = a ^ ((b << distance | b >> (32 - distance)) & 0xFFFFFFFF)
        a = (a + keys[(group + 1) % 3]) & 0xFFFFFFFF
        b = (b + keys[(group + 2) % 3] + group + 1) & 0xFFFFFFFF
    return a


def test_uniform_is_threefry_of_seed_and_position():
    """A seed must mean the same tokens on every platform and in every later version."""
    seeds = [(0, 0), (1, 2), (0xFFFFFFFF, 7), (13, 0x80000000)]
    positions = [0, 5, 2**31 - 1, 77]
    got = np.asarray(uniform(np.array(seeds, np.uint32), np.array(positions, np.int32)))
    expected = [(threefry(seed, (0, position)) >> 8) / 2**24 for seed, position in zip(seeds, positions, strict=True)]
    np.testing.assert_array_equal(got.astype(np.float64), expected)
    assert got[0] == 7020545 / 2**24
