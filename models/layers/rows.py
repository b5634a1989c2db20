"""Rows: description of the rows of a step's activations, passed through layers with them."""

from __future__ import annotations

from typing import NamedTuple

import jax

from models.forward_batch import Adapters


class Rows(NamedTuple):
    """Properties of each row of x [T, D], passed along with x.

    Attributes:
      is_token: bool[T], False for padding.
      adapters: None where no row can have one.
    """

    is_token: jax.Array
    adapters: Adapters | None = None
