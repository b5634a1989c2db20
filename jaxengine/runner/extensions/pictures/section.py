"""Pictures: embeddings of images and videos at placeholder tokens, and M-RoPE positions in time, height and width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxengine.models.config.tower import TOWER, TOWERS
from jaxengine.models.layers.pictures import Pictures
from jaxengine.runner.base.device_state import write_section
from jaxengine.runner.base.extension import (
    DeviceExtension,
    HostExtension,
    Kept,
    StageExtension,
    StageShape,
    StateChange,
)
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.base.program import Program
from jaxengine.runner.extensions.pictures.layout import PLACE, EncoderInput, EncoderLayout, PlaceInput
from jaxengine.runner.extensions.pictures.placed import PlacePrograms, placed_layout
from jaxengine.runner.extensions.pictures.programs import EncoderPrograms
from jaxengine.runner.programs.state_changes import column_shapes
from jaxengine.scheduler.base.media import EMBEDS
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.scheduler.extensions.pictures import Encode

NAME, DELTAS = "pictures", "rope deltas"
_MAX_PLACED = 512  # most embeddings of requests that one call writes


class PicturesExtension(DeviceExtension):
    """Device extension of images and videos. Its message field is i32[1 or 4, T]: for each token its
    `index` of jaxengine.models.layers.pictures.Pictures; with M-RoPE also the token's positions in time, height and
    width, -1 if they follow from its position. With M-RoPE its section of SlotState is i32[R], each slot's M-RoPE
    position delta.

    Attributes:
      uses_mrope: whether layers rotate queries and keys by positions in time, height and width.
      part_layers, adds: see jaxengine.models.config.tower.TowerConfig.
      encoders: the encoder programs of each tower, in the first stage of a model that has any. All write into one pool.
    """

    name = NAME

    def __init__(self, shape: StageShape):
        """Set `uses_mrope` and `encoders`: programs of each tower, or the one that writes embeddings for a model
        without towers; [] in later stages.
        """
        super().__init__(shape)
        model, config = shape.model, shape.config
        self.uses_mrope = model.config.sees_places
        tower = model.config.tower
        self.part_layers, self.adds = ((), False) if tower is None else (tower.part_layers, tower.adds)
        self.encoders: list[EncoderPrograms] = []
        if model.config.towers and model.stage.is_first:
            parts = model.mesh.model if TOWER in model.build.whole_parts else 1
            rows, most = config.num_encoder_rows, (config.max_encoder_patches, config.max_sound_patches)
            placed = min(rows, _MAX_PLACED) if config.enable_mm_embeds else 0
            for part, tower, patches in zip(TOWERS, model.config.towers, most, strict=False):
                layout = EncoderLayout(tower, rows, patches, shape.num_ranks, parts, placed * (part == TOWER), part)
                self.encoders.append(EncoderPrograms(model, layout, config.dtype, shape.mesh))
        elif config.enable_prompt_embeds and model.stage.is_first:
            layout = placed_layout(config.num_encoder_rows, shape.num_ranks, _MAX_PLACED)
            self.encoders.append(PlacePrograms(layout, model.config.hidden_size, config.dtype, shape.mesh))

    def slots(self) -> Any:
        return Kept((self.shape.num_slots,), jnp.int32) if self.uses_mrope else None

    @property
    def changes(self) -> Mapping[str, StateChange]:
        if not self.uses_mrope:
            return {}
        return {DELTAS: StateChange(lambda state, *column: write_section(state, NAME, *column), column_shapes())}

    def message(self, bucket: Bucket) -> tuple[int, ...] | None:
        """Return (4 with M-RoPE, else 1; number of tokens) for a bucket whose messages have the field; else None."""
        return (4 if self.uses_mrope else 1, bucket.num_tokens) if bucket.sections else None

    def given(self, bucket: Bucket) -> Any:
        return self.encoders[0].rows if bucket.sections and self.encoders else None

    def programs(self, params: Sequence[Any]) -> Sequence[Program]:
        return [encoder.program(size, params) for encoder in self.encoders for size in encoder.layout.programs]

    def allocated(self) -> Mapping[str, Any]:
        return {"embeddings": self.encoders[0].rows} if self.encoders else {}

    def before_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with the tokens' M-RoPE positions, if layers use them (the message's, else the position plus
        the slot's delta), and with a Pictures section (the pool and the rows that replace embeddings) if the message
        has the field.
        """
        field = step.message(NAME) if step.spec.layout.has(NAME) else None
        if self.uses_mrope:
            delta = step.slots.sections[NAME]
            own = step.batch.positions + delta[step.rows.index[step.token_row]]
            own = own if field is None else jnp.where(field[1:] >= 0, field[1:], own)
            step = step.with_section("mrope_positions", own)
        if field is None:
            return step
        return step.with_section(NAME, Pictures(step.given.get(NAME), field[0], self.part_layers, self.adds))

    def at_stage(self, stage: Any) -> StageExtension | None:
        return EncoderPool(stage, self.encoders[0]) if self.encoders else None

    def on_host(self, runner: Any) -> HostExtension:
        return PictureEncoder(runner, self)


