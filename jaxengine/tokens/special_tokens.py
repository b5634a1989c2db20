"""The tokens of a vocabulary that have a role. Knows no file format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpecialTokens:
    """Ids by role; None for a role nobody has. `turn_ends`: ids beside eos that end an answer."""

    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    pad: int | None = None
    turn_ends: tuple[int, ...] = ()
