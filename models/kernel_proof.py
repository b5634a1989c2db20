"""Proof of the kernels that programs call, for the code that starts an engine."""

from __future__ import annotations

from jaxengine.pallas_kernels.proof.calls import Call, recorded_calls
from jaxengine.pallas_kernels.proof.judge import (
    Trial,
    Verdict,
    compiled_trial,
    judged_calls,
    lowered_trial,
    too_slow,
    verdict_of,
)

__all__ = [
    "Call",
    "Trial",
    "Verdict",
    "compiled_trial",
    "judged_calls",
    "lowered_trial",
    "recorded_calls",
    "too_slow",
    "verdict_of",
]
