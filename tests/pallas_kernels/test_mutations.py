"""The conformance cases catch every planted fault, and pass what is not mutated."""

from __future__ import annotations

import pytest

from tests.pallas_kernels.cases import QUICK
from tests.pallas_kernels.conformance import check_attention, check_update
from tests.pallas_kernels.mutations import MUTATIONS, ORIGINAL, Mutation, killer, mutated


def test_unmutated_passes_the_quick_cases():
    for case in QUICK:
        for family in ("uniform", "needle", "normal"):
            check_attention(case, "float32", family, ORIGINAL)
    check_update("float32", 9, ORIGINAL)


# Every second one, because each is a program to compile; `python -m tests.pallas_kernels.mutations` runs them all.
@pytest.mark.parametrize("mutation", MUTATIONS[::2], ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation):
    assert killer(mutation) is not None


def test_pattern_that_is_gone_is_an_error():
    gone = Mutation("gone", MUTATIONS[0].module, "no such line", "", ())
    with pytest.raises(ValueError, match="occurs 0 times"):
        mutated(gone)
