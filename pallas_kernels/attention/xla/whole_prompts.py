"""Attention of whole prompts on a CPU: one product of all queries of a prompt with all of its keys.

A prompt is padded to the next of a few lengths, so that its order of sums follows from its own length. Each of these
lengths has a loop over its prompts, with its own shapes. Longer prompts are cut into blocks of queries and of keys, as
ragged_paged_attention cuts them, and use its online softmax.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec

# Lengths to which prompts are padded; longer ones are cut into blocks of the last.
LENGTHS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
BLOCK = LENGTHS[-1]


class Schedule(NamedTuple):
    """Prompts of a step, ordered by padded length.

    Attributes:
      order: i32[S], prompts ordered by padded length, those without tokens last.
      ends: i32[n + 1], for each of the n lengths of `_lengths`, then for longer prompts, one past its last index in
        `order`.
      first, length: i32[S], of each prompt the first token and the number of tokens.
    """

    order: jax.Array
    ends: jax.Array
    first: jax.Array
    length: jax.Array


def _lengths(num_tokens: int) -> tuple[int, ...]:
    """Return the padded lengths (of LENGTHS, ascending) that prompts of a step of `num_tokens` tokens can have."""
    return tuple(each for each, below in zip(LENGTHS, (0, *LENGTHS), strict=False) if below < num_tokens)


def whole_prompt_schedule(cu_q_lens: jax.Array, num_seqs: jax.Array, *, num_tokens: int) -> Schedule:
    """Return the prompts of a step ordered by padded length, those without tokens last. Arguments are those of
    attention.whole_prompts.whole_prompt_schedule: cu_q_lens i32 [S + 1], num_seqs i32 [] prompts, num_tokens T.
    """
    lengths = jnp.array(_lengths(num_tokens))
    live = jnp.arange(len(cu_q_lens) - 1) < num_seqs
    length = jnp.where(live, jnp.diff(cu_q_lens), 0)
    kind = jnp.where(length > 0, jnp.searchsorted(lengths, length), len(lengths) + 1)
    ends = jnp.sum(kind[:, None] <= jnp.arange(len(lengths) + 1), axis=0, dtype=jnp.int32)
    return Schedule(jnp.argsort(kind).astype(jnp.int32), ends, cu_q_lens[:-1], length)


def whole_prompt_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    schedule: Schedule,
    *,
    spec: AttentionSpec,
    biases: jax.Array | None = None,
    relative: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Compute the attention of q [T, N, H] over keys k [T, K, H] and values v [T, K, Hv] of each token's own prompt on
    a CPU: return [T, N, Hv] in q's dtype, 0 for tokens of no prompt. Arguments are those of
    attention.whole_prompts.whole_prompt_attention, which has checked them.
    """
    num_tokens, own_dtype = q.shape[0], q.dtype
    lengths = _lengths(num_tokens)
    # bfloat16 operands keep bfloat16 products; sums are float32.
    dtype = jnp.bfloat16 if q.dtype == jnp.bfloat16 else jnp.float32
    # Most rows that padding adds to the last prompt, which is longer than the length below its padded one.
    added_rows = BLOCK if num_tokens > BLOCK else max(map(operator.sub, lengths, (0, *lengths)))
    pad = ((0, added_rows), (0, 0), (0, 0))
    q, k, v = (jnp.pad(part.astype(dtype), pad) for part in (q, k, v))
    added = _Added(biases, None if relative is None else (relative[0].astype(dtype), relative[1].astype(dtype)))
    o, begin = jnp.zeros((*q.shape[:2], spec.v_head_dim), jnp.float32), jnp.int32(0)
    for kind, size in enumerate(lengths):

        def attend(index: jax.Array, o: jax.Array, size: int = size) -> jax.Array:
            prompt = schedule.order[index]
            first, length = schedule.first[prompt], schedule.length[prompt]
            queries, keys, values = (_rows(part, first, size) for part in (q, k, v))
            softmax = _fold(None, queries, keys, values, 0, 0, length, spec, added)
            return _write(o, first, jnp.arange(size) < length, softmax)

        o = lax.fori_loop(begin, schedule.ends[kind], attend, o)
        begin = schedule.ends[kind]
    if num_tokens > BLOCK:

        def in_blocks(index: jax.Array, o: jax.Array) -> jax.Array:
            return _in_blocks(index, o, q, k, v, schedule, spec, added)

        o = lax.fori_loop(begin, schedule.ends[-1], in_blocks, o)
    return o[:num_tokens].astype(own_dtype)


