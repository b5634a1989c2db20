"""Model whose tokens have the same bits however they come: alone, in chunks, in a batch, or in a trainer.

The order of XLA's additions depends on the shape of a product, its intermediate rounding on fusions. So there is one
shape: tokens go through the model in blocks of ROWS, each token as a sequence of its own that sees the keys before it.
A loop runs over the blocks, and its body is the same program in every context. The head computes logits in blocks of
the same size. Tokens of a block may follow one another, because all of a layer's keys are written before any is read,
and states are updated one after the other (jaxengine.pallas_kernels.state.one_by_one).

Only for one CPU, and for models of one stage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxengine.models.cache import Cache, StateRows, pool_spec, state_rows
from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.base.section import ExpertLoads
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVPages, alloc
from jaxengine.pallas_kernels.registry import EXACT, rows_of
from jaxengine.pallas_kernels.runs import run_starts

ROWS = 16  # tokens of a block
EXPERTS, STATES = "experts", "states"
DRAFTS = "drafts"  # the section of tokens to verify, which only the sampler reads: to the model they are tokens
NOWHERE = np.iinfo(np.int32).max  # a row that no array has


class ExactTokens(NamedTuple):
    """Tokens in order, with those of a sequence after one another; every array is i32[n], n a result of `room_of`.

    Attributes:
      token_ids: their token ids.
      positions: their positions for rope.
      sequences: the number of each token's sequence, by which its page table is found.
      kv_lens: number of keys that each token sees, its own included; 0 for padding, which comes last.
      slots: for each cache group, the KV slot of each token, -1 for none.
      states: state rows that each token (reads, writes, also writes), see StateRows; None without states.
    """

    token_ids: jax.Array
    positions: jax.Array
    sequences: jax.Array
    kv_lens: jax.Array
    slots: tuple[jax.Array, ...]
    states: tuple[jax.Array, jax.Array, jax.Array] | None

    def block(self, index: jax.Array) -> ExactTokens:
        """Return the ROWS tokens of block number `index`, i32[]."""
        return jax.tree.map(lambda part: lax.dynamic_slice_in_dim(part, index * ROWS, ROWS), self)


def room_of(num_tokens: int) -> int:
    """Return the smallest multiple of ROWS that is at least `num_tokens` and at least two blocks, because XLA compiles
    a different loop body for one block.
    """
    return max(-(-num_tokens // ROWS), 2) * ROWS


# Page tables [ROWS, W] of the sequences i32[ROWS], for each cache group.
Tables = Callable[[jax.Array], tuple[jax.Array, ...]]


# A model's forward pass: its hidden states after the final norm, and the pool or Cache.
Forward = Callable[[ForwardBatch, Any], tuple[jax.Array, Any]]


def run_tokens(
    model: CausalLM,
    forward: Forward,
    tokens: ExactTokens,
    tables: Tables,
    kv: Any,
    num_tokens: jax.Array,
    loads: ExpertLoads | None = None,
) -> tuple[jax.Array, Any]:
    """Return hidden states [n, D] after the final norm, and the pool or Cache `kv` after these tokens. Rows from index
    `num_tokens` on are meaningless.

    forward: the model's forward pass over the tokens of one block. tokens: n is a result of `room_of`. tables: function
    from sequences to their page tables. num_tokens: i32[], number of real tokens; it must not be a constant, because
    XLA unrolls a loop of one trip. loads: the load i32[E] of each layer with experts is added to it; None to count
    none.
    """
    config, counts = model.config, None
    hidden = jnp.zeros((tokens.token_ids.shape[0], config.hidden_size), model.build.dtype)
    if loads is not None:
        assert config.experts is not None
        num_layers = sum(layer not in config.experts.dense_layers for layer in model.stage.layers)
        counts = jnp.zeros((num_layers, config.experts.num_experts), jnp.int32)

    def run(index: jax.Array, carry: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, Any, Any]:
        hidden, kv, counts = carry
        own = None if loads is None else ExpertLoads()
        batch = _batch_of(tokens.block(index), tables, jnp.clip(num_tokens - index * ROWS, 0, ROWS), own)
        x, kv = forward(batch, kv)
        counts = counts if own is None else counts + own.stacked()
        return lax.dynamic_update_slice_in_dim(hidden, x, index * ROWS, axis=0), kv, counts

    with rows_of(EXACT):
        hidden, kv, counts = lax.fori_loop(0, -(-num_tokens // ROWS), run, (hidden, kv, counts))
    if loads is not None:
        assert counts is not None
        for load in counts:
            loads.add(load)
    return hidden, kv


def _batch_of(tokens: ExactTokens, tables: Tables, count: jax.Array, loads: ExpertLoads | None) -> ForwardBatch:
    """Return the ForwardBatch of a block of ROWS tokens, each a sequence of its own, of which the first `count`, i32[],
    are real.

    tables: maps numbers of sequences to page tables. loads: section that counts the experts picked; None to leave it
    out.
    """
    cu_q_lens = jnp.minimum(jnp.arange(ROWS + 1, dtype=jnp.int32), count)
    sections: dict[str, Any] = {} if loads is None else {EXPERTS: loads}
    if tokens.states is not None:
        sections[STATES] = StateRows(cu_q_lens, *tokens.states, count, count)
    ragged = tuple(
        RaggedBatch(cu_q_lens, tokens.kv_lens, table, slots, count, count)
        for table, slots in zip(tables(tokens.sequences), tokens.slots, strict=True)
    )
    return ForwardBatch(tokens.token_ids, tokens.positions, jnp.arange(ROWS, dtype=jnp.int32), ragged, sections)


def in_row_blocks(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return function(x) for all rows x [n, D], computed ROWS rows at a time: [n, N] in the function's dtype.

    function: maps [ROWS, D] to [ROWS, N]. The last block is padded with zeros, so a row's result must not depend on
    other rows.
    """
    count = x.shape[0]
    x = jnp.pad(x, ((0, room_of(count) - count), (0, 0)))
    shape = jax.eval_shape(function, x[:ROWS])

    def run(index: jax.Array, out: jax.Array) -> jax.Array:
        part = lax.dynamic_slice_in_dim(x, index * ROWS, ROWS)
        return lax.dynamic_update_slice_in_dim(out, function(part), index * ROWS, axis=0)

    out = jnp.zeros((len(x), *shape.shape[1:]), shape.dtype)
    with rows_of(EXACT):
        return lax.fori_loop(0, _no_constant(-(-count // ROWS), x), run, out)[:count]


def tokens_of(batch: ForwardBatch) -> tuple[ExactTokens, Tables, jax.Array]:
    """Return the T tokens of an engine's batch padded to `room_of(T)`, a function from numbers of sequences to their
    page tables, and the number of real tokens, i32[].
    """
    num_tokens = batch.token_ids.shape[0]
    size = room_of(num_tokens)
    first = batch.ragged[0]
    cu_q_lens, last = first.cu_q_lens, first.kv_lens.shape[0] - 1
    token = jnp.arange(size, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, last)
    begin, end, count = cu_q_lens[row], cu_q_lens[row + 1], cu_q_lens[first.num_seqs]
    kv_lens = jnp.where(token < count, first.kv_lens[row] - (end - token) + 1, 0)
    states = batch.sections.get(STATES)
    if states is not None:
        saves = (token == end - 1) & (end - begin > 1)
        reads = jnp.where(token == begin, states.reads[row], states.writes[row])
        states = reads, states.writes[row], jnp.where(saves, states.saves[row], NOWHERE)

    def padded(part: jax.Array, fill: int = 0) -> jax.Array:
        return jnp.pad(part, (0, size - num_tokens), constant_values=fill)

    slots = tuple(padded(ragged.slot_mapping, -1) for ragged in batch.ragged)
    tokens = ExactTokens(padded(batch.token_ids), padded(batch.positions), row, kv_lens, slots, states)
    return tokens, lambda rows: tuple(ragged.page_table[rows] for ragged in batch.ragged), count


@cache
def exact_class(family: type) -> type:
    """Return the subclass of `family`, under the same name, whose forward pass and logits are computed in blocks of
    ROWS tokens. Its call raises ValueError for `hidden` other than None, and for sections besides states, expert load
    and drafts. The class is created once for each family.
    """

    class Exact(family):
        """The family's model, computed in blocks of ROWS tokens."""

        def __call__(
            self, batch: ForwardBatch, kv: KVPages | Cache, hidden: jax.Array | None = None
        ) -> tuple[jax.Array, KVPages | Cache]:
            """Compute CausalLM's forward pass for one stage, see `exact_class`."""
            others = sorted(set(batch.sections) - {STATES, EXPERTS, DRAFTS})
            if hidden is not None or others:
                raise ValueError(f"an exact model has one stage, and takes states, experts and drafts, got {others}")
            tokens, tables, count = tokens_of(batch)
            x, kv = run_tokens(self, super().__call__, tokens, tables, kv, count, batch.sections.get(EXPERTS))
            return x[: batch.token_ids.shape[0]], kv

        def logits(self, hidden: jax.Array) -> jax.Array:
            """Return CausalLM's logits, computed in blocks of ROWS rows."""
            return in_row_blocks(super().logits, hidden)

    Exact.__name__, Exact.__qualname__, Exact.__module__ = family.__name__, family.__qualname__, family.__module__
    return Exact


def check_exact(model: CausalLM, arguments: dict[str, Any]) -> None:
    """Raise ValueError if `run_exact` would not have an engine's bits: on a backend other than CPU, for a model with a
    tower or an indexer of keys, and for an array on several devices.

    arguments: trees of arrays by the name used in the error; traced arrays pass, since they have no devices.
    """
    if jax.default_backend() != "cpu":
        raise ValueError(f"exact must be False on {jax.default_backend()}: bits are the same on CPUs alone")
    if model.config.tower is not None or any(each.index is not None for each in model.config.attention):
        raise ValueError(f"exact must be False for {model.config.architecture}: no engine with rl_exact runs it")
    for name, tree in arguments.items():
        for leaf in jax.tree.leaves(tree):
            split = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
            if split and len(leaf.devices()) > 1:
                raise ValueError(f"{name} must be on one device with exact=True, got {len(leaf.devices())} devices")


def run_exact(
    model: CausalLM,
    token_ids: jax.Array,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
) -> jax.Array:
    """Return logits f32[B, T, V] of rows of tokens i32[B, T], bit for bit those of an engine with exact computation.

    segment_ids: i32[B, T], cut rows into sequences; None for one sequence per row. Logits are meaningless where it is
    negative. positions: i32[B, T]; None to count from each sequence's first token. model: of a class that is not exact,
    and that passes `check_exact` and check_unpaged, which are not called here.
    """
    num_rows, length = token_ids.shape
    count = num_rows * length
    size = room_of(count)
    token = jnp.arange(size, dtype=jnp.int32)
    is_first = _padded(run_starts(segment_ids, num_rows, length).ravel(), size)
    begin = lax.cummax(jnp.where(is_first, token, 0))
    is_there = token < count if segment_ids is None else _padded(segment_ids.ravel(), size, -1) >= 0
    places = token - begin if positions is None else _padded(positions.ravel(), size)
    groups = model.cache_groups(1, model.build.dtype, hybrid=False)
    kv: Any = alloc(pool_spec(groups, size), platform="cpu")
    states = None
    if arrays := state_rows(groups, 1):
        kv = Cache(kv, arrays)
        states = jnp.where(is_first, -1, 0), jnp.zeros_like(token), jnp.full_like(token, NOWHERE)
    slots = (jnp.where(is_there, token, -1),)
    tokens = ExactTokens(_padded(token_ids.ravel(), size), places, begin, token - begin + 1, slots, states)
    window = jnp.arange(length, dtype=jnp.int32)
    number = _no_constant(count, jax.tree.leaves(nnx.state(model))[0])
    hidden, _ = run_tokens(model, model, tokens, lambda rows: (rows[:, None] + window,), kv, number)
    logits = in_row_blocks(model.logits, hidden)[:count, : model.config.vocab_size]
    return logits.reshape(num_rows, length, -1)


def _padded(part: jax.Array, size: int, fill: Any = 0) -> jax.Array:
    """Return `part` [n] followed by copies of `fill` up to `size` elements."""
    return jnp.pad(part, (0, size - part.shape[0]), constant_values=fill)


def _no_constant(number: int, x: jax.Array) -> jax.Array:
    """Return `number` as an i32[] that XLA cannot treat as a constant, because it is computed from x; XLA would unroll
    a loop of one trip. The result is number + 1 if x begins with NaN: the last block is then computed twice.
    """
    return number + jnp.isnan(x.ravel()[0]).astype(jnp.int32)
