"""One seeded fault."""

from __future__ import annotations

from typing import NamedTuple

from tests.pallas_kernels.worker import Job


class Mutant(NamedTuple):
    name: str
    modules: str  # of pallas_kernels, a glob: `old` occurs in exactly one place of them
    old: str
    new: str
    jobs: tuple[Job, ...]  # in the order in which they are tried


def attention(implementation: str, dtype: str, *cases: str) -> tuple[Job, ...]:
    """Jobs of the attention check, with the families that tell most."""
    return tuple(("attention", implementation, case, dtype, "uniform", "needle", "normal") for case in cases)
