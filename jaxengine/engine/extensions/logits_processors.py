"""Logits processors of a user's own: a slot gets the parameters of the request that takes it."""

from __future__ import annotations

import numpy as np

from jaxengine.engine.extension import LoopExtension
from jaxengine.scheduler.batch import ScheduledStep


class LogitsProcessors(LoopExtension):
    """Writes the columns of slots. Needs an engine that was started with logits_processors."""

    def __init__(self) -> None:
        self._written: set[int] = set()

    def sync(self, step: ScheduledStep) -> None:
        host = self.loop.runner.extension("logits_processors")
        rows: list[tuple[int, np.ndarray | None]] = []
        for request in self.loop.rows.admitted(step):
            slot, values = self.loop.rows.number(request), request.params.processors
            if values:
                self._written.add(slot)
                rows.append((slot, host.words(values)))
            elif slot in self._written:
                self._written.remove(slot)
                rows.append((slot, None))
        if rows:
            host.set_columns(rows)
