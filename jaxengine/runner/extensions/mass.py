"""mass: of each token its raw and its processed log-probability, and how much of the distribution truncation kept."""

from __future__ import annotations

from typing import Any

import jax

from jaxengine.runner.extension import DeviceExtension, HostExtension
from jaxengine.sampling.logprobs import NUM_MASS_SCORES, sampling_mass

NAME = "mass"


class MassExtension(DeviceExtension):
    """Three more scores of each row that is scored, in the stage that samples."""

    name = NAME
    num_scores = NUM_MASS_SCORES
    description = "scores of what sampling kept"

    def score(self, logits: jax.Array, adjusted: jax.Array, kept: jax.Array, token_ids: jax.Array) -> jax.Array:
        return sampling_mass(logits, adjusted, kept, token_ids)

    def on_host(self, runner: Any) -> HostExtension:
        return HostExtension(runner)
