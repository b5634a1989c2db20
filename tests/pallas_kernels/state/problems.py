"""Ragged batches of sequences with states, for the tests of operations on them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.state.rows import StateRows

NUM_ROWS = 9  # of states


class Batch(NamedTuple):
    """A step.

    Attributes:
      counts: new tokens of each live sequence.
      num_decode: leading ones that have one token, and a state.
      num_tokens, num_seqs: that the step is padded to.
      width: most tokens of a sequence in a step with drafts, which saves no state; 1 in another step.
    """

    counts: tuple[int, ...]
    num_decode: int
    num_tokens: int
    num_seqs: int
    width: int = 1

    def rows(self) -> StateRows:
        """Every third sequence has no state yet, and the last one's is saved as well; what padding says is garbage."""
        rng, live = np.random.default_rng(len(self.counts)), len(self.counts)
        ends = np.cumsum(self.counts)
        cu = np.concatenate([[0], ends, np.full(self.num_seqs - live, ends[-1])])
        places = rng.permutation(NUM_ROWS - 1)[:live]
        reads, writes, saves = (np.full(self.num_seqs, fill) for fill in (3, 3, 3))
        writes[:live], saves[:live] = places, NUM_ROWS + 5
        reads[:live] = np.where((np.arange(live) % 3 == 2) & (np.arange(live) >= self.num_decode), -1, places)
        if self.counts[-1] > 1 and self.width == 1:
            saves[live - 1] = NUM_ROWS - 1
        arrays = cu, reads, writes, saves, live, self.num_decode
        return StateRows(*(jnp.asarray(array, jnp.int32) for array in arrays), self.width)


BATCHES = {
    "decodes": Batch((1, 1, 1, 1, 1), 5, 8, 8),
    "decodes, more than are worked on together": Batch((1,) * 8, 8, 8, 8),
    "one decode": Batch((1,), 1, 1, 1),
    "a prompt of one token among decodes": Batch((1, 1, 1), 2, 4, 4),
    "one prompt": Batch((29,), 0, 32, 2),
    "chunks of all sizes": Batch((64, 65, 1, 63, 249), 0, 512, 6),
    "decodes and prompts": Batch((1, 1, 1, 7, 1, 80, 2), 3, 128, 8),
    "drafts": Batch((3, 1, 4, 2, 0, 4), 0, 32, 8, width=4),
    "a sequence without tokens": Batch((1, 0, 5, 0, 3), 1, 16, 8),
}
