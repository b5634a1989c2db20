"""Inputs that layers with equal attention share in a step. They are computed once, outside of the layers.

The function that computes an input is in the file of the layer that reads it. jaxengine.models.layers.decoder_step has
the table of all of them.
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
    """Facts from which shared inputs are computed.

    Attributes:
      batch: the step's batch.
      kv: the KV pool.
      build: the model's Build.
      key_limits: i32[T], the position after the last key to which each token attends; None if that key is its own.
      in_windows_only: whether key_limits only apply to layers with a window; other layers are then causal.
    """

    batch: ForwardBatch
    kv: KVPages
    build: Build
    key_limits: jax.Array | None
    in_windows_only: bool = False


class StepInput(NamedTuple):
    """Computation of one field of StepInputs.

    Attributes:
      scope: name of its operations in a trace.
      key: function from a layer's attention and Build to the value on which the field depends. Layers with equal keys
        share one result; a layer with the key None does not need the field.
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
        values: dict[Hashable, Any] = {None: None}
        for key in dict.fromkeys(keys):
            if key is not None:
                with jax.named_scope(self.scope):
                    values[key] = self.make(key, step)
        return [values[key] for key in keys]
