"""Rows: what the rows of a step's activations are, handed through layers beside them."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Rows(NamedTuple):
    """What is known of each row of x [T, D]; goes wherever x goes.

    Attributes:
      is_token: bool[T], False for padding.
    """

    is_token: jax.Array
