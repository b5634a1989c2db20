"""The interface of a draft proposer. Steps call it on the device, the scheduler on the host.

Output tokens do not depend on the proposer: a draft is accepted only if it equals the model's own draw
(jaxengine.sampling.verification). A proposer may therefore be wrong, but must be cheap.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import numpy as np


class Drafts(NamedTuple):
    """Drafts of S rows.

    Attributes:
      token_ids: i32[S, k], always valid token ids.
      counts: i32[S], number of proposed drafts in each row; the rest of the row is padding.
    """

    token_ids: jax.Array
    counts: jax.Array


class Proposer(Protocol):
    """A method of guessing the next tokens from the previous ones. Frozen: its `repr` is part of a program's name."""

    def propose(self, history: jax.Array, num_known: jax.Array, count: int) -> Drafts:
        """Proposes at most `count` drafts a row from history i32[S, L], of which the first num_known i32[S] are valid.
        Traced.
        """
        ...

    def propose_one(self, known: np.ndarray, count: int) -> np.ndarray:
        """Same as `propose` for one row on the host: known i32[n] -> i32[m], m <= count; empty for no drafts."""
        ...
