"""Proof of the kernels that programs call, for the code that starts an engine."""

from __future__ import annotations

from jaxengine.pallas_kernels.proof.calls import Call, recorded_calls
from jaxengine.pallas_kernels.proof.judge import Verdict, judge, judged_calls, too_slow

__all__ = ["Call", "Verdict", "judge", "judged_calls", "recorded_calls", "too_slow"]
