"""Checks of rollouts and their log-probabilities, for all bridges to trainers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxengine.requests.output.outputs import CompletionOutput


def check_logprobs(mode: str, temperature: float) -> None:
    """Raise ValueError if an engine with this logprobs_mode does not report the log-probabilities of the distribution
    that it samples from at this temperature: the logits modes never do, raw_logprobs only at 0 and 1.
    """
    if not mode.endswith("logprobs"):
        text = "start the engine with logprobs_mode='raw_logprobs' or 'processed_logprobs'"
        raise ValueError(f"rollouts need log-probabilities, not {mode}: {text}")
    if mode == "raw_logprobs" and temperature not in (0.0, 1.0):
        text = "start the engine with logprobs_mode='processed_logprobs', or set the temperature to 1"
        raise ValueError(f"log-probabilities at temperature {temperature} would be of temperature 1: {text}")


def check_whole(answers: Iterable[CompletionOutput]) -> None:
    """Raise RuntimeError if one of the answers has another finish_reason than "stop" and "length", which means that it
    was aborted or failed.
    """
    for each in answers:
        if each.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"an answer ended with {each.finish_reason} ({each.stop_reason})")


def chosen(answer: CompletionOutput) -> np.ndarray:
    """Return the log-probabilities float32[tokens] of an answer's tokens, which it must have. Raises ValueError for an
    answer without them.
    """
    pairs = zip(answer.token_ids, answer.logprobs or (), strict=True)
    return np.array([found[token].logprob for token, found in pairs], np.float32)
