"""capture: hidden states of chosen layers, for requests with return_hidden_states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.layers.section import Capture
from jaxengine.runner.extension import DeviceExtension, HostExtension, StageShape
from jaxengine.runner.programs.forward_pass import ForwardPass
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.scheduler.buckets import Bucket

NAME = "capture"


class CaptureExtension(DeviceExtension):
    """Leaves the hidden states of every token, [T, L * D], those of the L layers side by side.

    There is no epilogue: the host fetches what a forward pass left, in steps where a request asked for it.
    """

    name = NAME

    def __init__(self, shape: StageShape):
        super().__init__(shape)
        layers = shape.config.capture_layers
        assert layers is not None
        self.layers, self._last = layers, shape.model.config.num_layers

    def label(self, bucket: Bucket) -> str:
        return f", captures {list(self.layers)}"

    def left(self, num_tokens: int, num_rows: int) -> Any:
        return self.shape.hidden(num_tokens, len(self.layers))

    def memory(self) -> Mapping[str, int]:
        """Those of the steps in flight, and of the one that the host is reading."""
        config = self.shape.config
        size = max(bucket.num_tokens for bucket in self.shape.buckets) * len(self.layers)
        of_step = size * self.shape.model.config.hidden_size * jnp.dtype(config.dtype).itemsize
        return {"hidden states": of_step * (config.max_in_flight + 1)}

    def before_model(self, step: ForwardPass) -> ForwardPass:
        return step.with_section(NAME, Capture([layer for layer in self.layers if layer != self._last]))

    def after_model(self, step: ForwardPass) -> ForwardPass:
        assert step.hidden is not None
        section = step.batch.sections[NAME]
        # The last one is taken after the final norm, as transformers and SGLang return it.
        with jax.named_scope("capture"):
            parts = [step.hidden if layer == self._last else section.after(layer) for layer in self.layers]
            return step.leaving(NAME, jnp.concatenate(parts, axis=-1))

    def on_host(self, runner: Any) -> HostExtension:
        return HiddenStates(runner, len(self.layers))


class HiddenStates(HostExtension):
    """Fetches the captured hidden states of steps."""

    def __init__(self, runner: Any, num_layers: int):
        super().__init__(runner)
        self._num_layers = num_layers

    def keep(self, pending: PendingStep) -> None:
        """Keep those of a step whose sampler has not been dispatched, to be fetched later."""
        assert pending.forwarded is not None
        pending.outputs[NAME] = pending.forwarded.fields()[NAME]

    def fetch(self, pending: PendingStep) -> np.ndarray:
        """Return those of a step that were kept, [replicas, T, L, D]; waits for the step."""
        found = pending.output(NAME)
        return found.reshape(self.runner.num_ranks, pending.bucket.num_tokens, self._num_layers, -1)
