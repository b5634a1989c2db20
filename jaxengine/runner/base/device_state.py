"""State that devices keep between steps, except the KV pool. It has a row for every slot.

Because of it, the host sends only what has changed. On a mesh each replica has its own rows. Optional capabilities add
sections (jaxengine.runner.base.extension).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxengine.sampling import state as sampling_state
from jaxengine.sampling.state import SamplingState
from jaxengine.sharding.collectives import num_shards, shard_index


class SlotState(NamedTuple):
    """State of the R = max_num_seqs slots of a stage; forward passes change it.

    Attributes:
      page_table: i32[G * R, W], the page tables of the cache groups one after the other, then those of extensions.
      num_computed: i32[R], number of tokens whose KV has been written.
      sections: state of extensions, by name.
    """

    page_table: jax.Array
    num_computed: jax.Array
    sections: dict[str, Any] = {}


class TokenState(NamedTuple):
    """State of the sampled tokens; samplers change it.

    Attributes:
      last_token: i32[R], the last sampled token.
      token_counts: i32[R, V], token counts for penalties (jaxengine.sampling.state).
      sections: state of extensions, by name.
    """

    last_token: jax.Array
    token_counts: jax.Array
    sections: dict[str, Any] = {}


class DeviceState(NamedTuple):
    """All state that is kept between steps, except the KV pool.

    Attributes:
      slots: slot state, donated to each forward pass, which returns the new one.
      tokens: token state, donated to each sampler, which returns the new one; None in a stage that does not sample.
      sampling: sampling parameters, which only change between steps; None in a stage that does not sample.
    """

    slots: SlotState
    tokens: TokenState | None
    sampling: SamplingState | None


def init_slots(num_slots: int, num_tables: int, num_columns: int, sections: Mapping[str, Any]) -> SlotState:
    """Return the initial state of unused slots.

    num_slots: number of slots, R. num_tables: page tables of a slot. num_columns: columns of a page table. sections:
    initial arrays of extensions, by name.
    """
    return SlotState(
        page_table=jnp.zeros((num_tables * num_slots, num_columns), jnp.int32),
        num_computed=jnp.zeros(num_slots, jnp.int32),
        sections=dict(sections),
    )


def init_tokens(num_slots: int, vocab_size: int, sections: Mapping[str, Any]) -> TokenState:
    """Return the initial token state of unused slots. vocab_size: size of one device's part of the vocabulary.
    sections: initial arrays of extensions.
    """
    return TokenState(
        last_token=jnp.zeros(num_slots, jnp.int32),
        token_counts=jnp.zeros((num_slots, vocab_size), jnp.int32),
        sections=dict(sections),
    )


def own_slots(slots: jax.Array, num_slots: int) -> jax.Array:
    """Convert slots i32[n], numbered over all replicas, to this replica's own numbers. Slots of other replicas become
    `num_slots`, the number of slots of a replica, which no slot has.
    """
    if num_shards("batch") == 1:
        return slots
    slots = slots - shard_index("batch") * num_slots
    return jnp.where((slots >= 0) & (slots < num_slots), slots, num_slots)


def write_page_deltas(state: SlotState, deltas: jax.Array) -> SlotState:
    """Return the state with page-table entries i32[3, n] (row, column, page) written. Entries whose row or column is
    outside of the table are dropped.
    """
    rows, columns, pages = deltas
    return state._replace(page_table=state.page_table.at[rows, columns].set(pages, mode="drop"))


def write_section(state: DeviceState, name: str, slots: jax.Array, values: jax.Array) -> DeviceState:
    """Return the state with values i32[n] written to `slots` i32[n], numbered over all replicas, in a section that is
    an array with a row for each slot. Slots of other replicas are dropped.
    """
    slots = own_slots(slots, state.slots.num_computed.shape[0])
    section = sampling_state.write_slots(state.slots.sections[name], slots, values)
    return state._replace(slots=state.slots._replace(sections={**state.slots.sections, name: section}))
