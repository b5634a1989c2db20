"""Pool of embeddings that are in requests, for a model without a vision tower: nothing is encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jaxengine.runner.base.program import shape_on
from jaxengine.runner.extensions.pictures.layout import EncoderLayout
from jaxengine.runner.extensions.pictures.programs import EncoderPrograms
from jaxengine.sharding.rules import logical_to_spec


@dataclass(frozen=True)
class PlacedLayout(EncoderLayout):
    """Layout of calls that write embeddings of requests, for a model without encoders."""

    @property
    def sizes(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(): there are no calls that encode."""
        return ()


def placed_layout(num_rows: int, num_ranks: int, most: int) -> PlacedLayout:
    """Return the layout for a pool of `num_rows` embeddings in each replica. most: largest number of rows of a call."""
    tower: Any = None
    return PlacedLayout(tower, num_rows, 0, num_ranks, num_placed=min(num_rows, most))


class PlacePrograms(EncoderPrograms):
    """Program that writes embeddings of requests, and the pool, whose rows have `size` elements of `dtype`."""

    def __init__(self, layout: PlacedLayout, size: int, dtype: Any, mesh: Mesh):
        """Store the layout and mesh, and the pool's abstract array [replicas * num_rows, size]. mesh: mesh of the first
        stage.
        """
        self.layout, self._mesh = layout, mesh
        rows = layout.num_ranks * layout.num_rows
        self.rows = shape_on(mesh, (rows, size), dtype, logical_to_spec(("batch",)))
