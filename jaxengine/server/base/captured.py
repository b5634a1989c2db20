"""Activations in answers (fields `capture` and `return_hidden_states`): a safetensors file, base64-encoded in JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np
from safetensors.numpy import save

from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.output.outputs import CompletionOutput
from jaxengine.requests.params.activations import HIDDEN_STATES, captured_bytes
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.options import ServerConfig


def check_captured(
    inputs: InputProcessor, config: ServerConfig, params: SamplingParams, prompt_lengths: Iterable[int]
) -> None:
    """Raise RequestError if the activations in the answer to prompts of these lengths, in tokens, could exceed
    max_captured_bytes, or if the engine was started without capture. A request without activations always passes.

    Each of a prompt's `n` outputs counts one row for every token of the prompt and of max_tokens, together at most
    max_model_len, which also stands for a max_tokens of None.
    """
    names = params.capture or ()
    if not (names or params.return_hidden_states):
        return
    own, longest = inputs.config, inputs.config.max_model_len
    row_bytes = captured_bytes(names, own, inputs.model_config, hidden_states=params.return_hidden_states)
    most = longest if params.max_tokens is None else params.max_tokens
    rows = sum(min(length + most, longest) for length in prompt_lengths) * params.n
    if rows * row_bytes > (allowed := config.max_captured_bytes):
        field = "capture" if names else "return_hidden_states"
        problem = (
            f"{field} asks for up to {rows} rows of {row_bytes} bytes; the server allows {allowed} bytes in an answer "
            "(max_captured_bytes): name fewer taps, lower max_tokens, or send fewer prompts"
        )
        raise RequestError(problem, param=field)


def captured_file(output: CompletionOutput) -> bytes:
    """Return the bytes of a safetensors file with an output's activations, as tensors named after the taps, and
    "hidden_states" if they were requested; b"" if no tensor has rows.
    """
    tensors = dict(output.captured or {})
    if output.hidden_states is not None:
        tensors[HIDDEN_STATES] = output.hidden_states
    if not any(len(each) for each in tensors.values()):
        return b""
    # A row has all taps side by side, so single taps are strided; safetensors needs contiguous arrays.
    return save({name: np.ascontiguousarray(each) for name, each in tensors.items()})


def captured_fields(output: CompletionOutput) -> dict[str, Any]:
    """Return {"captured": FILE}, where FILE is `captured_file` in base64, to be added to a choice of an answer; {} if
    there are no rows.
    """
    content = captured_file(output)
    return {"captured": base64.b64encode(content).decode()} if content else {}
