"""The interface of a draft proposer. Steps call it on the device, the scheduler on the host.

Output tokens do not depend on the proposer: a draft is accepted only if it equals the model's own draw
(jaxengine.sampling.verification). A proposer may therefore be wrong, but must be cheap.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import numpy as np


class Drafts(NamedTuple):
    """Drafts of S rows, which a proposer returns.

    Attributes:
      token_ids: i32[S, k], always valid token ids.
      counts: i32[S], number of proposed drafts in each row; the rest of the row is padding.
    """

    token_ids: jax.Array
    counts: jax.Array


class Proposer(Protocol):
    """Method that proposes the next tokens from the previous ones.

    Implementations are frozen dataclasses: their `repr` is part of a compiled program's name.
    """

    def propose(self, history: jax.Array, num_known: jax.Array, count: int) -> Drafts:
        """Return at most `count` drafts for each row. Traced by jax.

        history: i32[S, L], tokens of each row, padded to the right. num_known: i32[S], number of valid tokens in each
        row.
        """
        ...

    def propose_one(self, known: np.ndarray, count: int) -> np.ndarray:
        """Return drafts for one row on the host, i32[m] with m <= count, empty for no drafts.

        known: i32[n], the row's tokens.
        """
        ...
