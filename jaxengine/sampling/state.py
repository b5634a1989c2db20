"""Sampling state on the device, a row for each slot, and the functions by which the host changes it between steps.

It holds the parameters of requests as columns, biases, masks and token counts. If n devices share the vocabulary, each
has V / n columns of the counts and biases, and the masks of these tokens (V / n is then a multiple of 32); all else is
whole on every device.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxengine.sampling.top_tokens import first_id
from jaxengine.scheduler.base.token_params import COLUMNS, MAX_LOGPROB_TOKEN_IDS

# The parameters of rows: a field for each of jaxengine.scheduler.base.token_params.COLUMNS. On the device each is an
# array [R], in a batch [S, 1].
RowParams = namedtuple("RowParams", COLUMNS)
# Value of each parameter that changes nothing, in the type of its column; halves of seeds are bits.
NEUTRAL = RowParams(
    *(
        np.uint32(value) if name.startswith("seed_") else np.float32(value) if type(value) is float else np.int32(value)
        for name, value in COLUMNS.items()
    )
)


class SamplingState(NamedTuple):
    """Sampling parameters of every slot, R = max_num_seqs, on the device.

    Step programs only read them: XLA may fetch an array that passes through a program into faster memory and write it
    back. `token_counts`, which the sampler changes, is separate: i32[R, V], 2 * (times in the output) + (1 if in the
    prompt).

    Attributes:
      params: [R] each.
      logit_bias: f32[R, V], added to the logits; -inf forbids the token.
      token_mask: i32[M, mask_words(V)], bit t % 32 of word t / 32 allows token t; all ones: every token. Masks of the R
        slots, then of each position of a step's rows, for rows with a mask for each draft.
      logprob_ids: i32[R, G], tokens whose logprobs are reported in addition, -1 for none.
    """

    params: RowParams
    logit_bias: jax.Array
    token_mask: jax.Array
    logprob_ids: jax.Array


def init_state(max_num_seqs: int, vocab_size: int, num_position_rows: int = 0) -> SamplingState:
    """Return the state of R = max_num_seqs slots, all greedy and with neutral parameters. A slot takes about 4 * V + V
    / 8 + 4 * MAX_LOGPROB_TOKEN_IDS bytes.

    vocab_size: V, or the columns of one device if several share the vocabulary. num_position_rows: number of token
    masks after those of the slots, for rows of a step that have a mask for each position.
    """
    return SamplingState(
        RowParams(*(jnp.full(max_num_seqs, value, value.dtype) for value in NEUTRAL)),
        logit_bias=jnp.zeros((max_num_seqs, vocab_size), jnp.float32),
        token_mask=jnp.full((max_num_seqs + num_position_rows, mask_words(vocab_size)), -1, jnp.int32),
        logprob_ids=jnp.full((max_num_seqs, MAX_LOGPROB_TOKEN_IDS), -1, jnp.int32),
    )


def partition(rows: Any, vocab: Any) -> SamplingState:
    """Return a SamplingState that has a PartitionSpec in place of each array.

    rows: PartitionSpec of arrays that all devices of a replica have whole. vocab: PartitionSpec of arrays with a column
    for each token.
    """
    params = RowParams(*[rows] * len(NEUTRAL))
    return SamplingState(params, logit_bias=vocab, token_mask=vocab, logprob_ids=rows)


def mask_words(vocab_size: int) -> int:
    """Return the number of packed int32 in a row of `SamplingState.token_mask` for a vocabulary of this size, padded to
    whole lane tiles.

    An array whose rows are not whole tiles is stored by columns on a TPU, and transposed where rows are read.
    """
    return -(-vocab_size // (32 * 128)) * 128


def write_params(state: SamplingState, slots: jax.Array, words: jax.Array) -> SamplingState:
    """Return the state with parameters written: row i of words, i32[M, len(NEUTRAL)], to slot slots[i]. slots: i32[M],
    distinct; those >= R are ignored.

    Each word holds the bits of one parameter, in the order of NEUTRAL.
    """
    columns = (lax.bitcast_convert_type(words[:, at], neutral.dtype) for at, neutral in enumerate(NEUTRAL))
    written = (write_slots(old, slots, new) for old, new in zip(state.params, columns, strict=True))
    return state._replace(params=RowParams(*written))


def write_slots(array: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """Return the array [R] with values [M] written at slots i32[M], which are distinct where they are < R. Slots >= R
    are ignored. It compares and selects, as XLA:TPU scatters into so small an array slowly or on the SparseCore.
    """
    written = slots[:, None] == jnp.arange(array.shape[0], dtype=jnp.int32)
    chosen = jnp.sum(jnp.where(written, values[:, None], jnp.zeros((), array.dtype)), axis=0, dtype=array.dtype)
    return jnp.where(jnp.any(written, axis=0), chosen, array)


def count_tokens(token_counts: jax.Array, slots: jax.Array, token_ids: jax.Array, valid: jax.Array) -> jax.Array:
    """Return token_counts i32[R, V / n] with one more output token counted for each row: slots i32[S], token_ids
    i32[S], valid bool[S].

    A token adds 2, as the lowest bit marks prompt tokens. Several rows may have the same slot. Rows that are not valid,
    whose slot is >= R, or whose token is not among this device's columns change nothing.
    """
    num_slots, num_columns = token_counts.shape
    columns = token_ids - first_id(token_counts)
    slots = jnp.where(valid & (columns >= 0) & (columns < num_columns), slots, num_slots)
    slots, columns = _two_at_least(num_slots, slots, columns)
    return token_counts.at[slots, columns].add(2, mode="drop")


def write_tokens(history: jax.Array, slots: jax.Array, positions: jax.Array, token_ids: jax.Array, valid: jax.Array):
    """Return the history i32[R, L] with token_ids i32[S] written at (slots, positions), i32[S] each, where valid
    bool[S]. Entries beyond the last slot or position are ignored.
    """
    num_slots = history.shape[0]
    slots, positions, token_ids = _two_at_least(num_slots, jnp.where(valid, slots, num_slots), positions, token_ids)
    return history.at[slots, positions].set(token_ids, mode="drop")


def _two_at_least(num_slots: int, slots: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """Return a scatter's index arrays, i32[S] each, with at least two rows. A single row gets a second one with slot
    num_slots, which the scatter ignores, because XLA:CPU copies the whole operand of a one-row scatter.
    """
    if slots.shape[0] > 1:
        return [slots, *others]
    return [jnp.pad(slots, (0, 1), constant_values=num_slots), *(jnp.pad(other, (0, 1)) for other in others)]


def set_rows(array: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the array [R, V] with rows [n, V] written at slots i32[n] >= 0. If two rows have the same slot, the later
    one counts. A slot >= R is ignored.
    """

    def write(index: jax.typing.ArrayLike, array: jax.Array) -> jax.Array:
        # Not a scatter: XLA CPU copies the whole operand of a one-row scatter.
        slot = slots[index]
        current = lax.dynamic_index_in_dim(array, slot, keepdims=False)
        row = jnp.where(slot < array.shape[0], rows[index], current)
        return lax.dynamic_update_index_in_dim(array, row, slot, axis=0)

    return write(0, array) if len(rows) == 1 else lax.fori_loop(0, len(rows), write, array)


