"""Structured outputs: writes the token masks of slots to the devices.

The sampler applies the masks (jaxengine.sampling.state).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxengine.runner.base.device_state import DeviceState, own_slots
from jaxengine.runner.base.extension import EVERYWHERE, DeviceExtension, HostExtension, StageShape, StateChange
from jaxengine.sampling.state import mask_words, set_mask_rows
from jaxengine.sharding.rules import logical_to_spec

NAME, MASK_ROWS = "structured", "mask rows"
NUM_MASK_ROWS = 16  # masks that one state change writes

_ROWS_VOCAB = logical_to_spec((None, "sampled_vocab"))


class StructuredExtension(DeviceExtension):
    """Device extension of grammar masks in the stage that samples: one state change, which writes masks of slots.

    Attributes:
      num_parts: devices that share the vocabulary.
      stored_words: number of packed int32 in a slot's mask as the devices store it, one device's part after the other.
    """

    name = NAME

    def __init__(self, shape: StageShape):
        """Compute num_parts, the shards of the vocabulary in sampling, and stored_words, the int32 of a mask over all
        shards.
        """
        super().__init__(shape)
        mesh, config = shape.model.mesh, shape.model.config
        self.num_parts = mesh.num_shards("sampled_vocab")
        self.stored_words = self.num_parts * mask_words(mesh.padded_vocab_size(config.vocab_size) // self.num_parts)

    @property
    def changes(self) -> Mapping[str, StateChange]:
        rows = ((NUM_MASK_ROWS,), np.int32, EVERYWHERE)
        return {MASK_ROWS: StateChange(_set_masks, [rows, ((NUM_MASK_ROWS, self.stored_words), np.int32, _ROWS_VOCAB)])}

    def on_host(self, runner: Any) -> HostExtension:
        return SlotMasks(runner, self)


class SlotMasks(HostExtension):
    """Host extension that sets the token masks of slots, and of positions of rows with drafts."""

    def __init__(self, runner: Any, extension: StructuredExtension):
        super().__init__(runner)
        self._extension = extension
        self._has_mask = np.zeros(runner.num_ranks * runner.config.max_num_seqs, np.bool_)

    @property
    def num_words(self) -> int:
        """Number of packed int32 in a slot's mask: a bit for each token, padding of the vocabulary included."""
        return -(-self.runner.last.programs.vocab_size // 32)

    @property
    def num_masks(self) -> int:
        """Number of masks of a replica: those of its slots, then those of positions of rows with drafts."""
        return self.runner.last.programs.state_shapes.sampling.token_mask.shape[0] // self.runner.num_ranks

    def masked(self, among: np.ndarray | None = None) -> list[int]:
        """Return the slots that have a mask, numbered over all replicas, ascending. among: bool[slots], the slots that
        may be returned; None for all.
        """
        return np.flatnonzero(self._has_mask if among is None else self._has_mask & among).tolist()

    def set_masks(
        self, rows: list[tuple[int, np.ndarray | None]], positions: list[tuple[int, int, np.ndarray]] | None = None
    ) -> None:
        """Write the token masks of slots to the devices: (slot over all replicas, i32[num_words]), distinct slots; None
        allows every token, and is only sent if the slot had a mask. Bit t % 32 of int32 number t // 32 allows token t.

        positions: masks for positions of the next step with drafts, each (replica, row * width + position in the row,
        i32[num_words]); None if it has none.
        """
        num_masks, num_slots = self.num_masks, self.runner.config.max_num_seqs
        changed: list[tuple[int, np.ndarray | None]] = []
        for slot, row in rows:
            if row is not None or self._has_mask[slot]:
                rank, own = divmod(slot, num_slots)
                changed.append((rank * num_masks + own, row))
                self._has_mask[slot] = row is not None
        changed += [(rank * num_masks + num_slots + position, row) for rank, position, row in positions or ()]
        parts, stored = self._extension.num_parts, self._extension.stored_words
        own_words = self.num_words // parts
        for first in range(0, len(changed), NUM_MASK_ROWS):
            numbers = np.full(NUM_MASK_ROWS, self.runner.num_ranks * num_masks, np.int32)
            masks = np.full((NUM_MASK_ROWS, parts, stored // parts), -1, np.int32)
            for index, (number, row) in enumerate(changed[first : first + NUM_MASK_ROWS]):
                numbers[index] = number
                if row is not None:
                    masks[index, :, :own_words] = row.reshape(parts, own_words)
            self.runner.change_state(MASK_ROWS, numbers, masks.reshape(NUM_MASK_ROWS, -1))


def _set_masks(state: DeviceState, numbers: jax.Array, rows: jax.Array) -> DeviceState:
    """Return the state with rows i32[n, stored words] written to masks i32[n], numbered over all replicas."""
    assert state.sampling is not None
    own = own_slots(numbers, state.sampling.token_mask.shape[0])
    return state._replace(sampling=set_mask_rows(state.sampling, own, rows))
