"""Pooling models: a prompt's last row gives a vector, and no token is sampled."""

from __future__ import annotations

from jaxengine.engine.extension import Loop, LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.scheduler.batch import StepResult


class Pooling(LoopExtension):
    """Ends each step with the pooler in place of the sampler."""

    def attach(self, loop: Loop) -> None:
        super().attach(loop)
        self.epilogue = loop.runner.extension("pooling").pool

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Adds the vectors of prompts that ended."""
        if result.emitted:
            vectors = self.loop.runner.extension("pooling").vectors(step.pending)
            result.emitted = [rows._replace(vectors=vectors[rows.rank, rows.rows]) for rows in result.emitted]
