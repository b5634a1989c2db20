"""Truncation thresholds and draws against a float64 oracle that sorts."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.sampling.row_functions import least_kept
from jaxengine.sampling.state import NEUTRAL
from jaxengine.sampling.token_choice import (
    NUM_CANDIDATES,
    VALUE_PASSES,
    _exponential,
    _highest,
    draw,
    draw_keys,
    lowest_kept,
)
from tests.jaxengine.sampling.draw_oracle import gumbel, threefry

TOP_K = (0, 1, 2, 3, 50, 299, 10**6)
TOP_P = (1.0, 0.9712, 0.7034, 0.3137, 1e-6, float(np.finfo(np.float32).tiny))
MIN_P = (0.0, 1e-3, 0.2, 1.0)
PARAMETERS = np.array(list(itertools.product(TOP_K, TOP_P, MIN_P)))


@jax.jit
def jit_lowest_kept(logits, best, temperature, top_k, top_p, min_p):
    rows = NEUTRAL._replace(min_p=min_p)
    return lowest_kept(logits, best, temperature, top_k, top_p, least_kept(best, temperature, rows))


jit_draw = jax.jit(draw)


def oracle_kept(logits: np.ndarray, temperature: float, top_k: float, top_p: float, min_p: float):
    """Mask of the kept tokens, and how close (in mass) the nearest decision was to going the other way."""
    x = (logits.astype(np.float64) - logits.max()) / temperature
    kept = (logits > -np.inf) & (x >= (np.log(min_p) if min_p else -np.inf))
    if 0 < top_k < len(x):
        kept &= logits >= np.sort(logits)[-int(top_k)]
    mass = np.where(kept, np.exp(x), 0)
    mass /= mass.sum()
    values, which = np.unique(logits, return_inverse=True)
    larger = np.cumsum(np.bincount(which, mass, len(values))[::-1])[::-1]  # of a value and of all larger ones
    above = np.append(larger[1:], 0.0)[which]
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


@pytest.mark.parametrize("vocab_size", [1, 127, pytest.param(300, marks=pytest.mark.versions), 4 * NUM_CANDIDATES + 9])
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


@pytest.mark.versions
def test_search_ends_for_rows_with_nan_and_infinity():
    logits = np.zeros((4, 9), np.float32)
    logits[0, 3], logits[1, 0], logits[2, 5], logits[3] = np.nan, np.inf, -np.nan, -np.inf
    best = np.asarray(jnp.max(logits, axis=1, keepdims=True))
    parameters = np.tile([[2, 0.5, 0.1]], (4, 1))
    jit_lowest_kept(logits, best, np.ones_like(best), **columns(parameters)).block_until_ready()


def run_draw(logits: np.ndarray, seed: int = 0, kept_from: float = -np.inf, temperature: float = 1.0) -> np.ndarray:
    """Draws for rows f32[S, V], at positions 0 to S - 1 of one seed."""
    best, positions = logits.max(axis=1, keepdims=True), np.arange(len(logits), dtype=np.int32)
    keys = draw_keys(np.full((len(logits), 2), (seed, 0), np.uint32), positions)
    return np.asarray(jit_draw(logits, best, np.full_like(best, kept_from), np.full_like(best, temperature), keys))


@pytest.mark.versions
@pytest.mark.parametrize("vocab_size", [1, 130, 3 * 128 + 40])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_a_draw_is_the_best_token_with_its_noise(vocab_size, temperature):
    logits = np.random.default_rng(1).normal(0, 2, (500, vocab_size)).astype(np.float32)
    noise = np.stack([gumbel(77, position, vocab_size) for position in range(500)])
    expected = (logits.astype(np.float64) / temperature + noise).argmax(axis=1)
    np.testing.assert_array_equal(run_draw(logits, 77, temperature=temperature), expected)


def test_draws_from_a_large_vocabulary_follow_the_distribution():
    """Chi-square over blocks of equal mass, and over the lowest bits of the token: noise must depend on every bit."""
    vocab_size, num_draws = 40_000, 2_000
    row = np.random.default_rng(2).normal(0, 1, vocab_size).astype(np.float32)
    drawn = np.concatenate([run_draw(np.tile(row, (500, 1)), seed) for seed in range(num_draws // 500)])
    probs = np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum()
    for groups in (np.minimum((np.cumsum(probs) * 50).astype(int), 49), np.arange(vocab_size) % 64):
        expected = np.bincount(groups, probs) * num_draws
        observed = np.bincount(groups[drawn], minlength=len(expected))
        chi_square, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
        assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_rounding_of_the_logits_does_not_change_what_is_drawn():
    """What steps of other shapes do to logits, over a flat distribution, where a place in a running sum would move."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 0.05, (200, 49_152)).astype(np.float32)
    rounded = logits * (1 + rng.integers(-2, 3, logits.shape) * 2.0**-23).astype(np.float32)
    np.testing.assert_array_equal(run_draw(rounded), run_draw(logits))


def test_a_draw_never_takes_an_impossible_token():
    rng = np.random.default_rng(2)
    logits = rng.uniform(-22, 0, (600, 300)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.7] = -np.inf
    logits[:200] = -np.inf
    logits[np.arange(600), rng.integers(0, 300, 600)] = 0.0  # the only one in the first rows
    for seed in range(20):
        drawn = run_draw(logits, seed)
        assert drawn.min() >= 0 and drawn.max() < 300
        assert np.isfinite(logits[np.arange(600), drawn]).all()


@pytest.mark.versions
def test_the_smallest_and_the_largest_noise_are_finite():
    keys = np.array([[0, 0]], np.uint32)
    ids = jnp.arange(1 << 22, dtype=jnp.uint32)
    noise = np.asarray(jax.jit(_exponential)(keys, ids))
    assert noise.min() > 0 and noise.max() < 17 and np.isfinite(noise).all()
    assert noise.min() < 1e-5 and noise.max() > 13


def test_a_draw_does_not_depend_on_padding_of_the_vocabulary():
    logits = np.random.default_rng(3).normal(0, 2, (500, 15 * 128)).astype(np.float32)
    padded = np.pad(logits, ((0, 0), (0, 9 * 128)), constant_values=-np.inf)
    np.testing.assert_array_equal(run_draw(padded), run_draw(logits))


def test_a_draw_respects_the_threshold():
    logits = np.tile(np.arange(10, dtype=np.float32), (500, 1))
    assert set(run_draw(logits, kept_from=7.0)) == {7, 8, 9}


@pytest.mark.versions
def test_keys_are_threefry_of_seed_and_position():
    """A seed must mean the same tokens on every platform and in every later version."""
    seeds = [(0, 0), (1, 2), (0xFFFFFFFF, 7), (13, 0x80000000)]
    positions = [0, 5, 2**31 - 1, 77]
    got = np.asarray(draw_keys(np.array(seeds, np.uint32), np.array(positions, np.int32)))
    expected = [threefry(seed, (0, position)) for seed, position in zip(seeds, positions, strict=True)]
    assert [tuple(row) for row in got.tolist()] == expected
    assert got[0, 0] >> 8 == 7020545
