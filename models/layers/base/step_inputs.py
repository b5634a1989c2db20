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
      batch: the step's batch.
      kv: the KV pool.
      build: the model's Build.
      key_limits: i32[T], the position after the last key that each token sees; None if that key is its own.
      in_windows_only: whether key_limits apply only to layers with a window; other layers are then causal.
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
      key: function that maps a layer's attention and Build to the value that decides the field; layers with equal
        keys share one result. None: the layer needs no value.
      make: function that computes the field from a key and the step.
    """

    scope: str
    key: Callable[[LayerAttention, Build], Hashable]
    make: Callable[[Any, StepContext], Any]

    def values(self, attentions: list[LayerAttention], step: StepContext) -> list[Any]:
        """Return the field's value for each of `attentions`, in order; None for a layer whose key is None. It is
        computed once for each distinct key.
        """
        keys = [self.key(attention, step.build) for attention in attentions]
        made: dict[Hashable, Any] = {None: None}
        for key in dict.fromkeys(keys):
            if key is not None:
                with jax.named_scope(self.scope):
                    made[key] = self.make(key, step)
        return [made[key] for key in keys]
