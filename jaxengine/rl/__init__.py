"""Reinforcement learning: a model family's forward pass for trainers, over whole sequences, differentiable."""

from __future__ import annotations

from jaxengine.rl.certificate import Agreement as Agreement
from jaxengine.rl.certificate import Certificate as Certificate
from jaxengine.rl.certificate import certify as certify
from jaxengine.rl.forward_pass import forward as forward
from jaxengine.rl.forward_pass import hidden_states as hidden_states
from jaxengine.rl.forward_pass import log_probs as log_probs

__all__ = ["Agreement", "Certificate", "certify", "forward", "hidden_states", "log_probs"]
