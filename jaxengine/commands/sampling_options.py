"""Sampling options that every command that generates text has."""

from __future__ import annotations

from jaxengine.scheduler.base.sampling_fields import ROWS

# Without `seed`: --seed is the engine's, used for requests without their own seed.
SAMPLING_OPTIONS = (
    "max_tokens",
    *ROWS,
    "stop",
    "stop_after",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "extra_args",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "thinking_token_budget",
    "thinking_words",
)
