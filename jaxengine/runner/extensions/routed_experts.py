"""Routed experts: the experts that were selected for each token, in every layer that has experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.config.taps import EXPERTS, Tap
from jaxengine.models.layers.taps import Taps
from jaxengine.runner.base.extension import DeviceExtension, HostExtension, StageShape
from jaxengine.runner.base.fetched import fetched, fetched_shape, fetched_tokens
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.scheduler.batches.buckets import Bucket

NAME = "routed_experts"


class RoutedExpertsExtension(DeviceExtension):
    """Device extension whose forward passes leave the selected experts of every token in this stage's layers, [T, L *
    k] of `dtype`; nothing in a stage without experts.

    There is no epilogue: the host fetches the arrays that the forward passes of all stages have left.

    Attributes:
      num_per_token: k, experts of a token in each layer.
      dtype: uint8 if it holds every expert's number, else uint16.
    """

    name = NAME

    def __init__(self, shape: StageShape):
        """Determine the stage's layers with experts and the dtype of expert numbers: uint8 up to 256 experts, else
        uint16. The model must have experts (asserted).
        """
        super().__init__(shape)
        experts = shape.model.config.experts
        assert experts is not None
        self._taps = [Tap(EXPERTS, layer) for layer in shape.model.stage.layers if layer not in experts.dense_layers]
        self.num_per_token, self.dtype = experts.num_per_token, np.uint8 if experts.num_routed <= 256 else np.uint16
        self.description = f"leaves the experts of {len(self._taps)} layers"

    def label(self, bucket: Bucket) -> str:
        return f", {self.description}"

    def left(self, num_tokens: int, num_rows: int) -> Any:
        """Return the abstract array of the tokens' experts, [T, L * k] of each replica, in the form of `fetched_shape`;
        None in a stage without experts.
        """
        width = len(self._taps) * self.num_per_token
        return fetched_shape(self.shape, num_tokens, width, self.dtype) if width else None

    def memory(self) -> Mapping[str, int]:
        """Return the bytes on one device, under "routed experts", for the experts of the steps in flight and of the one
        that the host is reading.
        """
        of_token = len(self._taps) * self.num_per_token * np.dtype(self.dtype).itemsize
        return {"routed experts": fetched_tokens(self.shape) * of_token}

    def before_model(self, step: ForwardPass) -> ForwardPass:
        return step.with_section(NAME, Taps(self._taps)) if self._taps else step

    def after_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with the numbers of its tokens' experts left under NAME, those of all layers concatenated;
        unchanged in a stage without experts.
        """
        if not self._taps:
            return step
        found: Taps = step.batch.sections[NAME]
        with jax.named_scope(NAME):
            joined = jnp.concatenate([found[tap] for tap in self._taps], axis=-1)
            return step.leaving(NAME, fetched(self.shape, joined.astype(self.dtype)))

    def on_host(self, runner: Any) -> HostExtension:
        return StepExperts(runner, self)


class StepExperts(HostExtension):
    """Host extension that fetches the routed experts of steps.

    Attributes:
      num_layers: layers with experts, of all stages.
      num_per_token, dtype: experts per token and layer, and the dtype of RoutedExpertsExtension.
    """

    def __init__(self, runner: Any, extension: RoutedExpertsExtension):
        super().__init__(runner)
        model = extension.shape.model.config
        assert model.experts is not None
        self.num_layers = model.num_layers - len(model.experts.dense_layers)
        self.num_per_token, self.dtype = extension.num_per_token, extension.dtype

    def keep(self, pending: PendingStep) -> None:
        """Store references to a step's experts in its outputs, for `fetch`. Call it before the step's sampler is
        dispatched.
        """
        assert pending.forwarded is not None
        stages = (*pending.forwarded.earlier, pending.forwarded.sections)
        pending.outputs[NAME] = [sections[NAME] for sections in stages if NAME in sections]

    def fetch(self, pending: PendingStep) -> np.ndarray:
        """Return the experts of a step passed to `keep`, [replicas, T, layers with experts, k]; waits for the step.

        T: tokens of the step's bucket; padding is undefined. Raises KeyError for another step.
        """
        shape = self.runner.num_ranks, pending.bucket.num_tokens, -1, self.num_per_token
        return np.concatenate([each.reshape(shape) for each in pending.output(NAME)], axis=2)
