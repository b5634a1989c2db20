"""Trace replay: slots decode given tokens, whatever they would have sampled (trace_decode_token_ids)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.runner.base.device_state import DeviceState, TokenState
from jaxengine.runner.base.extension import EVERYWHERE, DeviceExtension, HostExtension, Kept, StateChange
from jaxengine.runner.programs.state_changes import long_rows, own_slot
from jaxengine.sampling.state import set_rows

NAME, TRACE_ROWS = "trace", "trace rows"


class TraceExtension(DeviceExtension):
    """Device extension of traces in the stage that samples. Its section of TokenState is i32[R, max_model_len]: for
    each slot and position, 1 + the token to decode there, or 0 if the request samples there. Samplers only read it.

    The whole trace is written at the beginning, by position.
    """

    name = NAME

    def tokens(self) -> Kept:
        return Kept((self.shape.num_slots, self.shape.config.max_model_len), jnp.int32)

    @property
    def changes(self) -> Mapping[str, StateChange]:
        return long_rows(TRACE_ROWS, _set_traces, self.shape.config.max_model_len, np.int32, EVERYWHERE)

    def replace(self, tokens: TokenState, token_ids: jax.Array, slots: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the rows' tokens i32[S], with those of their traces in place of sampled ones. token_ids: sampled
        tokens; slots, positions: i32[S].
        """
        own = tokens.sections[NAME].at[slots, positions].get(mode="fill", fill_value=0)
        return jnp.where(own > 0, own - 1, token_ids)

    def on_host(self, runner: Any) -> HostExtension:
        return SlotTraces(runner)


class SlotTraces(HostExtension):
    """Host extension that writes the traces of slots."""

    def set_traces(self, rows: list[tuple[int, int, tuple[int, ...]]]) -> None:
        """Write slots' traces to the devices, in place of earlier ones: (slot over all replicas, position of the first
        token, token ids); no ids clear a slot's trace.
        """
        longest = self.runner.config.max_model_len
        own = [(slot, np.pad(1 + np.array(ids, np.int32), (first if ids else 0, 0))) for slot, first, ids in rows]
        self.runner.change_rows(TRACE_ROWS, own, longest)


def _set_traces(state: DeviceState, slots: jax.Array, rows: jax.Array) -> DeviceState:
    """Return the state with traces i32[n, max_model_len] written for slots i32[n], numbered over all replicas."""
    assert state.tokens is not None
    traces = set_rows(state.tokens.sections[NAME], own_slot(state, slots), rows)
    return state._replace(tokens=state.tokens._replace(sections={**state.tokens.sections, NAME: traces}))
