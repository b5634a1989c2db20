"""Truncation of a distribution over the vocabulary and sampling from it, for every row of logits f32[S, V] at once.

The vocabulary is never sorted. One number describes the kept tokens of a row, the lowest kept logit: taken from the
row's best tokens if they decide it, else found by bisection, exact either way; equal logits are kept or dropped
together. A draw is the best token after noise of its own is added to each logit, so another rounding of the logits
hardly ever changes it. Each row's arithmetic has the same order whatever S is. These are pure functions of arrays;
per-row arguments are [S, 1]. If the vocabulary is split over n devices, each has f32[S, V / n]; fixed_order and
top_tokens make the exchanges, and every device finds the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.sampling.fixed_order import row_counts, row_sums, running_sums
from jaxengine.sampling.top_tokens import best_token, first_id, first_true, row_extreme, top_values, vocab_size
from jaxengine.sharding.collectives import any_device

# Best tokens looked at before a threshold is searched for among all: most nuclei and every usual top_k fit in.
NUM_CANDIDATES = 128
# Passes of a threshold search that halve the interval of values before it halves the interval of bit patterns.
VALUE_PASSES = 12
# exp(-x) is 0 in float32 from here on.
_NO_WEIGHT = 104.0


def lowest_kept(
    logits: jax.Array, best: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, least: jax.Array
) -> jax.Array:
    """Return the least logit that each row keeps, f32[S, 1], after `least`, then top_k, then top_p over the tokens that
    these leave.

    logits: f32[S, V / n], the columns of each of n devices. All other arguments are [S, 1]. best: the row's maximum.
    temperature: > 0. `least` keeps logits >= `least`, which includes the best. top_k (i32, 0 = off) keeps tokens no
    less likely than the k-th. top_p (1 = off) keeps tokens with less than top_p of the probability strictly above them
    (Holtzman et al. 2020), so always the best one.
    """
    num_tokens = vocab_size(logits)
    candidates = top_values(logits, min(NUM_CANDIDATES, num_tokens))
    num_candidates = candidates.shape[1]
    kth = jnp.take_along_axis(candidates, jnp.clip(top_k - 1, 0, num_candidates - 1), axis=1)
    kept = jnp.where((top_k > 0) & (top_k < num_tokens), kth, -jnp.inf)
    far = (top_k > num_candidates) & (top_k < num_tokens)
    # Both in one exchange: XLA:CPU does not order an exchange and a conditional with exchanges independent of it.
    any_far, any_top_p = any_device(jnp.stack([jnp.any(far), jnp.any(top_p < 1)]))
    kept = lax.cond(
        any_far,
        lambda: jnp.where(far, _search_top_k(logits, best, top_k, candidates[:, -1:]), kept),
        lambda: kept,
    )
    kept = jnp.maximum(kept, least)
    return lax.cond(
        any_top_p,
        lambda: _top_p(logits, best, temperature, top_p, kept, candidates),
        lambda: kept,
    )


def _search_top_k(logits: jax.Array, best: jax.Array, top_k: jax.Array, highest: jax.Array) -> jax.Array:
    """Return the top_k-th greatest logit of each row, f32[S, 1], or another threshold that keeps the same tokens.

    logits: f32[S, V / n], the columns of each of n devices. best: the row's maximum. top_k: i32. highest: not less than
    the result. All three are [S, 1]. For a row with fewer than top_k logits above -inf, the result is the least of
    these logits.
    """

    def num_from(threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
        num = row_counts(logits >= threshold).astype(jnp.float32)
        return num, num

    lowest = row_extreme(jnp.min, jnp.where(logits > -jnp.inf, logits, best))
    return _highest(num_from, top_k.astype(jnp.float32), lowest, num_from(lowest), highest)


def _top_p(
    logits: jax.Array,
    best: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    kept: jax.Array,
    candidates: jax.Array,
) -> jax.Array:
    """Return the least logit, f32[S, 1], that top_p keeps among those >= `kept`; for rows with top_p = 1 this is
    `kept`.

    logits: f32[S, V / n]. candidates: f32[S, C], the row's best logits, best first. The other arguments are f32[S, 1].
    best: the row's maximum.
    """
    weights = jnp.exp((logits - best) / temperature)

    def mass_from(threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
        above = logits >= threshold
        return row_sums(jnp.where(above, weights, 0)), row_counts(above).astype(jnp.float32)

    mass, num = mass_from(kept)
    target = top_p * mass
    last, num_candidates = candidates[:, -1:], candidates.shape[1]
    running = running_sums(jnp.exp((candidates - best) / temperature))
    first = first_true(running >= target)[:, None]
    found = jnp.take_along_axis(candidates, jnp.minimum(first, num_candidates - 1), axis=1)
    reached = first < num_candidates
    # Sums in two orders differ by their rounding: the candidates may fall short of a target that all of them meet.
    settled = reached | (top_p >= 1) | (kept > last) | (num_candidates == vocab_size(logits))
    near = jnp.where(reached & (top_p < 1), jnp.maximum(found, kept), kept)
    # Tokens without weight add no mass, so the lower bound can be finite even if `kept` is -inf.
    lower = jnp.maximum(kept, jnp.maximum(best - _NO_WEIGHT * temperature, jnp.finfo(jnp.float32).min))
    searched = _highest(mass_from, jnp.where(settled, mass, target), jnp.minimum(lower, last), (mass, num), last)
    return jnp.where(settled, near, searched)


def draw_keys(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the random key of each row's draw, u32[S, 2], from seeds u32[S, 2] and positions i32[S].

    It is threefry of (seed, position), as jax.random.fold_in derives it. As no jax.random draw uses it, it depends on
    no jax_threefry_* option.
    """

    def words(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, position))

    return jax.vmap(words)(seeds, positions)


