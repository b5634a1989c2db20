"""Ids of the special tokens of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of special tokens by role; None for an unused role. `turn_ends`: ids, in addition to eos,
    that end an answer.
    """

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    pad: int | None = None
    turn_ends: tuple[int, ...] = ()
