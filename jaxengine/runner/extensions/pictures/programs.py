"""Programs that encode images: one for each size of calls, and one that makes the pool of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.config.tower import TOWER
from jaxengine.runner.base.program import Program, abstract_params, program_on, shape_on
from jaxengine.runner.extensions.pictures.layout import PLACE, EncoderLayout, make_encode, place
from jaxengine.sharding.rules import logical_to_spec

_RANKS, _PICTURES = logical_to_spec(("batch",)), logical_to_spec(("pictures",))


class EncoderPrograms:
    """Encoder programs of one tower of a model, in its first stage.

    Attributes:
      layout: the sizes of calls and their messages.
      rows: the pool of embeddings, [replicas * N, E], abstract; all towers write into one.
    """

    def __init__(self, model: CausalLM, layout: EncoderLayout, dtype: Any, mesh: Mesh):
        """Store the layout, the encoding function of the model's tower, and the pool's abstract array. dtype: dtype of
        the embeddings. mesh: mesh of the first stage.
        """
        self.layout = layout
        self._mesh = mesh
        graph, params = nnx.split(model)
        self._encode = make_encode(graph, jax.tree.structure(params), layout)
        size = max(tower.num_parts for tower in model.config.towers) * model.config.hidden_size
        self.rows = shape_on(mesh, (layout.num_ranks * layout.num_rows, size), dtype, _RANKS)

    def name(self, size: int) -> str:
        """Return the name of the program with the key `size`, one of EncoderLayout.programs."""
        if size == PLACE:
            return f"place {self.layout.num_placed} embeddings"
        return f"encode {size} {'patches' if self.layout.part == TOWER else 'frames'}"

    def program(self, size: int, params: Sequence[Any]) -> Program:
        """Return the program with the key `size`, one of EncoderLayout.programs. params: the model's leaves, arrays or
        shapes.
        """
        return self.place() if size == PLACE else self.encode(size, params)

    def encode(self, size: int, params: Sequence[Any]) -> Program:
        """Return the program that encodes up to `size` patches on a device: (params, rows, the fields of an
        EncoderInput) -> rows, the pool of embeddings with the new ones. The pool is donated. size: one of
        EncoderLayout.sizes. params: the model's leaves, arrays or shapes.
        """
        layout, tower, mesh = self.layout, self.layout.tower, self._mesh
        count, split = layout.num_ranks * layout.parts, _PICTURES if layout.parts > 1 else _RANKS
        message = (
            shape_on(mesh, (count, size, tower.num_features), np.float32, split),
            shape_on(mesh, (count, len(tower.columns), size), np.int32, split),
            shape_on(mesh, (layout.num_ranks, layout.parts * size // tower.merge), np.int32, _RANKS),
        )
        arguments = (abstract_params(params), self.rows, *message)
        return program_on(mesh, self.name(size), self._encode, arguments, self.rows, (1,))

    def place(self) -> Program:
        """Return the program that writes embeddings of requests: (rows, the fields of a PlaceInput) -> rows, the pool
        of embeddings with the new ones. The pool is donated.
        """
        layout, mesh = self.layout, self._mesh
        shape = layout.num_ranks, layout.num_placed
        message = (
            shape_on(mesh, (*shape, self.rows.shape[1]), np.float32, _RANKS),
            shape_on(mesh, shape, np.int32, _RANKS),
        )
        return program_on(mesh, self.name(PLACE), place, (self.rows, *message), self.rows, (0,))

    def pool(self) -> Program:
        """Return the program () -> the initial pool of embeddings, zeros."""
        part = self.rows.sharding.shard_shape(self.rows.shape)
        return program_on(self._mesh, "pool of embeddings", lambda: jnp.zeros(part, self.rows.dtype), (), self.rows, ())
