"""What trainers need of the engine: the forward pass of a family, differentiable."""

from __future__ import annotations

from jaxengine.rl.forward_pass import forward as forward
from jaxengine.rl.forward_pass import hidden_states as hidden_states

__all__ = ["forward", "hidden_states"]
