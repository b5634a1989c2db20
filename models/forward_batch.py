"""What a model eats, and the message it is unpacked from.

`ForwardBatch` is the only batch a model sees. The host never builds one: it sends a `StepLayout` message, one flat
int32 buffer, and the compiled step expands that with the slot state it keeps on the device. This file knows the
shapes of both and nothing of jax, so that the scheduler can import it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax

    from pallas_kernels.attention.op import RaggedBatch
    from pallas_kernels.matmul.lora import LoraVisits
    from pallas_kernels.state.rows import StateRows


class Adapters(NamedTuple):
    """The adapters of a step's rows.

    Attributes:
      slots: i32[T], where in the pools a row's adapter is; -1 for none.
      form: i32[], how products take them: 0 not at all, for no row of any rank has one; 1 flat, 2 grouped
        (models.layers.lora).
      visits: what the grouped form reads; None where there is none.
    """

    slots: jax.Array
    form: jax.Array
    visits: LoraVisits | None = None


def are_few(num_used: int, num_slots: int) -> bool:
    """Whether a step whose requests have the adapters of so many slots does better to read those alone."""
    return 8 * num_used <= 7 * num_slots


class MediaRows(NamedTuple):
    """Embeddings of pictures and videos, which stand in the places of tokens.

    Attributes:
      rows: [N, E], what towers have left (models.vision.tower); E is D, or a multiple of it where layers add parts of
        their own. None in a stage that is not the first.
      index: i32[T], the row of each token, -1 for those that are what their id says.
    """

    rows: jax.Array | None
    index: jax.Array


class ForwardBatch(NamedTuple):
    """One step's tokens, ragged over sequences, padded to a bucket of T tokens and S sequences.

    Attributes:
      token_ids: i32[T].
      positions: i32[T], 0 in padding.
      logits_indices: i32[S], the token of each row whose hidden state is sampled from.
      ragged: for each cache group, where each row's queries and keys are (cu_q_lens, kv_lens, page_table, slot_mapping,
        counts); only page_table and slot_mapping differ between groups.
      state_rows: for models with states, where each row's are; else None.
      adapters: those of the tokens; None in a model without room for any.
      media: None in a step where every token is what its id says.
      rope_positions: i32[3, T], the places of tokens in time, height and width, for models that turn queries and keys
        by these; i32[T] where the three are equal. None where they are `positions`.
    """

    token_ids: jax.Array
    positions: jax.Array
    logits_indices: jax.Array
    ragged: tuple[RaggedBatch, ...]
    state_rows: StateRows | None = None
    adapters: Adapters | None = None
    media: MediaRows | None = None
    rope_positions: jax.Array | None = None


HEADER = ("num_seqs", "num_decode", "features")
ROW_COLUMNS = ("slot", "num_scheduled", "start", "sample", "next_token")
DELTA_COLUMNS = ("row", "column", "page")


@dataclass(frozen=True)
class StepLayout:
    """Where each field of a step's message lies in its flat int32 buffer.

    Fields, in order: `header` [len(HEADER)], whose `features` is the union of what the step's requests need (bits of
    scheduler.token_params, the same for all ranks), `rows` [len(ROW_COLUMNS), S], `token_ids` [T] and `deltas`
    [len(DELTA_COLUMNS), num_deltas], the page-table entries that are new, then `sections`. In a row, `start` >= 0 sets
    the slot's number of computed tokens and -1 goes on from the one kept on the device; `sample` is 1 when the row ends
    at its last known token, 2 when moreover each token behind its first is the only one allowed in its place, 3 when
    these are guesses and each place has a mask of its own; `next_token` is the prompt token after the chunk, -1 where
    there is none. A token id of -1 stands for the slot's last sampled token, or for a draft that the device has made.
    Slots are the rank's own; padding rows carry max_num_seqs, which no slot has. Of the page tables of G cache groups
    an entry names the row group * max_num_seqs + slot, and padding G * max_num_seqs.

    Attributes:
      num_tokens: T.
      num_seqs: S.
      num_deltas: page-table entries that fit in one message.
      sections: names of what extensions send, and how many i32 values a token each has: fields [values, T].
    """

    num_tokens: int
    num_seqs: int
    num_deltas: int
    sections: tuple[tuple[str, int], ...] = ()

    @cached_property
    def _fields(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        shapes = {
            "header": (len(HEADER),),
            "rows": (len(ROW_COLUMNS), self.num_seqs),
            "token_ids": (self.num_tokens,),
            "deltas": (len(DELTA_COLUMNS), self.num_deltas),
            **{name: (values, self.num_tokens) for name, values in self.sections},
        }
        fields, end = {}, 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            fields[name] = slice(end, end + size), shape
            end += size
        return fields

    @property
    def size(self) -> int:
        """Number of int32 in the message."""
        return max(where.stop for where, _ in self._fields.values())

    def view(self, buffer: Any, name: str) -> Any:
        """The field `name` of a message, in its shape: a view for numpy, a static slice under jit."""
        where, shape = self._fields[name]
        return buffer[where].reshape(shape)
