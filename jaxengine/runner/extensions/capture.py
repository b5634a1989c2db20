"""Capture: activations at the engine's taps, for requests with capture or return_hidden_states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.config.features.capture import TAPS, hidden_state_taps
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.taps import FINAL_NORM, RESIDUAL, ROUTER, Tap, all_taps, read_taps
from jaxengine.models.layers.taps import Taps, check_parts
from jaxengine.runner.base.extension import DeviceExtension, HostExtension, StageShape
from jaxengine.runner.base.fetched import fetched, fetched_shape, fetched_tokens
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.sharding.stages import Stage

NAME, SECTION = "capture", "taps"


class Activations(NamedTuple):
    """Activations of tokens at all taps, those of one kind joined; leading axes are of tokens.

    Attributes:
      hidden: [..., n * D] in the model's dtype, of the n taps of hidden states; None without any.
      router: f32[..., m * E], of the m taps of router logits; None without any.
    """

    hidden: Any
    router: Any


class EngineTaps(NamedTuple):
    """Taps (named points of the model) whose activations an engine captures.

    Attributes:
      named: taps that a request may name. layers: layers of hidden states, in order.
      model: the layers of every tap that the model has, from `all_taps`.
    """

    named: tuple[Tap, ...]
    layers: tuple[Tap, ...]
    model: Mapping[str, Sequence[int]]


class StageTaps(NamedTuple):
    """The taps of an engine that one of its stages has, in the order of its Activations.

    Attributes:
      hidden, router: taps of hidden states and of router logits.
    """

    hidden: tuple[Tap, ...]
    router: tuple[Tap, ...]

    @property
    def every(self) -> tuple[Tap, ...]:
        """All taps: those of hidden states, then those of router logits."""
        return (*self.hidden, *self.router)


def engine_taps(config: ResolvedConfig, model: ModelConfig) -> EngineTaps:
    """Return the taps that the options capture and capture_layers name, and all that the model has. Raises TapError for
    one the model lacks.
    """
    known = all_taps(model)
    layers = hidden_state_taps(config.capture_layers or (), model.num_layers)
    return EngineTaps(read_taps(config.capture or (), known), layers, known)


def stage_taps(taps: EngineTaps, stage: Stage) -> StageTaps:
    """Return the taps whose activations a stage computes, each once, those of routers apart. A residual stream belongs
    to the stage whose layer produces it.
    """
    own = [tap for tap in dict.fromkeys((*taps.named, *taps.layers)) if _is_of(tap, stage)]
    return StageTaps(tuple(tap for tap in own if tap.kind != ROUTER), tuple(tap for tap in own if tap.kind == ROUTER))


def _is_of(tap: Tap, stage: Stage) -> bool:
    """Whether a stage computes the activations at a tap."""
    if tap.kind == FINAL_NORM:
        return stage.is_last
    if tap.kind == RESIDUAL:
        return stage.is_first if tap.layer == 0 else tap.layer - 1 in stage.layers
    return tap.layer in stage.layers


class CaptureExtension(DeviceExtension):
    """Device extension whose forward passes leave the Activations of every token at the taps of its stage.

    A stage without taps leaves nothing. There is no epilogue: the host fetches the activations of all stages, in steps
    where a request asked for them.

    Attributes:
      taps: the engine's. own: those of its stage.
    """

    name = NAME

    def __init__(self, shape: StageShape):
        """Determine the stage's taps. Raises TapError for one that the model lacks, ValueError for a part that it
        lacks.
        """
        super().__init__(shape)
        config, stage = shape.model.config, shape.model.stage
        self.taps = engine_taps(shape.config, config)
        self.own = stage_taps(self.taps, stage)
        check_parts(TAPS, config.architecture, shape.model.layers, stage.layers, self.own.hidden)
        self.description = f"captures {', '.join(tap.name for tap in self.own.every) or 'nothing'}"

    def label(self, bucket: Bucket) -> str:
        return f", {self.description}"

    def left(self, num_tokens: int, num_rows: int) -> Any:
        """Return the abstract Activations of a forward pass: hidden states in the model's dtype and router logits f32,
        each None if no tap has them; None in a stage without taps.
        """
        hidden, router = self.own.hidden, self._num_logits
        if not self.own.every:
            return None
        width, dtype = len(hidden) * self.shape.model.config.hidden_size, self.shape.config.dtype
        return Activations(
            fetched_shape(self.shape, num_tokens, width, dtype) if hidden else None,
            fetched_shape(self.shape, num_tokens, router, jnp.float32) if router else None,
        )

    def memory(self) -> Mapping[str, int]:
        """Return the bytes on one device, under "captured activations", for the activations of the steps in flight and
        of the one that the host is reading.
        """
        num_hidden = len(self.own.hidden) * self.shape.model.config.hidden_size
        of_token = num_hidden * jnp.dtype(self.shape.config.dtype).itemsize + 4 * self._num_logits
        return {"captured activations": fetched_tokens(self.shape) * of_token}

    def before_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with a Taps section, in which layers store activations (the final norm's are the model's
        result); unchanged in a stage without taps.
        """
        if not self.own.every:
            return step
        return step.with_section(SECTION, Taps(tap for tap in self.own.every if tap.kind != FINAL_NORM))

    def after_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with the Activations at this stage's taps left under NAME, taps of one kind concatenated;
        unchanged in a stage without taps.
        """
        if not self.own.every:
            return step
        found: Taps = step.batch.sections[SECTION]
        hidden, router = self.own
        with jax.named_scope("capture"):
            parts: list[Any] = [step.hidden if tap.kind == FINAL_NORM else found[tap] for tap in hidden]
            left = Activations(
                jnp.concatenate(parts, axis=-1) if hidden else None,
                jnp.concatenate([found[tap] for tap in router], axis=-1) if router else None,
            )
            return step.leaving(NAME, fetched(self.shape, left))

    def on_host(self, runner: Any) -> HostExtension:
        return StepActivations(runner, self.taps)

    @property
    def _num_logits(self) -> int:
        """Number of router logits of a token that this stage captures, over all its taps."""
        return sum(tap.width(self.shape.model.config) for tap in self.own.router)


class StepActivations(HostExtension):
    """Host extension that fetches the activations of steps.

    Attributes:
      taps: the engine's taps.
    """

    def __init__(self, runner: Any, taps: EngineTaps):
        super().__init__(runner)
        self.taps = taps
        self._stages: list[StageTaps] = [stage.programs.extension(NAME).own for stage in runner.stages]

    def keep(self, pending: PendingStep) -> None:
        """Store references to a step's activations in its outputs, for `fetch`. Call it before the step's sampler is
        dispatched.
        """
        assert pending.forwarded is not None
        stages = (*pending.forwarded.earlier, pending.forwarded.sections)
        pending.outputs[NAME] = [sections.get(NAME) for sections in stages]

    def fetch(self, pending: PendingStep) -> dict[Tap, np.ndarray]:
        """Return the activations at each tap in a step passed to `keep`, [replicas, T, width]; waits for the step.

        T: tokens of the step's bucket, padding included. Raises KeyError for another step.
        """
        found: dict[Tap, np.ndarray] = {}
        for own, left in zip(self._stages, pending.output(NAME), strict=True):
            for taps, values in zip(own, left or (), strict=left is not None):
                if taps:
                    shape = self.runner.num_ranks, pending.bucket.num_tokens, len(taps), -1
                    found.update(zip(taps, np.moveaxis(values.reshape(shape), 2, 0), strict=True))
        return found