def set_bias_rows(state: SamplingState, slots: jax.Array, rows: jax.Array) -> SamplingState:
    """Return the state with logit_bias[slots] replaced by rows f32[n, V]. slots: i32[n] >= 0; if two rows have the same
    slot, the later one counts, and a slot >= R is ignored.
    """
    return state._replace(logit_bias=set_rows(state.logit_bias, slots, rows))


def set_mask_rows(state: SamplingState, numbers: jax.Array, rows: jax.Array) -> SamplingState:
    """Return the state with rows of token_mask replaced by rows i32[n, W]. numbers: i32[n], their row numbers, distinct
    where they are < M, the number of masks; others are ignored.
    """
    return state._replace(token_mask=_replaced_rows(state.token_mask, numbers, rows))


def set_logprob_ids(state: SamplingState, slots: jax.Array, rows: jax.Array) -> SamplingState:
    """Return the state with logprob_ids[slots] replaced by rows i32[n, G]. slots: i32[n], distinct where they are < R;
    others are ignored.
    """
    return state._replace(logprob_ids=_replaced_rows(state.logprob_ids, slots, rows))


def _replaced_rows(array: jax.Array, numbers: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the array [M, W] with rows [n, W] written at row numbers i32[n], distinct where they are < M; others are
    ignored.
    """
    written = numbers[:, None] == jnp.arange(array.shape[0], dtype=jnp.int32)
    chosen = rows[jnp.argmax(written, axis=0)]
    return jnp.where(jnp.any(written, axis=0)[:, None], chosen, array)
