"""Rows: description of the rows of a step's activations, passed through layers with them."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxengine.models.adapters import Adapters
from jaxengine.models.layers.base.lora import with_visits
from jaxengine.models.layers.base.step_inputs import StepContext


class Rows(NamedTuple):
    """Properties of each row of x [T, D], passed along with x.

    Attributes:
      is_token: bool[T], False for padding.
      adapters: adapters of the rows; None if no row can have one.
      is_image: bool[T], tokens of images, in a layer with further experts for them; None in others.
    """

    is_token: jax.Array
    adapters: Adapters | None = None
    is_image: jax.Array | None = None


def step_rows(step: StepContext) -> Rows:
    """Return the Rows of a step. A row with a KV slot is a token, all others are padding. The batch's adapters, if any,
    are included with the visits of the grouped form (`with_visits`).
    """
    adapters = with_visits(step.batch.sections.get("adapters"), step.build.lora, step.kv.platform)
    return Rows(step.batch.ragged[0].slot_mapping >= 0, adapters)
