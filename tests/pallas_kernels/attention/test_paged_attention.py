"""Attention as this machine runs it: plain XLA on the CPU, the compiled kernels where there is an accelerator."""

from __future__ import annotations

import pytest

from tests.pallas_kernels.cases import ATTENTION, QUICK
from tests.pallas_kernels.conformance import check_attention
from tests.pallas_kernels.implementations import IN_PROCESS
from tests.pallas_kernels.problems import FAMILIES


def pytest_generate_tests(metafunc):
    thorough = metafunc.config.getoption("--thorough")
    rows = []
    for implementation in IN_PROCESS:
        # "gpu_xla" is the CPU's code on another layout.
        for case in QUICK if implementation.name == "gpu_xla" and not thorough else ATTENTION:
            for dtype in case.dtypes:
                identity = f"{implementation.name}-{case.name}-{dtype}"
                rows.append(pytest.param(case, dtype, implementation, id=identity))
    metafunc.parametrize(("case", "dtype", "implementation"), rows)


def test_matches_oracle(case, dtype, implementation):
    for family in FAMILIES:
        check_attention(case, dtype, family, implementation)
