"""Attention as this machine runs it: plain XLA on the CPU, the compiled kernels where there is an accelerator."""

from __future__ import annotations

import pytest

from tests.pallas_kernels.cases import ATTENTION, BATCHES, BY_NAME, CROSSED, PRODUCTION, QUICK
from tests.pallas_kernels.conformance import check_attention, check_runs_kernels
from tests.pallas_kernels.implementations import IN_PROCESS, Implementation
from tests.pallas_kernels.problems import FAMILIES, Case

# One of each kind beside QUICK: heads, dims, pages, windows, masks, codes, latents, lengths.
OTHER_KINDS = (
    "dims (192, 128)",
    "window on both sides",
    "sinks and window",
    "slopes, window, sinks and soft cap",
    "biases",
    "biases and window",
    "pictures in a decode bucket",
    "int8 of each token",
    "tokens' tiny keys, large values",
    "decodes of tokens' scales",
    "latent codes of each token",
    "long 32769",
)


def cases_for(implementation: Implementation, thorough: bool) -> list[Case]:
    """What tells most first: a device's time may end."""
    if implementation.name == "device":
        return PRODUCTION + CROSSED + [case for case in ATTENTION if case not in PRODUCTION]
    if thorough:
        return ATTENTION
    # XLA on a CPU tells few shapes apart; "gpu_xla" is the CPU's code on another layout.
    if implementation.name == "gpu_xla":
        return QUICK[::6]
    if implementation.elsewhere is not None:
        return ATTENTION
    others = [case for case in BATCHES if case not in QUICK]  # which share QUICK's programs
    return [*QUICK, *others[::2], PRODUCTION[0], *(BY_NAME[name] for name in OTHER_KINDS)]


def dtypes_for(implementation: Implementation, case: Case, thorough: bool) -> tuple[str, ...]:
    """Plain XLA in bfloat16 differs by what it rounds: some of the quick cases show it, on one of its layouts."""
    dtypes = implementation.dtypes(case)
    if thorough or implementation.elsewhere is not None or len(dtypes) == 1:
        return dtypes
    return dtypes if case in QUICK[::6] and implementation.name == "cpu" else dtypes[:1]


def pytest_generate_tests(metafunc):
    rows = []
    for implementation in IN_PROCESS:
        for case in cases_for(implementation, metafunc.config.getoption("--thorough")):
            for dtype in dtypes_for(implementation, case, metafunc.config.getoption("--thorough")):
                identity = f"{implementation.name}-{case.name}-{dtype}"
                rows.append(pytest.param(case, dtype, implementation, id=identity))
    metafunc.parametrize(("case", "dtype", "implementation"), rows)


def test_matches_oracle(case, dtype, implementation):
    if implementation.refuses(case, dtype) is None:
        check_runs_kernels(case, dtype, implementation)
    for family in FAMILIES:
        check_attention(case, dtype, family, implementation)
