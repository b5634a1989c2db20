"""Prompt lookup: propose the tokens that followed an earlier occurrence of the last ones (Saxena 2023, "Prompt Lookup
Decoding").

The longest match within the allowed sizes is used, and the latest of several. A continuation shorter than the number of
drafts is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.drafts.proposer import Drafts


@dataclass(frozen=True)
class Ngram:
    """Proposer (jaxengine.drafts.proposer) that looks the last tokens up among the request's earlier ones.

    Attributes:
      longest, shortest: largest and smallest number of tokens that must match.
    """

    longest: int
    shortest: int

    def propose(self, history: jax.Array, num_known: jax.Array, count: int) -> Drafts:
        """Return `count` drafts for each row, the tokens that followed the latest of the longest matches (up to
        `longest` tokens), repeated from the first if there are fewer than `count`; none for a row whose last tokens
        have no earlier match of at least `shortest` tokens. Traced by jax.

        history: i32[S, L], padded to the right. num_known: i32[S], at least 1.
        """
        length = history.shape[1]
        at = jnp.arange(length, dtype=jnp.int32)
        last = num_known - 1
        # run[s, p]: length, up to `longest`, of the common suffix of the tokens up to p and of all known tokens.
        same = jnp.ones(history.shape, bool)
        run = jnp.zeros(history.shape, jnp.int32)
        for back in range(self.longest):
            token = jnp.take_along_axis(history, jnp.maximum(last - back, 0)[:, None], axis=1)
            same &= (jnp.roll(history, back, axis=1) == token) & (at >= back)
            run += same
        run = jnp.where(at < last[:, None], run, 0)
        best = jnp.max(run, axis=1)
        match = jnp.max(jnp.where(run == best[:, None], at, 0), axis=1)  # index of the match's last token
        found = best >= self.shortest
        period = jnp.maximum(last - match, 1)
        columns = match[:, None] + 1 + jnp.arange(count, dtype=jnp.int32) % period[:, None]
        token_ids = jnp.take_along_axis(history, jnp.minimum(columns, length - 1), axis=1)
        return Drafts(jnp.where(found[:, None], token_ids, 0), jnp.where(found, count, 0).astype(jnp.int32))

    def propose_one(self, known: np.ndarray, count: int) -> np.ndarray:
        """Return the drafts of `propose` for one row on the host: i32[count]; i32[0] if its last tokens have no earlier
        match of at least `shortest` tokens, and if `count` is 0.

        known: i32[n], tokens of the row, not empty.
        """
        last = len(known) - 1
        run, same = np.zeros(last, np.int32), np.ones(last, np.bool_)
        for back in range(min(self.longest, last)):
            same[:back] = False
            same[back:] &= known[: last - back] == known[last - back]
            run += same
        if not count or not last or run.max() < self.shortest:
            return np.empty(0, np.int32)
        match = last - 1 - int(np.argmax(run[::-1]))
        return known[match + 1 + np.arange(count) % (last - match)]
