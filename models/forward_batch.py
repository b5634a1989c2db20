"""What a model eats, and the message it is unpacked from.

`ForwardBatch` is the only batch a model sees. The host never builds one: it sends a `StepLayout` message, one flat
int32 buffer, and the compiled step expands that with the slot state it keeps on the device. This file knows the
shapes of both and nothing of jax, so that the scheduler can import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax

    from pallas_kernels.paged_attention import RaggedBatch


class ForwardBatch(NamedTuple):
    """One step's tokens, ragged over sequences, padded to a bucket of T tokens and S sequences.

    Attributes:
      token_ids: i32[T].
      positions: i32[T], 0 in padding.
      logits_indices: i32[S], the token of each row whose hidden state is sampled from.
      ragged: where each row's queries and keys are (cu_q_lens, kv_lens, page_table, slot_mapping, counts).
    """

    token_ids: jax.Array
    positions: jax.Array
    logits_indices: jax.Array
    ragged: RaggedBatch


HEADER = (
    "num_seqs",
    "num_decode",
    "any_random",
    "any_truncation",
    "any_penalties",
    "any_bias",
    "any_logprobs",
    "any_prompt_logprobs",
)
ROW_COLUMNS = ("slot", "num_scheduled", "start", "sample", "next_token")
DELTA_COLUMNS = ("slot", "column", "page")


@dataclass(frozen=True)
class StepLayout:
    """Where each field of a step's message lies in its flat int32 buffer.

    Fields, in order: the header scalars; one i32[S] per row column; token_ids i32[T]; one i32[num_deltas] per column
    of the page-table deltas. In a row, `start` >= 0 sets the slot's number of computed tokens and -1 goes on from the
    one kept on the device; `sample` is 1 when the row ends at its last known token; `next_token` is the prompt token
    after the chunk, -1 where there is none. A token id of -1 stands for the slot's last sampled token. Padding rows
    carry slot = max_num_seqs, which no slot has.

    Attributes:
      num_tokens: T.
      num_seqs: S.
      num_deltas: page-table entries that fit in one message.
    """

    num_tokens: int
    num_seqs: int
    num_deltas: int

    @cached_property
    def _offsets(self) -> dict[str, slice]:
        offsets, end = {}, 0
        sizes = [("header", len(HEADER))]
        sizes += [(name, self.num_seqs) for name in ROW_COLUMNS]
        sizes += [("token_ids", self.num_tokens)]
        sizes += [(f"delta_{name}", self.num_deltas) for name in DELTA_COLUMNS]
        for name, size in sizes:
            offsets[name] = slice(end, end + size)
            end += size
        return offsets

    @property
    def size(self) -> int:
        """Number of int32 in the message."""
        return self._offsets["delta_page"].stop

    def view(self, buffer: Any, name: str) -> Any:
        """The field `name` of a message, a view for numpy and a static slice under jit."""
        return buffer[self._offsets[name]]
