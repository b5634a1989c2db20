"""Experts: counts of the tokens for which the router of each layer has selected each expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.layers.base.section import ExpertLoads
from jaxengine.runner.base.extension import DeviceExtension, HostExtension, Kept, StageShape
from jaxengine.runner.base.forward_pass import ForwardPass

NAME = "experts"


class ExpertsExtension(DeviceExtension):
    """Device extension that counts expert use. Its section of SlotState is u32[1, layers with experts, E]: tokens for
    which each expert of this stage's layers was selected so far, modulo 2**32.

    Attributes:
      num_experts: E. num_layers: this stage's layers with experts; without any nothing is counted.
    """

    name = NAME

    def __init__(self, shape: StageShape):
        super().__init__(shape)
        experts, layers = shape.model.config.experts, shape.model.stage.layers
        self.num_experts = 0 if experts is None else experts.num_experts
        self.num_layers = 0 if experts is None else sum(layer not in experts.dense_layers for layer in layers)

    def slots(self) -> Any:
        return Kept((1, self.num_layers, self.num_experts), jnp.uint32) if self.num_layers else None

    def before_model(self, step: ForwardPass) -> ForwardPass:
        return step.with_section(NAME, ExpertLoads()) if self.num_layers else step

    def after_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with the step's token counts added to the section; unchanged in a stage without experts."""
        if not self.num_layers:
            return step
        load = step.batch.sections[NAME].stacked().astype(jnp.uint32)
        return step.with_state(NAME, step.slots.sections[NAME] + load)

    def on_host(self, runner: Any) -> HostExtension:
        return ExpertCounts(runner)


class ExpertCounts(HostExtension):
    """Host extension that reads the counts of all stages."""

    def load(self) -> np.ndarray:
        """Return u32[layers with experts, E experts]: the number of tokens, of all replicas, for which each expert has
        been selected so far, modulo 2**32.

        Waits for the steps in flight. In an engine of several processes, the other processes take part in the call.
        """
        stages, fetch = self.runner.stages, self.runner.fetch

        def loads() -> list[jax.Array]:
            return [stage.everywhere(stage.slots.sections[NAME]) for stage in stages if NAME in stage.slots.sections]

        found = self.runner.peers.call("expert load", (), loads)
        return np.concatenate([fetch(load).sum(axis=0, dtype=np.uint32) for load in found])
