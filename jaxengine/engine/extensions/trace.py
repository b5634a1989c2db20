"""Trace replay: writes the tokens that a request is to decode into the slot that it takes."""

from __future__ import annotations

from jaxengine.engine.extension import LoopExtension
from jaxengine.scheduler.batches.batch import ScheduledStep


class Traces(LoopExtension):
    """Loop extension that writes slots' traces (given output tokens). Needs the engine option enable_trace_replay."""

    def __init__(self) -> None:
        """Begin with slots that have no trace."""
        self._written: set[int] = set()

    def sync(self, step: ScheduledStep) -> None:
        """Write the traces of requests that are new in their slots, and clear traces that an earlier request of the
        slot left there.
        """
        rows: list[tuple[int, int, tuple[int, ...]]] = []
        for request in self.loop.rows.admitted(step):
            slot, trace = self.loop.rows.number(request), request.params.trace_decode_token_ids
            if trace or slot in self._written:
                self._written.add(slot)
                rows.append((slot, request.num_prompt_tokens, trace))
                if not trace:
                    self._written.remove(slot)
        if rows:
            self.loop.runner.extension("trace").set_traces(rows)
