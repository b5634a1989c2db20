"""ForwardBatch, the input of a model, and StepLayout, the layout of the message from which it is unpacked.

`ForwardBatch` is the only batch that a model gets. The host never builds one. It sends a message, one flat int32 buffer
with the layout `StepLayout`, and the compiled step expands the message with the slot state on the device. This file
does not import jax, so that the scheduler can import it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax

    from jaxengine.pallas_kernels.attention.op import RaggedBatch


class ForwardBatch(NamedTuple):
    """One step's tokens, ragged over sequences, padded to a bucket of T tokens and S sequences.

    Attributes:
      token_ids: i32[T].
      positions: i32[T], 0 in padding.
      logits_indices: i32[S], index of the token of each row from whose hidden state logits are computed.
      ragged: for each cache group, where each row's queries and keys are (cu_q_lens, kv_lens, page_table, slot_mapping,
        counts). Only page_table and slot_mapping differ between groups.
      sections: data of optional capabilities for this step, by the name under which layers look them up. The type of a
        section is declared in the file of the layer that reads it. A section that acts on the hidden states between
        layers is a jaxengine.models.layers.base.section.Section. A capability without data for the step has no entry.
    """

    token_ids: jax.Array
    positions: jax.Array
    logits_indices: jax.Array
    ragged: tuple[RaggedBatch, ...]
    sections: dict[str, Any] = {}


HEADER = ("num_seqs", "num_decode", "features")
ROW_COLUMNS = ("slot", "num_scheduled", "start", "sample", "next_token")
DELTA_COLUMNS = ("row", "column", "page")


@dataclass(frozen=True)
class StepLayout:
    """Layout of a step's message: the offset of each field in its flat int32 buffer.

    The fields, in order:
      header: [len(HEADER)]. Its `features` is the union of what the step's requests need (bits of
        jaxengine.scheduler.base.token_params), the same for all replicas.
      rows: [len(ROW_COLUMNS), S]. `slot` is numbered within the replica; padding rows have max_num_seqs, which no slot
        has. `start` >= 0 sets the slot's number of computed tokens; -1 keeps the number that the device has. `sample`
        is 1 if the row ends at its last known token, and more if an extension marks such a row. `next_token` is the
        prompt token after the chunk, -1 if there is none.
      token_ids: [T]. -1 stands for the slot's last sampled token, or for one that the device proposes.
      deltas: [len(DELTA_COLUMNS), num_deltas], the new page-table entries. With G cache groups, an entry's row is
        group * max_num_seqs + slot; in padding it is G * max_num_seqs.
      sections: fields that optional capabilities add to the bucket's messages; unused elements are -1.

    Attributes:
      num_tokens: T.
      num_seqs: S.
      num_deltas: page-table entries that fit in one message.
      sections: names and shapes of further fields.
    """

    num_tokens: int
    num_seqs: int
    num_deltas: int
    sections: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @cached_property
    def _fields(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Slice of the flat buffer, in elements, and shape of each field, by name."""
        shapes = {
            "header": (len(HEADER),),
            "rows": (len(ROW_COLUMNS), self.num_seqs),
            "token_ids": (self.num_tokens,),
            "deltas": (len(DELTA_COLUMNS), self.num_deltas),
            **dict(self.sections),
        }
        fields, end = {}, 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            fields[name] = slice(end, end + size), shape
            end += size
        return fields

    @property
    def size(self) -> int:
        """Number of int32 elements in a message."""
        return max(where.stop for where, _ in self._fields.values())

    def has(self, name: str) -> bool:
        """Return whether messages have the field `name`."""
        return name in self._fields

    def view(self, buffer: Any, name: str) -> Any:
        """Return the field `name` of a message buffer i32[size], in its shape. For a numpy array it is a view, under
        jit a static slice. Raises KeyError if the layout has no such field.
        """
        where, shape = self._fields[name]
        return buffer[where].reshape(shape)
