"""ForwardPass: the values of a forward pass while it is traced, to which extensions add theirs.

Extensions: jaxengine.runner.base.extension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxengine.models.cache import Cache, KVPages
from jaxengine.models.forward_batch import ForwardBatch, StepLayout
from jaxengine.runner.base.device_state import SlotState
from jaxengine.scheduler.batches.buckets import Bucket


class Rows(NamedTuple):
    """Rows of the message (StepLayout), each field i32[S]. Padding rows have slot R and no tokens, and do not sample.

    Attributes:
      slot: the row's slot, R in padding.
      index: the slot as an index for reading its state; in padding any valid one.
      num_scheduled: number of tokens in the step.
      start: number of tokens computed before the step.
      sample: above 0 for rows that sample.
      next_token: for rows after the decodes, the known token that follows the chunk, -1 if there is none.
      told_start: `start` as the message has it, -1 if only the device has it.
    """

    slot: jax.Array
    index: jax.Array
    num_scheduled: jax.Array
    start: jax.Array
    sample: jax.Array
    next_token: jax.Array
    told_start: jax.Array


class SampledRows(NamedTuple):
    """Description of the S rows of logits that the sampler gets.

    Attributes:
      slot: i32[S], R in padding.
      position: i32[S], position of the token to be sampled; of the first one if a row may get several.
      is_sampled: bool[S], whether the row ends at its last known token; the tokens of other rows are meaningless.
      features: i32[1], union of the rows' features, bits of jaxengine.scheduler.base.token_params.
      sections: data of extensions, by name.
    """

    slot: jax.Array
    position: jax.Array
    is_sampled: jax.Array
    features: jax.Array
    sections: dict[str, Any] = {}


@dataclass(frozen=True)
class StepSpec:
    """Static inputs of a forward pass other than the model.

    Attributes:
      bucket, layout: shape of the step, and layout of its message.
      page_size: tokens of a page.
      groups: indices of the cache groups with pages whose tables are read.
      num_logits: number of rows of logits, at least the layout's S.
      samples: whether the pass computes logits.
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
    """Values of a forward pass on one device while it is traced. Extensions return changed copies.

    Attributes:
      spec: static inputs of the pass.
      message: function from a field's name to the field.
      rows: the rows of the message.
      features: i32[], union of what the step's requests need.
      token_row: i32[T], the row of each token. column: i32[T], number of tokens before it in that row.
      is_token: bool[T], False for padding.
      given: arrays that extensions provide for this pass, by name.
      slots: the SlotState, which forward passes change.
      last_token: i32[R], TokenState.last_token; None if tokens are not sampled.
      batch: the model's input.
      cache: the pool or Cache that the model takes and returns.
      sampled: the SampledRows; only in the last stage.
      hidden: the model's output, [T, D]; None before the model has run.
      left: results of extensions for epilogues, by name.
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
        """Return a copy in which the section `name` of the batch, the model's input, is `section`."""
        return self._replace(batch=self.batch._replace(sections={**self.batch.sections, name: section}))

    def with_state(self, name: str, section: Any) -> ForwardPass:
        """Return a copy in which the section `name` of the slot state is `section`."""
        return self._replace(slots=self.slots._replace(sections={**self.slots.sections, name: section}))

    def leaving(self, name: str, section: Any) -> ForwardPass:
        """Return a copy in which the section `name` of the results for epilogues is `section`."""
        return self._replace(left={**self.left, name: section})
