"""What layers with equal attention share in a step: worked out once, outside the layers, by a table of makers.

A maker stands in the file of the mixer that reads its value; jaxengine.models.layers.decoder_step has the table.
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
    """What makers read.

    Attributes:
      kv: the pool.
      build: of the model.
      key_limits: i32[T], the position after the last key that each token sees; None where that key is its own.
    """

    batch: ForwardBatch
    kv: KVPages
    build: Build
    key_limits: jax.Array | None


class StepInput(NamedTuple):
    """The maker of one field of StepInputs.

    Attributes:
      scope: the name of its operations in a trace.
      key: what decides the value for a layer; layers with equal keys share one. None: they need no value.
      make: the value of a key.
    """

    scope: str
    key: Callable[[LayerAttention, Build], Hashable]
    make: Callable[[Any, StepContext], Any]

    def values(self, attentions: list[LayerAttention], step: StepContext) -> list[Any]:
        """The value for each of these attentions, in their order; None where it needs none. Equal keys share one."""
        keys = [self.key(attention, step.build) for attention in attentions]
        made: dict[Hashable, Any] = {None: None}
        for key in dict.fromkeys(keys):
            if key is not None:
                with jax.named_scope(self.scope):
                    made[key] = self.make(key, step)
        return [made[key] for key in keys]