def draw(logits: jax.Array, best: jax.Array, kept_from: jax.Array, temperature: jax.Array, keys: jax.Array):
    """Draw one token per row, i32[S], from softmax(logits / temperature) over the logits >= kept_from.

    logits: f32[S, V / n]. best (the row's maximum), kept_from, temperature > 0: f32[S, 1]. keys: u32[S, 2]. The token
    is the one with the greatest logits / temperature plus Gumbel noise, which is a function of the row's key and the
    token's id (Gumbel 1954). A token of probability 0 or outside the vocabulary is never drawn. A row with NaN returns
    an arbitrary token.
    """
    ids = (first_id(logits) + jnp.arange(logits.shape[1], dtype=jnp.int32)).astype(jnp.uint32)
    noise = -jnp.log(_exponential(keys, ids))
    return best_token(jnp.where(logits >= kept_from, (logits - best) / temperature + noise, -jnp.inf))[1]


def _exponential(keys: jax.Array, ids: jax.Array) -> jax.Array:
    """Return exponentially distributed numbers f32[S, C], each a function of its row's key u32[S, 2] and its token's id
    u32[C] alone.

    The result is positive and finite, so that a single token is drawn whatever its number is. Small results, which
    decide a draw, have full float32 precision.
    """
    bits = _mix(_mix(ids * jnp.uint32(0x9E3779B9) + keys[:, :1]) ^ keys[:, 1:])
    below_one = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log1p(-below_one)


def _mix(x: jax.Array) -> jax.Array:
    """Return a 32-bit hash of each element in which every bit depends on every bit of x (Wellons 2018, lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _highest(
    measure: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    target: jax.Array,
    lower: jax.Array,
    at_lower: tuple[jax.Array, jax.Array],
    upper: jax.Array,
) -> jax.Array:
    """Return for each row the highest threshold t, f32[S, 1], lower <= t <= upper, at which `measure` is at least
    `target`, or another threshold that keeps the same tokens.

    Args:
      measure: t [S, 1] -> (the quantity at t, the number of logits that t keeps), f32[S, 1] each; both fall as t rises.
      target, lower, upper: f32[S, 1].
      at_lower: measure(lower).

    Bisects until at most one token lies between the bounds, or the lower bound meets the target exactly. If all rows
    begin so, no pass is made.
    """

    def unsettled(low, high, measured, num_low, num_high):
        return (measured > target) & (num_low - num_high > 1) & (low + 1 < high)

    def halve(carry):
        """Return the step's number plus 1 and the bounds of the threshold after one halving. Only rows that are not
        settled change.
        """
        step, bounds = carry
        low, high, measured, num_low, num_high = bounds
        # Halving the values first saves the passes that halving the bits spends on the exponents around zero; halving
        # the bits ends within 32 passes whatever the values are.
        middle_value = _ordered(0.5 * _unordered(low) + 0.5 * _unordered(high))
        middle_bits = (low & high) + ((low ^ high) >> 1)  # without overflow
        middle = jnp.clip(jnp.where(step < VALUE_PASSES, middle_value, middle_bits), low + 1, high - 1)
        reached, num = measure(_unordered(middle))
        active = unsettled(*bounds)
        up, down = active & (reached >= target), active & (reached < target)
        return step + 1, (
            jnp.where(up, middle, low),
            jnp.where(down, middle, high),
            jnp.where(up, reached, measured),
            jnp.where(up, num, num_low),
            jnp.where(down, num, num_high),
        )

    start = (_ordered(lower), _ordered(upper) + 1, *at_lower, jnp.zeros_like(lower))
    _, bounds = lax.while_loop(lambda carry: any_device(jnp.any(unsettled(*carry[1]))), halve, (jnp.int32(0), start))
    return _unordered(bounds[0])


def _ordered(x: jax.Array) -> jax.Array:
    """Return float32 numbers as int32 that have the same order (-0.0 just below 0.0)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _unordered(key: jax.Array) -> jax.Array:
    """Return the float32 numbers whose `_ordered` keys are given, i32; subnormal numbers become 0, because XLA:CPU
    compares them as 0 and numpy does not.
    """
    x = lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)
    return jnp.where(jnp.abs(x) < jnp.finfo(jnp.float32).tiny, 0.0, x)
