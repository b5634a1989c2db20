"""Sampling mass: each sampled token's raw and processed log-probability, and the probability that truncation kept."""

from __future__ import annotations

from typing import Any

import jax

from jaxengine.runner.base.extension import DeviceExtension, HostExtension
from jaxengine.sampling.logprobs import NUM_MASS_SCORES, sampling_mass

NAME = "mass"


class MassExtension(DeviceExtension):
    """Device extension that adds three scores of each sampled token, in the stage that samples: its raw
    log-probability, its processed one, and the log of the probability that truncation kept.
    """

    name = NAME
    num_scores = NUM_MASS_SCORES
    description = "scores of what sampling kept"

    def score(self, logits: jax.Array, adjusted: jax.Array, kept: jax.Array, token_ids: jax.Array) -> jax.Array:
        return sampling_mass(logits, adjusted, kept, token_ids)

    def on_host(self, runner: Any) -> HostExtension:
        return HostExtension(runner)
