"""What the devices keep between steps beside the KV pool: a row for every slot.

So the host sends only what changed. On a mesh each rank has rows of its own. Knows nothing of requests.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxengine.sampling import state as sampling_state
from jaxengine.sampling.state import SamplingState
from sharding.collectives import num_shards, shard_index


class SlotState(NamedTuple):
    """What a stage remembers of the R = max_num_seqs slots; forward changes it.

    Attributes:
      page_table: i32[G * R, W], of the cache groups one after the other, then that of snapshots if any are kept.
      num_computed: i32[R], tokens whose KV is written.
      expert_load: u32[1, layers, E], tokens that experts were picked for so far, from 0 again after 2**32 - 1; only for
        models with experts.
      pooled: f32[R, D], what pooling keeps of prompts between steps (jaxengine.runner.pooling), where it keeps any.
      states: of models.cache.Cache, a row for each slot, then for each snapshot (scheduler.pages.snapshots); empty
        where no layer keeps any.
      adapter: i32[R], where in the pools of adapters each slot's is, -1 for none; None without room for adapters.
      rope_delta: i32[R], what the places of tokens behind the prompt are more than their positions; None for models
        that do not turn queries and keys by places.
    """

    page_table: jax.Array
    num_computed: jax.Array
    expert_load: jax.Array | None
    pooled: jax.Array | None = None
    states: tuple[tuple[jax.Array, ...], ...] = ()
    adapter: jax.Array | None = None
    rope_delta: jax.Array | None = None


class TokenState(NamedTuple):
    """What is remembered of the tokens sampled; the sampler changes it.

    Attributes:
      last_token: i32[R], the token sampled last.
      token_counts: i32[R, V], what penalties count (jaxengine.sampling.state).
      history: i32[R, L], the tokens of each slot by position, as far as they are known, of which drafts are made; None
        where the device makes none. The host writes what a request brings, the sampler what it chooses.
    """

    last_token: jax.Array
    token_counts: jax.Array
    history: jax.Array | None = None


class DeviceState(NamedTuple):
    """All that is kept between steps beside the KV pool.

    Attributes:
      slots: donated to each forward pass, which returns it changed.
      tokens: donated to each sampler, which returns it changed; None in a stage that does not sample.
      sampling: sampling parameters, which change between steps only; None in a stage that does not sample.
    """

    slots: SlotState
    tokens: TokenState | None
    sampling: SamplingState | None

    @property
    def keeps_history(self) -> bool:
        """Whether it has the tokens of which drafts are made."""
        return self.tokens is not None and self.tokens.history is not None


def init_state(
    max_num_seqs: int,
    max_pages: int,
    vocab_size: int | None,
    experts: tuple[int, int] | None = None,
    num_groups: int = 1,
    pooled: int | None = None,
    states: tuple[tuple[jax.Array, ...], ...] = (),
    history: int | None = None,
    adapters: bool = False,
    places: bool = False,
    num_masks: int | None = None,
) -> DeviceState:
    """State of slots that nobody has used yet, with these states of layers.

    vocab_size: None where no tokens are sampled; experts: layers with experts and experts of a layer; pooled: size of
    what pooling keeps of a slot; history: positions of a slot whose tokens are kept, None for none; adapters: whether
    slots may have any; places: whether layers turn queries and keys by places; num_masks: as sampling.state.init_state.
    """
    slots = SlotState(
        page_table=jnp.zeros((num_groups * max_num_seqs, max_pages), jnp.int32),
        num_computed=jnp.zeros(max_num_seqs, jnp.int32),
        expert_load=None if experts is None else jnp.zeros((1, *experts), jnp.uint32),
        pooled=None if pooled is None else jnp.zeros((max_num_seqs, pooled), jnp.float32),
        states=states,
        adapter=jnp.full(max_num_seqs, -1, jnp.int32) if adapters else None,
        rope_delta=jnp.zeros(max_num_seqs, jnp.int32) if places else None,
    )
    if vocab_size is None:
        return DeviceState(slots, None, None)
    tokens = TokenState(
        last_token=jnp.zeros(max_num_seqs, jnp.int32),
        token_counts=jnp.zeros((max_num_seqs, vocab_size), jnp.int32),
        history=None if history is None else jnp.zeros((max_num_seqs, history), jnp.int32),
    )
    return DeviceState(slots, tokens, sampling_state.init_state(max_num_seqs, vocab_size, num_masks))


def own_slots(slots: jax.Array, num_slots: int) -> jax.Array:
    """Slots numbered over all ranks as this rank numbers its own; `num_slots` for those of others."""
    if num_shards("batch") == 1:
        return slots
    slots = slots - shard_index("batch") * num_slots
    return jnp.where((slots >= 0) & (slots < num_slots), slots, num_slots)


def write_page_deltas(state: SlotState, deltas: jax.Array) -> SlotState:
    """Writes page-table entries i32[3, n] (row, column, page); a row of G * R or more is dropped."""
    rows, columns, pages = deltas
    return state._replace(page_table=state.page_table.at[rows, columns].set(pages, mode="drop"))