class _Added(NamedTuple):
    """Terms that are added to the logits: `biases` and `relative` of whole_prompt_attention, None for none."""

    biases: jax.Array | None
    relative: tuple[jax.Array, jax.Array] | None


def _in_blocks(index, o: jax.Array, q, k, v, schedule: Schedule, spec: AttentionSpec, added: _Added) -> jax.Array:
    """Compute the attention of a prompt of more than BLOCK tokens, at `index` of the schedule's order; return `o` with
    the prompt's rows written.

    q, k, v: [T + BLOCK, heads, head dim] of all prompts, padded. o: f32 [T + BLOCK, N, Hv]. spec: scale, soft cap and
    window. added: terms of the logits.
    """
    prompt = schedule.order[index]
    first, length = schedule.first[prompt], schedule.length[prompt]
    num_blocks = (length + BLOCK - 1) // BLOCK
    reach = length if spec.window is None else spec.window - 1

    def attend(block: jax.Array, o: jax.Array) -> jax.Array:
        begin = block * BLOCK
        rows = _rows(q, first + begin, BLOCK)

        def fold(key_block: jax.Array, softmax: _Softmax) -> _Softmax:
            keys, values = (_rows(part, first + key_block * BLOCK, BLOCK) for part in (k, v))
            return _fold(softmax, rows, keys, values, begin, key_block * BLOCK, length, spec, added)

        low = jnp.maximum(begin - reach, 0) // BLOCK
        high = jnp.minimum((begin + BLOCK - 1 + reach) // BLOCK + 1, num_blocks)
        shape = (spec.num_kv_heads, BLOCK, spec.group_size)
        nothing = _Softmax(jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, spec.v_head_dim)))
        return _write(o, first + begin, begin + jnp.arange(BLOCK) < length, lax.fori_loop(low, high, fold, nothing))

    return lax.fori_loop(0, num_blocks, attend, o)


class _Softmax(NamedTuple):
    """Running softmax of Q queries, f32, with the axes in the order in which XLA's product of queries and keys leaves
    them.

    Attributes:
      largest: [K, Q, G] largest logit.
      total: [K, Q, G] sum of weights.
      values: [K, Q, G, Hv] sum of weighted values.
    """

    largest: jax.Array
    total: jax.Array
    values: jax.Array


def _rows(x: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """Return `size` rows of x from `first` on."""
    return lax.dynamic_slice_in_dim(x, first, size)


def _fold(
    softmax: _Softmax | None,
    q,
    k,
    v,
    first_query,
    first_key,
    length: jax.Array,
    spec: AttentionSpec,
    added: _Added,
) -> _Softmax:
    """Add keys k [L, K, H] and values v [L, K, Hv] to the running softmax of queries q [Q, N, H] and return the new
    one. softmax: None if no keys were added before. A query that has seen no key has the total 0. Nothing is causal.

    first_query, first_key: index in the prompt of the first query and of the first key, int or i32 []. length: i32 [],
    tokens of the prompt; keys from there on are left out, as are keys `spec.window` or more positions away from the
    query, before or after it. added: terms of the logits.
    """
    queries = q.reshape(len(q), spec.num_kv_heads, -1, spec.head_dim)
    logits = jnp.einsum("qkgh,skh->kqgs", queries, k, preferred_element_type=jnp.float32)
    if added.relative is not None:
        logits += _by_query(_of_distances(q, k, added.relative, first_key - first_query), spec)
    logits *= spec.sm_scale
    if spec.soft_cap is not None:
        logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
    if added.biases is not None:
        logits += _by_query(_by_distance(added.biases, first_key - first_query, len(q)), spec)
    positions = first_key + jnp.arange(len(k))
    visible = jnp.broadcast_to(positions < length, (len(q), len(k)))
    if spec.window is not None:
        visible &= jnp.abs(first_query + jnp.arange(len(q))[:, None] - positions) < spec.window
    logits = jnp.where(visible[:, None], logits, -jnp.inf)
    largest = jnp.max(logits, axis=-1)
    if softmax is not None:
        largest = jnp.maximum(largest, softmax.largest)
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)  # a row that has seen nothing: exp(-inf - 0) = 0
    weights = jnp.exp(logits - shift[..., None])
    total = jnp.sum(weights, axis=-1)
    # Values past the prompt are those of another prompt, which may hold NaN.
    own = jnp.where((positions < length)[:, None, None], v, 0)
    values = jnp.einsum("kqgs,skh->kqgh", weights.astype(v.dtype), own, preferred_element_type=jnp.float32)
    if softmax is None:
        return _Softmax(largest, total, values)
    decay = jnp.exp(softmax.largest - shift)
    return _Softmax(largest, softmax.total * decay + total, softmax.values * decay[..., None] + values)


