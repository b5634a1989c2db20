"""Convolutions over both sides of a token see the prompt's own tokens and no others."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxengine.models.layers.states.short_conv import taps_within


def test_taps_are_within_the_prompt():
    # Prompts of 3, 1, 4 and 2 tokens, then padding, whose positions may go on as the last prompt's do.
    prompts = [0, 0, 0, 1, 2, 2, 2, 2, 3, 3]
    positions = jnp.array([0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 2, 3], jnp.int32)
    is_token = jnp.arange(12) < len(prompts)
    for kernel in (2, 3, 4, 5, 8):
        found = np.asarray(taps_within(positions, is_token, kernel))
        for token in range(12):
            for tap in range(kernel):
                other = token + tap - kernel // 2
                both = token < len(prompts) and 0 <= other < len(prompts)
                assert found[token, tap] == (both and prompts[token] == prompts[other]), (kernel, token, tap)