class EncoderPool(StageExtension):
    """Stage extension with the pool of embeddings, in the first stage.

    Attributes:
      rows: the pool; None while it is not allocated.
    """

    name = NAME

    def __init__(self, stage: Any, programs: EncoderPrograms):
        self._stage, self._programs = stage, programs
        self.rows: Any = None

    def allocate(self) -> None:
        """Compile or load the program that creates the pool of embeddings, and run it; the pool is zeros."""
        self.rows = self._stage.compiled(self._programs.pool())()

    def release(self) -> None:
        """Free the pool."""
        self.rows = None

    def encode(self, pictures: EncoderInput, programs: EncoderPrograms | None = None) -> None:
        """Dispatch the encoding of items into the pool, which the next forward pass reads. The pool is donated, and
        replaced.

        programs: programs of the tower that encodes the items; None for the first tower.
        """
        encode = self._stage.program(self.name, (programs or self._programs).name(pictures.patches.shape[1]))
        self.rows = encode(self._stage.params, self.rows, *pictures)

    def place(self, embeddings: PlaceInput) -> None:
        """Dispatch the writing of embeddings of requests into the pool, which is donated, and replaced."""
        self.rows = self._stage.program(self.name, self._programs.name(PLACE))(self.rows, *embeddings)

    def before_forward(self, bucket: Bucket, params: Sequence[Any], state: Any, message: Any) -> Any:
        """Return the pool for a bucket whose messages have the field; else None."""
        return self.rows if bucket.sections else None


class PictureEncoder(HostExtension):
    """Host extension that encodes images before the steps that have their tokens.

    Attributes:
      towers: the model's towers. encoders: their programs; none for a model with M-RoPE layers but no vision tower.
      uses_mrope: whether layers rotate queries and keys by positions in time, height and width.
    """

    def __init__(self, runner: Any, extension: PicturesExtension):
        super().__init__(runner)
        self.uses_mrope = extension.uses_mrope
        self.encoders = extension.encoders
        self.towers = extension.shape.model.config.towers
        self._known = np.zeros(runner.num_ranks * runner.config.max_num_seqs, np.int32)

    def encode(self, encodes: Sequence[Sequence[Encode]]) -> None:
        """Dispatch the encoding of each replica's images, and the writing of embeddings of requests, before the first
        forward pass that needs them. Only for a model with towers, or whose requests may have embeddings.
        """
        pool = self.runner.stages[0].extensions[NAME]
        # Engines of several processes have no images (jaxengine.config.inputs.encoder).
        for encoder in self.encoders:
            taken = [[each for each in own if encoder.layout.encodes(each.item)] for own in encodes]
            if any(taken):
                pool.encode(encoder.layout.pack(taken), encoder)
        placed = [[each for each in own if each.item.modality == EMBEDS] for own in encodes]
        for message in self.encoders[0].layout.place(placed):
            pool.place(message)

    def set_rope_deltas(self, slots: list[int], deltas: list[int]) -> None:
        """Set slots' M-RoPE position deltas: M-RoPE position minus token position, for tokens after the prompt. Slots
        are numbered over all replicas; only changes are sent to the devices.
        """
        self.runner.set_column(DELTAS, self._known, slots, deltas)
