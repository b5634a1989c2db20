"""Rows: what the rows of a step's activations are, handed through layers beside them."""

from __future__ import annotations

from typing import NamedTuple

import jax

from models.forward_batch import Adapters


class Rows(NamedTuple):
    """What is known of each row of x [T, D]; goes wherever x goes.

    Attributes:
      is_token: bool[T], False for padding.
      adapters: None where no row can have one.
    """

    is_token: jax.Array
    adapters: Adapters | None = None
