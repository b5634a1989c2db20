"""Table of the sampling parameters that are a single number per request: one field, with a Row, for each.

All code that checks, sends or stores such a parameter follows from its Row: SamplingParams and TokenParams, the
requests of HTTP and gRPC, generation_config.json, the commands' options and the devices' columns. Its effect on logits
is a function in jaxengine.sampling.row_functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

# Features that a request needs besides argmax sampling, one bit each; see jaxengine.scheduler.base.token_params.
RANDOM, TRUNCATION, PENALTIES = 1, 2, 4
# Keeps logits finite in float32 after any multiplication.
FLOAT_LIMIT = 1e20
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """Description of a sampling parameter. Its dtype on the devices, f32 or i32, follows from the type of `neutral`.

    Attributes:
      neutral: the value that changes nothing.
      feature: the feature bit of a request with another value.
      low, high: smallest and largest allowed value.
      allowed: the allowed values, in words.
      off: another value that means the same as `neutral`; None for none.
      least: smallest value on the devices; smaller ones are replaced by it.
      grpc: path of its field in a gRPC GenerateRequest.
      reads_prompt: whether its effect depends on the tokens of the prompt.
    """

    neutral: float | int
    feature: int
    low: float
    high: float
    allowed: str
    grpc: str
    off: int | None = None
    least: float = -math.inf
    reads_prompt: bool = False


def _row(default: Any, **fields: Any) -> Any:
    """Return a dataclass field with this default, whose metadata has a Row of `fields`. Row.neutral is the default
    unless `fields` says otherwise.
    """
    return field(default=default, metadata={"row": Row(neutral=fields.pop("neutral", default), **fields)})


@dataclass(kw_only=True)
class SamplingFields:
    """Sampling parameters that are one number each. Names, defaults and meanings are vLLM's.

    Attributes:
      temperature: divisor of the logits; 0 always chooses the likeliest token.
      top_p: sample from the likeliest tokens whose probabilities add up to this.
      min_p: sample from tokens with at least this share of the likeliest token's probability.
      presence_penalty: subtracted from the logit of every token that is already in the output.
      frequency_penalty: subtracted once for each occurrence of the token in the output.
      repetition_penalty: divides the positive logits of tokens that are in the prompt or output, and multiplies their
        negative ones.
      top_k: sample from this many of the likeliest tokens.
    """

    temperature: float = _row(
        1.0, neutral=0.0, feature=RANDOM, low=0, high=2, allowed="a number from 0 to 2", grpc="temperature"
    )
    top_p: float = _row(
        1.0,
        feature=TRUNCATION,
        low=math.ulp(0.0),
        high=1,
        allowed="a number in (0, 1]",
        least=2.0**-126,  # a value below float32's range would become 0, which keeps no token
        grpc="sampling.top_p",
    )
    min_p: float = _row(0.0, feature=TRUNCATION, low=0, high=1, allowed="a number from 0 to 1", grpc="sampling.min_p")
    presence_penalty: float = _row(
        0.0, feature=PENALTIES, low=-2, high=2, allowed="a number from -2 to 2", grpc="decoding.presence_penalty"
    )
    frequency_penalty: float = _row(
        0.0, feature=PENALTIES, low=-2, high=2, allowed="a number from -2 to 2", grpc="decoding.frequency_penalty"
    )
    repetition_penalty: float = _row(
        1.0,
        feature=PENALTIES,
        low=1 / FLOAT_LIMIT,
        high=FLOAT_LIMIT,
        allowed="a finite number > 0 (from 1e-20 to 1e20)",
        grpc="decoding.repetition_penalty",
        reads_prompt=True,
    )
    top_k: int = _row(
        0,
        feature=TRUNCATION,
        low=-1,
        high=_INT32_MAX,
        allowed="an int >= 1, or 0 or -1 to switch it off",
        off=-1,
        least=0,
        grpc="sampling.top_k",
    )


ROWS: dict[str, Row] = {each.name: each.metadata["row"] for each in fields(SamplingFields)}
