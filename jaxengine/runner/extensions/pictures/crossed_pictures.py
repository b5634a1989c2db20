"""Images that layers attend to: encoded images in a pool, and which of its rows each slot's tokens attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.layers.attention.cross_pictures import NOTHING, CrossPictures, StepPictures, what_is_seen
from jaxengine.runner.base.device_state import DeviceState
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
from jaxengine.runner.programs.state_changes import own_slot
from jaxengine.scheduler.base.media import Media
from jaxengine.sharding.collectives import any_device
from jaxengine.sharding.rules import logical_to_spec

NAME, SEEN = "crossed_pictures", "crossed pictures of slots"
NUM_SLOT_ROWS = 64  # slots whose images one state change writes
# For each image of a slot: its row of the pool, the first token that attends to it, the one after the last, and the
# positions in use.
_FIELDS = 4
_LAST = np.iinfo(np.int32).max


class CrossedPrograms(EncoderPrograms):
    """Encoder programs whose results stay sharded by heads: each device has keys and values of its own heads."""

    def __init__(self, model: CausalLM, layout: EncoderLayout, dtype: Any, mesh: Mesh):
        super().__init__(model, layout, dtype, mesh)
        tower: Any = layout.tower
        heads = max(tower.num_kv_heads, model.mesh.model)
        width = len(tower.layers) * 2 * tower.max_tiles * tower.tile_positions * heads * tower.head_dim
        self.rows = shape_on(mesh, (self.rows.shape[0], width), dtype, logical_to_spec(("batch", "heads")))


class CrossedPicturesExtension(CrossingExtension):
    """Device extension of images that layers attend to. Its section of SlotState is i32[R, 1 + 4 M], the images of each
    slot: their number, then of each of at most M its pool row, the first token that attends to it, the one after the
    last, and its positions in use, field by field.
    """

    name = NAME

    def __init__(self, shape: StageShape):
        super().__init__(shape)
        model, config = shape.model, shape.config
        self.most = config.num_encoder_rows
        self.tower: Any = model.config.tower  # has the sizes of jaxengine.models.vision.mllama.MllamaTowerConfig
        layout = EncoderLayout(self.tower, config.num_encoder_rows, config.max_encoder_patches, shape.num_ranks)
        self.encoder = CrossedPrograms(model, layout, config.dtype, shape.mesh)

    @property
    def width(self) -> int:
        """Columns of a slot."""
        return 1 + _FIELDS * self.most

    def slots(self) -> Kept:
        return Kept((self.shape.num_slots, self.width), jnp.int32)

    @property
    def changes(self) -> Mapping[str, StateChange]:
        shapes = [((NUM_SLOT_ROWS,), np.int32, EVERYWHERE), ((NUM_SLOT_ROWS, self.width), np.int32, EVERYWHERE)]
        return {SEEN: StateChange(_write_images, shapes)}

    def allocated(self) -> Mapping[str, Any]:
        return {"encoded pictures": self.encoder.rows}

    def before_model(self, step: ForwardPass) -> ForwardPass:
        ragged, own = step.batch.ragged[0], step.slots.sections[NAME][step.rows.index]
        fields = own[:, 1:].reshape(len(own), _FIELDS, self.most)
        pictures = StepPictures(
            pool=step.given[NAME],
            counts=own[:, 0],
            rows=fields[:, 0],
            begins=fields[:, 1],
            ends=fields[:, 2],
            positions=fields[:, 3],
            sees=jnp.zeros_like(step.batch.positions),
            is_needed=jnp.bool_(False),
            places=step.batch.positions,
            cu_q_lens=ragged.cu_q_lens,
            num_rows=ragged.num_seqs,
        )
        sees = what_is_seen(pictures, step.token_row, step.is_token)
        # Layers exchange tokens with replicas whose rows have no images.
        pictures = pictures._replace(sees=sees, is_needed=any_device((sees > NOTHING).any()))
        return step.with_section(NAME, CrossPictures(pictures, self.tower.layers))

    def on_host(self, runner: Any) -> HostExtension:
        return CrossedEncoder(runner, self)


class CrossedEncoder(CrossingEncoder):
    """Host extension that encodes images before the steps that need them, and sets the images of slots.

    Attributes:
      most: most images of a prompt.
    """

    def __init__(self, runner: Any, extension: CrossedPicturesExtension):
        super().__init__(runner, extension)
        self._tower = extension.tower
        self.most, self._width = extension.most, extension.width
        self._with_images: set[int] = set()

    def set_images(self, slots: Sequence[tuple[int, Media | None, Sequence[int]]]) -> None:
        """Set the images of slots: (slot over all replicas, media of its prompt or None, the pool row of each image).
        Nothing is sent for slots that have none and had none before.
        """
        changed = []
        for slot, media, rows in slots:
            if rows or slot in self._with_images:
                changed.append((slot, self._words(media, rows)))
            (self._with_images.add if rows else self._with_images.discard)(slot)
        self.runner.change_slots(SEEN, changed, NUM_SLOT_ROWS, self._width)

    def _words(self, media: Media | None, rows: Sequence[int]) -> np.ndarray:
        """Return a slot's columns, i32[1 + 4 M]: the number of images, and their fields. An image is attended to from
        its token on, up to the next image's token; by all tokens after it if there is none, and images that follow each
        other up to the same token.
        """
        fields = np.zeros((_FIELDS, self.most), np.int32)
        items = () if media is None else media.items
        begins, end = [item.begin for item in items], _LAST
        for index in range(len(items) - 1, -1, -1):
            if index + 1 < len(items) and begins[index] + 1 != begins[index + 1]:
                end = begins[index + 1]
            tiles = self._tower.num_tiles[int(items[index].columns[0, 0])]
            fields[:, index] = rows[index], begins[index], end, tiles * self._tower.tile_positions
        return np.concatenate([[len(items)], fields.ravel()]).astype(np.int32)


def _write_images(state: DeviceState, slots: jax.Array, words: jax.Array) -> DeviceState:
    """Return the state with images `words` i32[n, 1 + 4 M] written for slots i32[n], numbered over all replicas."""
    section = state.slots.sections[NAME].at[own_slot(state, slots)].set(words, mode="drop")
    return state._replace(slots=state.slots._replace(sections={**state.slots.sections, NAME: section}))
