"""The schemes there are, one row each, and the choice of one for all modules of a model."""

from __future__ import annotations

from dataclasses import dataclass

from models.quantization.plain import Plain
from models.quantization.scheme import Scheme

SCHEMES: dict[str, Scheme] = {"plain": Plain()}


@dataclass(frozen=True)
class Everywhere:
    """One scheme for every checkpoint module, whatever its name."""

    scheme: Scheme

    def __call__(self, module: str) -> Scheme:
        return self.scheme


PLAIN = Everywhere(SCHEMES["plain"])
