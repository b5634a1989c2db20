"""Inputs that layers with equal attention share in a step: computed once, outside the layers, by a table of makers.

A maker is in the file of the layer type that reads its value; jaxengine.models.layers.decoder_step has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.pallas_kernels.kv.pages import KVPages


class StepContext(NamedTuple):
    """Facts from which makers compute shared inputs.

    Attributes:
      batch: the step's.
      kv: the pool.
      build: of the model.
      key_limits: i32[T], the position after the last key that each token sees; None if that key is its own.
      in_windows_only: whether key_limits are for layers with a window alone; others are then causal.
    """

    batch: ForwardBatch
    kv: KVPages
    build: Build
    key_limits: jax.Array | None
    in_windows_only: bool = False


class StepInput(NamedTuple):
    """Maker of one field of StepInputs.

    Attributes:
      scope: name of its operations in a trace.
      key: function from a layer's attention to what decides the value; layers with equal keys share one. None: no
        value.
      make: function from a key to the value.
    """

    scope: str
    key: Callable[[LayerAttention, Build], Hashable]
    make: Callable[[Any, StepContext], Any]

    def values(self, attentions: list[LayerAttention], step: StepContext) -> list[Any]:
        """Return the value for each of these attentions, in order; None for one that needs none. Equal
        keys share one.
        """
        keys = [self.key(attention, step.build) for attention in attentions]
        made: dict[Hashable, Any] = {None: None}
        for key in dict.fromkeys(keys):
            if key is not None:
                with jax.named_scope(self.scope):
                    made[key] = self.make(key, step)
        return [made[key] for key in keys]
