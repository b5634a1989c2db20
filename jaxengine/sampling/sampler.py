"""From logits to tokens, for a batch in which every row has its own parameters. Traced inside the one jitted step.

Owns the device-resident sampling parameters (`SamplingState`, one row per slot), the counts of tokens, and the order
of operations, which is vLLM's: raw logprobs, mask, additive bias, penalties, temperature, min_p, top_k, top_p, draw.
What no row asks for is skipped by `lax.cond`, so one executable serves every mix. Knows nothing of requests, of text,
or of when a row changes.

The vocabulary may be split over n devices: each has V / n columns of the logits, of the counts and of the biases, and
the masks of these tokens (V / n is a multiple of 32 then), all else whole, and finds the same tokens, bit for bit those
of one device. Padding columns come last and hold -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxengine.sampling.logprobs import TokenLogprobs, no_logprobs, token_logprobs
from jaxengine.sampling.token_choice import draw, draw_keys, lowest_kept
from jaxengine.sampling.top_tokens import best_token, first_id, vocab_size
from scheduler.token_params import TokenParams

_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


class SamplingState(NamedTuple):
    """Sampling parameters of every slot, R = max_num_seqs, on the device.

    Steps only read them: what passes through a program XLA may fetch into faster memory and write back. What steps do
    change is `token_counts`, i32[R, V]: 2 * (times in the output) + (1 if in the prompt).
    """

    temperature: jax.Array  # f32[R], 0 = greedy
    top_p: jax.Array  # f32[R], 1 = off
    min_p: jax.Array  # f32[R], 0 = off
    presence_penalty: jax.Array  # f32[R], 0 = off
    frequency_penalty: jax.Array  # f32[R], 0 = off
    repetition_penalty: jax.Array  # f32[R], 1 = off
    top_k: jax.Array  # i32[R], 0 = off
    seed: jax.Array  # u32[R, 2], low and high word
    logit_bias: jax.Array  # f32[R, V], added to the logits; -inf forbids the token
    token_mask: jax.Array  # i32[R, mask_words(V)], bit t % 32 of word t / 32 allows token t; all ones: every token


class SamplerFlags(NamedTuple):
    """What some row of the batch needs; bool[] each. A flag that is False promises that no row needs that part."""

    any_random: jax.Array
    any_truncation: jax.Array  # top_k, top_p or min_p
    any_penalties: jax.Array
    any_bias: jax.Array
    any_mask: jax.Array
    any_logprobs: jax.Array


class SampleOutput(NamedTuple):
    """S rows; Kl = min(max_logprobs, V). Without `any_logprobs` the last four hold (-inf, 0, 0, -inf)."""

    token_ids: jax.Array  # i32[S]; -1: the row's logits hold NaN or +inf, or every token is forbidden
    logprob: jax.Array  # f32[S]
    rank: jax.Array  # i32[S], 1 = the best token
    top_ids: jax.Array  # i32[S, Kl]
    top_logprobs: jax.Array  # f32[S, Kl]


class _Rows(NamedTuple):
    """The parameters of this batch's rows, f32[S, 1] (top_k i32[S, 1]); neutral and greedy for padding rows."""

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    top_k: jax.Array


_NEUTRAL = _Rows(0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0)  # pyright: ignore[reportArgumentType]


def init_state(max_num_seqs: int, vocab_size: int) -> SamplingState:
    """Every slot greedy and neutral: R = max_num_seqs rows, 4 * V + V / 8 bytes each."""
    columns = [jnp.full(max_num_seqs, value, jnp.float32) for value in _NEUTRAL[:6]]
    return SamplingState(
        *columns,
        top_k=jnp.zeros(max_num_seqs, jnp.int32),
        seed=jnp.zeros((max_num_seqs, 2), jnp.uint32),
        logit_bias=jnp.zeros((max_num_seqs, vocab_size), jnp.float32),
        token_mask=jnp.full((max_num_seqs, mask_words(vocab_size)), -1, jnp.int32),
    )


