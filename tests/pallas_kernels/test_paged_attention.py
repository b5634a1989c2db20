"""Every attention implementation of this machine's platform against the float64 oracle, over the conformance cases."""

from __future__ import annotations

import pytest

from tests.pallas_kernels.cases import ATTENTION
from tests.pallas_kernels.conformance import IMPLEMENTATIONS, check_attention
from tests.pallas_kernels.problems import FAMILIES


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda implementation: implementation.name)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, id=f"{case.name}-{dtype}") for case in ATTENTION for dtype in case.dtypes],
)
def test_matches_oracle(case, dtype, implementation):
    for family in FAMILIES:
        check_attention(case, dtype, family, implementation)
