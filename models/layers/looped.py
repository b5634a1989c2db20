"""Layers that are runs of the same layer of a checkpoint."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.config.taps import ATTENTION, MLP
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.decoder import Decoder
from jaxengine.pallas_kernels.kv.pages import KVPages


class LoopedLayer(nnx.Module):
    """A run of a block, the checkpoint's layer. norm: norm of its input, where a loop follows another one; None for
    none.
    """

    # Where taps find the layer's parts (jaxengine.models.layers.taps.path_of).
    parts: ClassVar[dict[str, tuple[str, ...]]] = {ATTENTION: ("block", "attention"), MLP: ("block", "mlp")}

    def __init__(self, block: Any, norm: Any):
        self.block, self.norm = block, norm

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x [T, D], normed if this run has a norm, to ([T, D], the pool with this run's keys and values
        written).
        """
        return self.block(x if self.norm is None else self.norm(x), kv, pages, step)


def share_blocks(model: Decoder) -> None:
    """Give layers of a stage that run the same block, their attribute `block`, the weights of the first of them, and
    its pools for adapters, so that a device holds these once. LoopedLayers get the stage's last norm, or one norm for
    all of them. `model.config.loops` must not be None.
    """
    blocks: dict[int, nnx.Module] = {}
    norm: Any = model.norm if model.stage.is_last else None
    for number, layer in zip(model.stage.layers, model.layers, strict=True):
        run: Any = layer
        run.block = blocks.setdefault(model.config.stored_layer(number), run.block)
        if getattr(run, "norm", None) is not None:
            run.norm = norm = norm or run.norm
