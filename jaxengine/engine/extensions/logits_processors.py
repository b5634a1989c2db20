"""Users' logits processors: writes the parameters of each request into the slot that it takes."""

from __future__ import annotations

import numpy as np

from jaxengine.engine.extension import LoopExtension
from jaxengine.scheduler.batches.batch import ScheduledStep


class LogitsProcessors(LoopExtension):
    """Loop extension that writes the logits processors' columns of slots. Needs the engine option logits_processors."""

    def __init__(self) -> None:
        """Begin with columns that no request has written."""
        self._written: set[int] = set()

    def sync(self, step: ScheduledStep) -> None:
        """Write the columns of requests that are new in their slots, and clear columns that an earlier request of the
        slot wrote.
        """
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
