"""Ids of the special tokens of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of special tokens by role; None for a role without a token.

    Attributes:
      bos, eos: tokens at the beginning and at the end of a text.
      unk: token for text that the vocabulary lacks.
      pad: token for padding.
      turn_ends: further tokens that end an answer.
    """

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    pad: int | None = None
    turn_ends: tuple[int, ...] = ()
