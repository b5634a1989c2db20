"""Pooling models: each prompt yields a vector from its pooled hidden states, and no token is sampled."""

from __future__ import annotations

from jaxengine.engine.extension import Loop, LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.scheduler.batches.batch import StepResult


class Pooling(LoopExtension):
    """Loop extension that runs the pooler's program in place of the sampler."""

    def attach(self, loop: Loop) -> None:
        super().attach(loop)
        self.epilogue = loop.runner.extension("pooling").pool

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Set the vectors of prompts that the step completed in `result.emitted`; nothing if there are none."""
        if result.emitted:
            vectors = self.loop.runner.extension("pooling").vectors(step.pending)
            result.emitted = [rows._replace(vectors=vectors[rows.rank, rows.rows]) for rows in result.emitted]
