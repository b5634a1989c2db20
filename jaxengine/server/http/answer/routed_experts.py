"""Routed experts of an answer's tokens in JSON, in vLLM's form."""

from __future__ import annotations

import base64
import io

import numpy as np

from jaxengine.requests.output.outputs import CompletionOutput


def encoded_experts(output: CompletionOutput) -> str | None:
    """Return the array `routed_experts` of an output as base64 of an .npy file; None if the output has none."""
    if output.routed_experts is None:
        return None
    file = io.BytesIO()
    np.save(file, output.routed_experts, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")
