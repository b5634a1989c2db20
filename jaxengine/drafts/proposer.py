"""What a proposer of drafts is. The step asks it where the device knows the tokens, the scheduler where the host does.

Whatever it proposes, tokens stay those of the model: a draft counts only where it is what the model draws itself
(jaxengine.sampling.verification). So a proposer may guess, but must be cheap.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import numpy as np


class Drafts(NamedTuple):
    """Of S rows.

    Attributes:
      token_ids: i32[S, k], in the vocabulary everywhere.
      counts: i32[S], how many of a row's are proposed, the first ones.
    """

    token_ids: jax.Array
    counts: jax.Array


class Proposer(Protocol):
    """One way of guessing the next tokens from those before. Frozen: its `repr` is part of a program's name."""

    def propose(self, history: jax.Array, num_known: jax.Array, count: int) -> Drafts:
        """At most `count` drafts a row: history i32[S, L], of which the first num_known i32[S] are known. Traced."""
        ...

    def propose_one(self, known: np.ndarray, count: int) -> np.ndarray:
        """The same for one row on the host: known i32[n] -> i32[m], m <= count."""
        ...
