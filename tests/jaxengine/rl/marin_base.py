"""Record of what jaxengine.rl.marin uses of marin-core 0.2.20.dev202606180959, for tests where it is not installed.

`python -m tests.jaxengine.rl.marin_base`, where it is, checks that the record is right. The types of tokenized rollouts
are later than that release.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

BASE, TYPES = "marin.rl.environments.inference_ctx.base", "marin.inference.types"


class BaseInferenceContext:
    def reload_model(self, model, state_dict): ...

    def shutdown(self): ...

    def get_metrics(self): ...

    def resolve_decoding(self, decoding):
        return decoding

    def batch_completions(self, prompts, n, decoding, system_prompt=None): ...

    def tokenize_prompt(self, prompt, choice=None, system_prompt=None): ...

    def response_tokens_from_choice(self, choice): ...


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
    strategy: Any = "sample"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_output_tokens: int = 512
    min_output_tokens: int | None = None
    stop_strings: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None


class TokenRolloutFinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    EOS_TOKEN = "eos_token"


class TokenRolloutFailureReason(enum.StrEnum):
    BACKEND_ERROR = "backend_error"
    CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True)
class TokenSamplingParameters:
    max_tokens: int
    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    return_logprobs: bool = True


def _record(name: str, *fields: str) -> type:
    made = dataclasses.make_dataclass(name, [(each, Any, dataclasses.field(default=None)) for each in fields])
    made.__module__ = __name__
    return made


_BATCH = ("batch_id", "tokenizer", "policy")
_ROLLOUT = ("prompt_token_ids", "completion_token_ids", "completion_logprobs", "finish_reason", "prompt_mask")
_ROLLOUT += ("completion_mask", "stop_token_id", "metadata")
_REQUEST = ("request_id", "prompt_token_ids", "sampling", "n_generations")
TokenizedRolloutRequest = _record("TokenizedRolloutRequest", *_REQUEST)
TokenizedRolloutBatchRequest = _record("TokenizedRolloutBatchRequest", *_BATCH, "requests")
TokenizedRolloutBatchResult = _record(
    "TokenizedRolloutBatchResult", *_BATCH, "rollouts", "failures", "timing", "metadata"
)
TokenizedRollout = _record("TokenizedRollout", "request_id", "generation_index", *_ROLLOUT)
TokenizedRolloutFailure = _record("TokenizedRolloutFailure", "request_id", "generation_index", "reason", "message")
TokenRolloutTiming = _record("TokenRolloutTiming", "total")


def as_modules() -> dict[str, ModuleType]:
    """The record as the modules that an import of it finds."""
    found = {}
    for full in (BASE, TYPES):
        parts = full.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            found[name] = found.get(name, ModuleType(name))
            found[name].__path__ = []
    found[BASE].BaseInferenceContext = BaseInferenceContext
    for name, value in globals().items():
        if name.startswith("Token"):
            setattr(found[TYPES], name, value)
    return found


def differences() -> list[str]:
    """List what the installed marin has otherwise than the record."""
    real, found = importlib.import_module(BASE), []
    for name, own in vars(BaseInferenceContext).items():
        if name.startswith("_"):
            continue
        theirs = getattr(real.BaseInferenceContext, name, None)
        if theirs is None or [*inspect.signature(theirs).parameters] != [*inspect.signature(own).parameters]:
            found.append(f"BaseInferenceContext.{name}")
    decoding = importlib.import_module("marin.rl.decoding").DecodingConfig
    theirs = {field.name: field.default for field in dataclasses.fields(decoding)}
    if theirs != {field.name: field.default for field in dataclasses.fields(DecodingConfig)}:
        found.append(f"DecodingConfig: {theirs}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(differences()) or None)
