"""Encoded items that layers attend to: a pool of their keys and values, which every step reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxengine.runner.base.extension import DeviceExtension, HostExtension, StageExtension
from jaxengine.runner.base.program import Program
from jaxengine.runner.extensions.pictures.programs import EncoderPrograms
from jaxengine.runner.extensions.pictures.section import EncoderPool
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.scheduler.extensions.pictures import Encode


class CrossingExtension(DeviceExtension):
    """Device extension of items that layers attend to. A step gets their pool.

    Attributes:
      encoder: programs of the tower that encodes them.
    """

    encoder: EncoderPrograms

    def given(self, bucket: Bucket) -> Any:
        return self.encoder.rows

    def programs(self, params: Sequence[Any]) -> Sequence[Program]:
        return [self.encoder.encode(size, params) for size in self.encoder.layout.sizes]

    def at_stage(self, stage: Any) -> StageExtension:
        return CrossingPool(stage, self.encoder, self.name)


class CrossingPool(EncoderPool):
    """Stage extension with the pool of encoded items, which every step reads."""

    def __init__(self, stage: Any, programs: EncoderPrograms, name: str):
        super().__init__(stage, programs)
        self.name = name

    def before_forward(self, bucket: Bucket, params: Sequence[Any], state: Any, message: Any) -> Any:
        """Return the pool of encoded items."""
        return self.rows


class CrossingEncoder(HostExtension):
    """Host extension that encodes items before the steps that need them."""

    def __init__(self, runner: Any, extension: CrossingExtension):
        super().__init__(runner)
        self._name, self._layout = extension.name, extension.encoder.layout

    def encode(self, encodes: Sequence[Sequence[Encode]]) -> None:
        """Dispatch the encoding of each replica's items into the pool."""
        self.runner.stages[0].extensions[self._name].encode(self._layout.pack(encodes))
