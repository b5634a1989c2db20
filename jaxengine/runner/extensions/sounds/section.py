"""Sounds: encoded sounds in a pool, which row each slot attends to, and the rules of its transcript."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.layers.attention.cross_attention import Sounds, StepSounds
from jaxengine.runner.base.device_state import DeviceState, TokenState
from jaxengine.runner.base.extension import (
    EVERYWHERE,
    HostExtension,
    Kept,
    StageShape,
    StateChange,
)
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.base.program import shape_on
from jaxengine.runner.extensions.pictures.crossing import CrossingEncoder, CrossingExtension
from jaxengine.runner.extensions.pictures.layout import EncoderLayout
from jaxengine.runner.extensions.pictures.programs import EncoderPrograms
from jaxengine.runner.extensions.sounds.rules import WIDTH, after_tokens, ruled
from jaxengine.runner.programs.state_changes import own_slot
from jaxengine.scheduler.base.media import MediaItem
from jaxengine.sharding.rules import logical_to_spec

NAME, ROWS, RULES = "sounds", "sound rows", "transcript rules"
NUM_RULE_ROWS = NUM_SOUND_ROWS = 64  # slots whose rules, or sounds, one state change writes
_WIDTH = 2  # columns of a slot's sound: its row of the pool, and its positions


class SoundPrograms(EncoderPrograms):
    """Encoder programs whose results stay sharded by heads: each device has keys and values of its own heads."""

    def __init__(self, model: CausalLM, layout: EncoderLayout, dtype: Any, mesh: Mesh):
        super().__init__(model, layout, dtype, mesh)
        self.rows = shape_on(mesh, self.rows.shape, dtype, logical_to_spec(("batch", "heads")))


class SoundsExtension(CrossingExtension):
    """Device extension of sounds. Its section of SlotState is i32[R, 2], the row of the pool that each slot attends to
    and how many of the row's positions. Its section of TokenState is i32[R, WIDTH], the rules of each slot's transcript
    and its latest tokens (RuleRow).
    """

    name = NAME

    def __init__(self, shape: StageShape):
        super().__init__(shape)
        model, config = shape.model, shape.config
        assert model.config.tower is not None
        layout = EncoderLayout(model.config.tower, config.num_encoder_rows, config.max_encoder_patches, shape.num_ranks)
        self.encoder = SoundPrograms(model, layout, config.dtype, shape.mesh)

    def slots(self) -> Kept:
        return Kept((self.shape.num_slots, _WIDTH), jnp.int32)

    def tokens(self) -> Kept:
        return Kept((self.shape.num_slots, WIDTH), jnp.int32)

    @property
    def changes(self) -> Mapping[str, StateChange]:
        def shapes(count: int, width: int) -> list[Any]:
            return [((count,), np.int32, EVERYWHERE), ((count, width), np.int32, EVERYWHERE)]

        sounds = StateChange(_write_sounds, shapes(NUM_SOUND_ROWS, _WIDTH))
        return {ROWS: sounds, RULES: StateChange(_write_rules, shapes(NUM_RULE_ROWS, WIDTH))}

    def allocated(self) -> Mapping[str, Any]:
        return {"encoded sounds": self.encoder.rows}

    def before_model(self, step: ForwardPass) -> ForwardPass:
        ragged, own = step.batch.ragged[0], step.slots.sections[NAME][step.rows.index]
        sounds = StepSounds(step.given[NAME], own[:, 0], own[:, 1], ragged.cu_q_lens, ragged.num_seqs)
        return step.with_section(NAME, Sounds(sounds))

    def process(
        self, tokens: TokenState, logits: jax.Array, slots: jax.Array, counts: jax.Array, features: jax.Array
    ) -> jax.Array:
        """Return the logits f32[S, V / n] of slots i32[S] with -inf for tokens that their rules forbid. counts,
        features: not used.
        """
        return ruled(logits, tokens.sections[NAME].at[slots].get(mode="fill", fill_value=0))

    def remember(
        self, tokens: TokenState, slot: jax.Array, position: jax.Array, token_ids: jax.Array, is_kept: jax.Array
    ) -> TokenState:
        """Return the state with the kept tokens entered into the columns of their slots' rules (`after_tokens`)."""
        section = tokens.sections[NAME]
        rows = after_tokens(section.at[slot].get(mode="fill", fill_value=0), token_ids)
        section = section.at[jnp.where(is_kept, slot, len(section))].set(rows, mode="drop")
        return tokens._replace(sections={**tokens.sections, NAME: section})

    def on_host(self, runner: Any) -> HostExtension:
        return SoundEncoder(runner, self)


class SoundEncoder(CrossingEncoder):
    """Host extension that encodes sounds before the steps that need them, and sets the rows that slots attend to."""

    def __init__(self, runner: Any, extension: SoundsExtension):
        super().__init__(runner, extension)
        self._tower: Any = extension.encoder.layout.tower
        self._known: dict[int, tuple[int, int]] = {}

    def set_sounds(self, slots: Sequence[tuple[int, int, MediaItem]]) -> None:
        """Set what slots attend to: (slot over all replicas, row of the pool, the sound in it); only changes are sent
        to the devices.
        """
        found = {slot: (row, self._tower.positions_of(item.columns)) for slot, row, item in slots}
        changed = [(slot, np.asarray(own, np.int32)) for slot, own in found.items() if self._known.get(slot) != own]
        self._known |= found
        self.runner.change_slots(ROWS, changed, NUM_SOUND_ROWS, _WIDTH)

    def set_rules(self, rules: list[tuple[int, np.ndarray]]) -> None:
        """Write the rules of slots' transcripts to the devices: pairs (slot over all replicas, columns from
        rules.rule_words).
        """
        self.runner.change_slots(RULES, rules, NUM_RULE_ROWS, WIDTH)


def _write_sounds(state: DeviceState, slots: jax.Array, sounds: jax.Array) -> DeviceState:
    """Return the state with `sounds` i32[n, 2] written for slots i32[n], numbered over all replicas."""
    section = state.slots.sections[NAME].at[own_slot(state, slots)].set(sounds, mode="drop")
    return state._replace(slots=state.slots._replace(sections={**state.slots.sections, NAME: section}))


def _write_rules(state: DeviceState, slots: jax.Array, words: jax.Array) -> DeviceState:
    """Return the state with rules `words` i32[n, WIDTH] written for slots i32[n], numbered over all replicas."""
    assert state.tokens is not None
    section = state.tokens.sections[NAME].at[own_slot(state, slots)].set(words, mode="drop")
    sections = {**state.tokens.sections, NAME: section}
    return state._replace(tokens=state.tokens._replace(sections=sections))
