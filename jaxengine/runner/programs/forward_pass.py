"""ForwardPass: a forward pass while it is traced, which extensions (jaxengine.runner.extension) change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxengine.models.cache import Cache, KVPages
from jaxengine.models.forward_batch import ForwardBatch, StepLayout
from jaxengine.runner.programs.device_state import SlotState
from jaxengine.scheduler.buckets import Bucket


class Rows(NamedTuple):
    """The message's rows, i32[S] each (StepLayout); padding rows have slot R, no tokens and sample nothing.

    Attributes:
      index: the slot, and in padding any slot, to read its state.
      start: tokens computed before, known for every row.
      told_start: `start` as the message has it, -1 where the device knows it.
    """

    slot: jax.Array
    index: jax.Array
    num_scheduled: jax.Array
    start: jax.Array
    sample: jax.Array
    next_token: jax.Array
    told_start: jax.Array


class SampledRows(NamedTuple):
    """What the sampler must know of the rows of logits that it gets, S of them.

    Attributes:
      slot: i32[S], R in padding.
      position: i32[S], of the token to be chosen, the first one where a row may get several.
      is_sampled: bool[S], rows that end at their last known token; what is chosen for the others means nothing.
      features: i32[1], what some row needs, bits of jaxengine.scheduler.token_params.
      sections: what extensions say of the rows, by their names.
    """

    slot: jax.Array
    position: jax.Array
    is_sampled: jax.Array
    features: jax.Array
    sections: dict[str, Any] = {}


@dataclass(frozen=True)
class StepSpec:
    """Everything static about a forward pass but the model.

    Attributes:
      groups: numbers of the cache groups with pages whose tables are read.
      num_logits: rows of logits that it gives, at least the layout's S.
      samples: it gives logits.
      extensions: the DeviceExtensions of the stage.
    """

    bucket: Bucket
    layout: StepLayout
    page_size: int
    groups: Sequence[int]
    num_logits: int
    samples: bool
    extensions: tuple[Any, ...] = ()


class ForwardPass(NamedTuple):
    """A forward pass while it is traced, on one device. Extensions give it back changed.

    Attributes:
      message: a function of a field's name, the field.
      features: i32[], the union of what the step's requests need.
      token_row: i32[T], the row of each token; column: i32[T], the tokens before it in that row.
      is_token: bool[T], False for padding.
      given: what extensions have brought for this pass, by their names.
      slots: the state that forward passes change.
      last_token: i32[R]; None where tokens are not sampled.
      cache: what the model takes and then gives back.
      sampled: of a last stage.
      hidden: what the model gives, [T, D]; None before it has run.
      left: what extensions leave to epilogues, by their names.
    """

    spec: StepSpec
    message: Callable[[str], jax.Array]
    features: jax.Array
    rows: Rows
    token_row: jax.Array
    column: jax.Array
    is_token: jax.Array
    given: dict[str, Any]
    slots: SlotState
    last_token: jax.Array | None
    batch: ForwardBatch
    cache: KVPages | Cache | None = None
    sampled: SampledRows | None = None
    hidden: jax.Array | None = None
    left: dict[str, Any] = {}

    def with_section(self, name: str, section: Any) -> ForwardPass:
        """The pass whose batch has this section, too."""
        return self._replace(batch=self.batch._replace(sections={**self.batch.sections, name: section}))

    def with_state(self, name: str, section: Any) -> ForwardPass:
        """The pass with another section of the slots' state."""
        return self._replace(slots=self.slots._replace(sections={**self.slots.sections, name: section}))

    def leaving(self, name: str, section: Any) -> ForwardPass:
        """The pass that leaves this, too."""
        return self._replace(left={**self.left, name: section})