def mask_words(vocab_size: int) -> int:
    """Words of a row of `SamplingState.token_mask`, those that fill up its last lane tile included.

    An array whose rows are not whole tiles is stored by columns on a TPU, and turned around where rows are read.
    """
    return -(-vocab_size // (32 * 128)) * 128


def param_columns(params: TokenParams, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """One request's row for `write_params`: i32[3] (top_k, seed low, seed high, as bit patterns) and
    f32[6] (temperature, top_p, min_p, presence, frequency, repetition). `seed` is any 64-bit integer, signed or not."""
    words = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32).view(np.int32)
    ints = np.array([max(params.top_k, 0), *words], np.int32)
    # A top_p below float32's range would become 0, which keeps nothing.
    floats = [params.temperature, max(params.top_p, _SMALLEST_NORMAL), params.min_p]
    floats += [params.presence_penalty, params.frequency_penalty, params.repetition_penalty]
    return ints, np.array(floats, np.float32)


def write_params(state: SamplingState, slots: jax.Array, ints: jax.Array, floats: jax.Array) -> SamplingState:
    """Stores `param_columns` rows: slots i32[M] distinct, ints i32[M, 3], floats f32[M, 6]. Slots >= R are dropped."""
    columns = {name: floats[:, column] for column, name in enumerate(SamplingState._fields[:6])}
    seed = lax.bitcast_convert_type(ints[:, 1:], jnp.uint32)
    return state._replace(
        **{name: write_slots(getattr(state, name), slots, values) for name, values in columns.items()},
        top_k=write_slots(state.top_k, slots, ints[:, 0]),
        seed=jnp.stack([write_slots(state.seed[:, word], slots, seed[:, word]) for word in range(2)], axis=1),
    )


def write_slots(array: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """array [R] with values [M] at slots i32[M], which are distinct where they are < R; the others are dropped.

    Compares and selects: XLA:TPU sends a scatter into so small an array to the SparseCore, or walks it row by row.
    """
    written = slots[:, None] == jnp.arange(array.shape[0], dtype=jnp.int32)
    chosen = jnp.sum(jnp.where(written, values[:, None], jnp.zeros((), array.dtype)), axis=0, dtype=array.dtype)
    return jnp.where(jnp.any(written, axis=0), chosen, array)


def count_tokens(token_counts: jax.Array, slots: jax.Array, token_ids: jax.Array, valid: jax.Array) -> jax.Array:
    """token_counts with one more output token per row: slots i32[S] distinct, token_ids i32[S], valid bool[S].

    Rows that are not valid, whose slot is >= R or whose token is outside the vocabulary change nothing.
    """
    num_slots, num_columns = token_counts.shape
    columns = token_ids - first_id(token_counts)
    slots = jnp.where(valid & (columns >= 0) & (columns < num_columns), slots, num_slots)
    if slots.shape[0] == 1:  # XLA CPU copies the whole operand of a one-row scatter
        slots = jnp.pad(slots, (0, 1), constant_values=num_slots)
        columns = jnp.pad(columns, (0, 1))
    return token_counts.at[slots, columns].add(2, mode="drop")


def set_row(array: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
    """array [R, V] with row [V] at slot; unchanged when slot >= R."""
    # Not a scatter: XLA CPU copies the whole operand of a one-row scatter.
    current = lax.dynamic_index_in_dim(array, slot, keepdims=False)
    row = jnp.where(slot < array.shape[0], row, current)
    return lax.dynamic_update_index_in_dim(array, row, slot, axis=0)


def set_bias_row(state: SamplingState, slot: jax.Array, row: jax.Array) -> SamplingState:
    """Replaces logit_bias[slot] by row f32[V]; nothing happens when slot >= R."""
    return state._replace(logit_bias=set_row(state.logit_bias, slot, row))


def set_mask_rows(state: SamplingState, slots: jax.Array, rows: jax.Array) -> SamplingState:
    """Replaces token_mask rows: slots i32[M], distinct where they are < R, rows i32[M, W]. Slots >= R are dropped."""
    written = slots[:, None] == jnp.arange(state.token_mask.shape[0], dtype=jnp.int32)
    chosen = rows[jnp.argmax(written, axis=0)]
    return state._replace(token_mask=jnp.where(jnp.any(written, axis=0)[:, None], chosen, state.token_mask))


def sample(
    logits: jax.Array,
    state: SamplingState,
    token_counts: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    flags: SamplerFlags,
    *,
    max_logprobs: int,
    logprobs_mode: str,
) -> SampleOutput:
    """Chooses one token per row of logits f32[S, V].

    slots i32[S]: the row of `state` and of `token_counts` i32[R, V] each belongs to; >= R marks a padding row, which
    reads no state and is greedy. positions i32[S]: position of the token being chosen. A row's token depends on its
    logits, its slot's parameters and its position, never on its neighbours or on S. logprobs_mode is one of vLLM's
    (config.LOGPROBS_MODES): the raw ones report the given logits, the processed ones those that were drawn from,
    temperature and truncation included.
    """
    rows = _Rows(
        *(
            getattr(state, name).at[slots].get(mode="fill", fill_value=neutral)[:, None]
            for name, neutral in zip(_Rows._fields, _NEUTRAL, strict=True)
        )
    )
    # What greedy rows are divided by, as in vLLM's processed logprobs.
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)

    processed, normalize = logprobs_mode.startswith("processed"), logprobs_mode.endswith("logprobs")
    num_top = min(max_logprobs, vocab_size(logits))

    def score(scored: Callable[[], jax.Array], token_ids: jax.Array) -> TokenLogprobs:
        return lax.cond(
            flags.any_logprobs,
            lambda: token_logprobs(scored(), token_ids, num_top=num_top, normalize=normalize),
            lambda: no_logprobs(logits.shape[0], num_top),
        )

    def choose(adjusted: jax.Array, draw_rows: Callable[..., tuple[jax.Array, jax.Array]]):
        """Token ids, and their scores in the modes that report what was drawn from."""
        best, greedy_ids = best_token(adjusted)
        token_ids, kept_from = draw_rows(adjusted, best, greedy_ids)
        token_ids = jnp.where(jnp.isfinite(best[:, 0]), token_ids, -1)
        if not processed:
            return token_ids, None
        return token_ids, score(lambda: jnp.where(adjusted >= kept_from, adjusted / temperature, -jnp.inf), token_ids)

    def draw_none(adjusted: jax.Array, best: jax.Array, greedy_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return greedy_ids, jnp.full_like(best, -jnp.inf)

    def draw_random(adjusted: jax.Array, best: jax.Array, greedy_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept_from = lax.cond(
            flags.any_truncation,
            lambda: lowest_kept(adjusted, best, temperature, rows.top_k, rows.top_p, rows.min_p),
            lambda: jnp.full_like(best, -jnp.inf),
        )
        seeds = state.seed.at[slots].get(mode="fill", fill_value=0)
        drawn = draw(adjusted, best, kept_from, temperature, draw_keys(seeds, positions))
        return jnp.where(rows.temperature[:, 0] > 0, drawn, greedy_ids), kept_from

    def choose_any() -> tuple[jax.Array, TokenLogprobs | None]:
        # Not in each branch that wants them: XLA:TPU would bring the table of all slots into VMEM for the branches, and
        # take it out again where their other operands need the room.
        masks = _mask_rows(state, slots, flags.any_mask)
        masked = partial(_masked, logits, masks)
        adjusted = lax.cond(
            flags.any_bias | flags.any_penalties,
            lambda: _adjust(masked(), state, token_counts, slots, rows),
            lambda: lax.cond(flags.any_mask, masked, lambda: logits),
        )
        return choose(adjusted, lambda *known: lax.cond(flags.any_random, draw_random, draw_none, *known))

    adjusts = flags.any_bias | flags.any_penalties | flags.any_mask
    # Greedy steps read the logits once: a conditional that gives [S, V] copies them even where nothing is adjusted.
    token_ids, scores = lax.cond(adjusts | flags.any_random, choose_any, lambda: choose(logits, draw_none))
    return SampleOutput(token_ids, *(score(lambda: logits, token_ids) if scores is None else scores))


def _state_rows(array: jax.Array, slots: jax.Array) -> jax.Array:
    return array.at[slots].get(mode="fill", fill_value=0)


def _mask_rows(state: SamplingState, slots: jax.Array, any_mask: jax.Array) -> jax.Array:
    """u32[S, W]: `token_mask` of each row, every token where no row of the batch has one."""
    masks = state.token_mask.at[slots].get(mode="fill", fill_value=-1)
    return lax.bitcast_convert_type(jnp.where(any_mask, masks, -1), jnp.uint32)


def _masked(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """-inf for the tokens that a row's mask, u32[S, W], does not allow; what is not finite stays so, as under a bias of
    -inf."""
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return jnp.where(bits.reshape(len(masks), -1)[:, : logits.shape[1]] > 0, logits, logits - jnp.inf)


def _adjust(
    logits: jax.Array, state: SamplingState, token_counts: jax.Array, slots: jax.Array, rows: _Rows
) -> jax.Array:
    """Bias, then penalties: repetition (Keskar et al. 2019) over prompt and output, OpenAI's two over the output. Rows
    without them keep their logits bit for bit."""
    logits = logits + _state_rows(state.logit_bias, slots)
    counts = _state_rows(token_counts, slots)
    times = counts >> 1
    repeated = jnp.where(logits > 0, logits / rows.repetition_penalty, logits * rows.repetition_penalty)
    logits = jnp.where(counts > 0, repeated, logits)
    return logits - rows.frequency_penalty * times - rows.presence_penalty * (times > 0)