def _by_query(x: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Return terms x [N, Q, L] with the axes of logits, [K, Q, G, L], for the K kv heads of `spec` with G query heads
    each.
    """
    return jnp.swapaxes(x.reshape(spec.num_kv_heads, spec.group_size, *x.shape[1:]), 1, 2)


def _by_distance(biases: jax.Array, distance, size: int) -> jax.Array:
    """Return [N, size, size], the bias of each head for each query and key of a block, looked up by their distance in
    `biases` [N, 2 R + 1]; distances beyond R use the nearest bias.

    distance: position of the first key minus that of the first query, i32 [] or int. Row i + 1 of such a matrix is row
    i moved right by one column. So 2 size - 1 biases are repeated, and the repetitions cut into rows one element
    shorter, which needs no gather.
    """
    reach, width = biases.shape[1] // 2, 2 * size - 1
    line = biases[:, jnp.clip(distance + jnp.arange(width) - (size - 1), -reach, reach) + reach]
    repeated = jnp.tile(line, (1, size + 1))[:, size - 1 :]
    return repeated[:, : size * (width - 1)].reshape(-1, size, width - 1)[..., :size]


def _of_distances(q: jax.Array, k: jax.Array, relative: tuple[jax.Array, jax.Array], distance) -> jax.Array:
    """Return f32 [N, Q, Q], for each query of q [Q, N, H] and key of k [Q, N, H] the sum of two products: of the query
    with the key of their distance, and of the key with the query of their distance.

    relative: (keys, queries) of distances, [2 R + 1, N, H] each; distances beyond R use the nearest. distance: position
    of the first key minus that of the first query, i32 [] or int.
    """
    size, reach = len(q), relative[0].shape[0] // 2
    rows = jnp.clip(distance + jnp.arange(2 * size - 1) - (size - 1), -reach, reach) + reach
    of_queries = jnp.einsum("qnh,wnh->nqw", q, relative[0][rows], preferred_element_type=jnp.float32)
    of_keys = jnp.einsum("knh,wnh->nkw", k, relative[1][rows[::-1]], preferred_element_type=jnp.float32)
    return _shifted(of_queries) + _shifted(of_keys).swapaxes(1, 2)


def _shifted(x: jax.Array) -> jax.Array:
    """Return y [N, Q, Q] from x [N, Q, 2 Q - 1]: row i of y is Q elements of row i of x, from column Q - 1 - i on.

    This needs no gather: rows are joined, and cut one element shorter than they were.
    """
    size = x.shape[1]
    line = x.reshape(len(x), -1)[:, size - 1 :]
    return line[:, : size * (2 * size - 2)].reshape(len(x), size, -1)[..., :size]


def _write(o: jax.Array, first: jax.Array, is_own: jax.Array, softmax: _Softmax) -> jax.Array:
    """Return o f32 [T, N, Hv] with the normalised values of Q queries written from token `first` on, but only for
    queries where is_own, bool [Q], is True.
    """
    rows = softmax.values / jnp.where(softmax.total > 0, softmax.total, 1.0)[..., None]
    rows = jnp.swapaxes(rows, 0, 1).reshape(len(is_own), *o.shape[1:])
    before = _rows(o, first, len(is_own))
    return lax.dynamic_update_slice_in_dim(o, jnp.where(is_own[:, None, None], rows, before), first, 0)
