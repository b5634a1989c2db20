"""Alignment: where the tokens of a prompt are said in its sound. A separate pass computes it, for requests that need
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.cache import abstract_kv, device_kv
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.alignment import NotedSounds, Span
from jaxengine.models.layers.attention.attention import RaggedBatch
from jaxengine.models.layers.attention.cross_attention import StepSounds
from jaxengine.runner.base.extension import DeviceExtension, HostExtension, StageShape
from jaxengine.runner.base.program import Program, abstract_params, program_on
from jaxengine.runner.extensions.sounds.section import NAME as SOUNDS
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.scheduler.extensions.sounds import MAX_ALIGNED
from jaxengine.sharding.rules import part_bytes

NAME = "alignment"
# Numbers of a message before its tokens: row of the pool, first token, token after the last, positions.
_HEADER = 4


class Read(NamedTuple):
    """A text to align with a sound: the row of the pool that has the sound, the text's tokens, the index of the first
    token that is aligned, and the number of positions of the sound.
    """

    row: int
    token_ids: np.ndarray
    first: int
    positions: int


class AlignmentExtension(DeviceExtension):
    """Device extension with one program, which aligns a text of each replica with its sound: (params, pool of encoded
    sounds, message i32[replicas, 4 + T]) -> f32[replicas, T, S]. T is max_model_len, S the number of positions of a
    sound.

    The text's keys and values are in temporary pages that the program allocates. pool: the abstract pool.

    Attributes:
      tower: configuration of the model's tower.
      length: T. program_name: name of the program.
    """

    name = NAME

    def __init__(self, shape: StageShape, pool: Any):
        super().__init__(shape)
        self.tower: Any = shape.model.config.tower
        self.length = shape.config.max_model_len
        self.program_name = f"align {self.length} tokens"
        self._result = shape.rows(1, np.float32, self.length, self.tower.num_positions)
        self._pool, (self._graph, leaves) = pool, nnx.split(shape.model)
        self._tree = jax.tree.structure(leaves)

    def programs(self, params: Sequence[Any]) -> Sequence[Program]:
        shape = self.shape
        arguments = (abstract_params(params), self._pool, shape.rows(1, np.int32, _HEADER + self.length))
        return [program_on(shape.mesh, self.program_name, self._align, arguments, self._result, ())]

    def memory(self) -> Mapping[str, int]:
        """Return the bytes on one device, under NAME, of the results of MAX_ALIGNED texts in each step that may be in
        flight.
        """
        # Results stay until the host reads their step.
        return {NAME: MAX_ALIGNED * self.shape.config.max_in_flight * part_bytes(self._result)}

    def on_host(self, runner: Any) -> HostExtension:
        return Aligner(runner, self)

    def _align(self, params: Any, pool: jax.Array, message: jax.Array) -> jax.Array:
        """Run the model over one replica's text, with temporary pages, and return f32[1, T, S]: how likely each token
        is said at each position of the sound. message: i32[1, 4 + T], the sound's row, first and end of the aligned
        tokens, number of positions, then the tokens. Traced.
        """
        model = nnx.merge(self._graph, jax.tree.unflatten(self._tree, params))
        row, first, end, positions = message[0, :_HEADER]
        token = jnp.arange(self.length, dtype=jnp.int32)
        bounds, page_size = jnp.stack([0 * end, end]), self.shape.config.block_size
        pages = jnp.arange(-(-self.length // page_size), dtype=jnp.int32)[None]
        ragged = RaggedBatch(bounds, bounds[1:], pages, jnp.where(token < end, token, -1), jnp.int32(1), jnp.int32(0))
        heard = jnp.full(1, self.tower.num_positions, jnp.int32)
        step = StepSounds(pool, row[None], heard, bounds, jnp.int32(1))
        sounds = NotedSounds(step, self.tower.alignment_heads)
        batch = ForwardBatch(message[0, _HEADER:], token, bounds[1:] - 1, (ragged,), {SOUNDS: sounds})
        shape = self.shape
        kv = abstract_kv(shape.groups, pages.shape[1], platform=shape.platform.name, mesh=shape.mesh)
        model(batch, device_kv(kv))
        sizes = self.tower.num_positions, self.tower.decoder_layers
        with jax.named_scope(NAME):
            return sounds.aligned(row, *sizes, Span(first, end, positions), self.tower.filter_width)[None]


class Aligner(HostExtension):
    """Host extension that aligns texts with sounds.

    Attributes:
      num_positions: number of positions of a sound.
    """

    def __init__(self, runner: Any, extension: AlignmentExtension):
        super().__init__(runner)
        self.num_positions: int = extension.tower.num_positions
        self._length, self._program = extension.length, extension.program_name

    def align(self, pending: PendingStep, texts: Sequence[Sequence[Read]]) -> None:
        """Dispatch the alignment of each replica's texts, whose sounds must be encoded before: one launch for the first
        text of each replica, one for the second, and so on. Stores the results in the step for `fetch`.
        """
        stage = self.runner.stages[0]
        align, left = stage.program(NAME, self._program), []
        for together in zip_longest(*texts):
            message = np.zeros((len(texts), _HEADER + self._length), np.int32)
            for own, text in zip(message, together, strict=True):
                if text is not None:
                    end = len(text.token_ids)
                    own[:_HEADER] = text.row, text.first, end, text.positions
                    own[_HEADER : _HEADER + end] = text.token_ids
            left.append(align(stage.params, stage.extensions[SOUNDS].rows, message))
        pending.outputs[NAME] = left

    def fetch(self, pending: PendingStep) -> list[np.ndarray]:
        """Return a list with f32[replicas, T, S] for the first text of each replica in a step, for the second, and so
        on; waits for them. Raises KeyError for a step that was not passed to `align`.
        """
        return pending.output(NAME)
