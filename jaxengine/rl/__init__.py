"""The forward pass of a model family as trainers need it: over whole sequences, differentiable."""

from __future__ import annotations

from jaxengine.rl.forward_pass import forward as forward
from jaxengine.rl.forward_pass import hidden_states as hidden_states

__all__ = ["forward", "hidden_states"]
