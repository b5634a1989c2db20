"""Rows of steps that a request gets whose drafts are accepted, and one that loses its slot in front of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace as Stand
from typing import Any

import numpy as np
import pytest

from jaxengine.engine.extension import Loop
from jaxengine.engine.extensions.capture import Capture
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.models.config.taps import Tap
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import CAPTURE, TokenParams

TAP = Tap("residual", 1)


class Steps:
    """An engine's steps of one request with a row of its own in each, whose tokens each have a number."""

    def __init__(self) -> None:
        params = TokenParams(capture=(TAP.name,), capabilities=CAPTURE)
        self.request: Any = Request("0", np.arange(4, dtype=np.int32), params, 16)
        self.slots: Any = Stand(features=np.array([CAPTURE]), requests=[self.request], num_computed=np.zeros(1, int))
        taps = Stand(named=(TAP,), layers=(), model={"residual": [0, 1, 2]})
        device = Stand(taps=taps, keep=lambda _: None, fetch=lambda pending: {TAP: pending.values[None, :, None]})
        scheduler: Any = Stand(ranks=[Stand(index=0, slots=self.slots)])
        runner: Any = Stand(extension=lambda _: device)
        unused: Any = None
        self.capture, self.found = Capture(), list[float]()
        self.capture.attach(Loop(runner, scheduler, unused, unused))
        self.capture.queued([self.request])

    def run(self, values: Sequence[float], num_computed: int, accepted: int | None = None, held: bool = False) -> None:
        """A chunk of the prompt, or a decode of which so many tokens are accepted. num_computed: with its tokens."""
        self.request.slot, self.slots.num_computed[0] = 0, num_computed
        batch = Stand(slots=np.array([0]), num_scheduled=np.array([len(values)]), num_decode=int(accepted is not None))
        counts = None if accepted is None else np.array([[accepted]])
        parts: Any = Stand(values=np.array(values), result=lambda _: counts)
        scheduled: Any = Stand(features=CAPTURE, batches=[batch])
        unused: Any = None
        step = InFlight(scheduled, parts, unused)
        self.capture.after_forward(step)
        if held:
            self.request.slot = -1
        self.capture.sync(step.step)
        output = EngineOutput()
        self.capture.collected(step, unused, output)
        self.found += [value for each in output.found for value in each.rows[TAP.name][:, 0]]


@pytest.mark.parametrize("again", [5, 6])
def test_accepted_drafts_of_a_held_request_are_not_its_tokens(again):
    """Computed again, it has had its tokens up to the first of the step in which it was held, and nothing of that."""
    steps = Steps()
    steps.run([0, 1, 2, 3], 4)
    steps.run([4, 5, -1], 7, accepted=2)
    assert steps.found == [0, 1, 2, 3, 4, 5]
    steps.run([6, -2, -3], 9, accepted=3, held=True)
    assert steps.found == [0, 1, 2, 3, 4, 5]
    steps.run([0, 1, 2, 3, 4, 5, 6][:again], again)
    steps.run([0, 1, 2, 3, 4, 5, 6][again:], 7)
    steps.run([7, 8, 9], 10, accepted=3)
    assert steps.found == list(range(10))
