"""Experts of steps that bring right and wrong drafts, and of a request that loses its slot in front of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace as Stand
from typing import Any

import numpy as np

from jaxengine.engine.extension import Loop
from jaxengine.engine.extensions.routed_experts import RoutedExperts
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import TokenParams

PAGE = 2


class Steps:
    """An engine's steps, each with one row of a request in slot 0, whose tokens are sent to one expert, of one layer.

    Page p of the pool is column p of the slot's table.
    """

    def __init__(self) -> None:
        self.slots: Any = Stand(requests=[None], num_computed=np.zeros(1, int))
        device = Stand(num_layers=1, num_per_token=1, dtype=np.uint8, keep=lambda _: None, fetch=lambda own: own.values)
        config = Stand(block_size=PAGE, max_in_flight=2, enable_prefix_caching=True)
        runner: Any = Stand(
            extension=lambda _: device, config=config, windows=(4, None), num_ranks=1, plan=Stand(num_pages=8)
        )
        pages = Stand(table=np.stack([np.full((1, 8), -1, np.int32), np.arange(8, dtype=np.int32)[None]]))
        rank = Stand(index=0, slots=self.slots, pages=pages)
        unused: Any = None
        self.experts = RoutedExperts()
        scheduler: Any = Stand(ranks=[rank], config=Stand(widths=(3,)))
        self.experts.attach(Loop(runner, scheduler, unused, unused))

    def begin(self, **params: int) -> Request:
        request = Request("0", np.arange(4, dtype=np.int32), TokenParams(**params), 16)
        self.experts.prepare(request)
        self.experts.queued([request])
        return request

    def run(
        self,
        request: Request,
        values: Sequence[int],
        num_computed: int,
        accepted: int | None = None,
        held: bool = False,
        admitted: bool = False,
    ) -> list[int]:
        """A chunk, or a decode of which so many tokens are right; what the request gets. num_computed: with its
        tokens."""
        self.slots.requests[0], request.slot, self.slots.num_computed[0] = request, 0, num_computed
        batch = Stand(slots=np.array([0]), num_scheduled=np.array([len(values)]), num_decode=int(accepted is not None))
        batch.admitted = [request] if admitted else []
        counts = None if accepted is None else np.array([[accepted]])
        parts: Any = Stand(values=np.array(values, np.uint8)[None, :, None, None], result=lambda _: counts)
        scheduled: Any = Stand(batches=[batch])
        unused: Any = None
        step = InFlight(scheduled, parts, unused)
        self.experts.after_forward(step)
        if held:
            request.slot = -1
        self.experts.sync(scheduled)
        output = EngineOutput()
        self.experts.collected(step, unused, output)
        return [int(each) for found in output.found for each in found.rows.ravel()]


def test_right_drafts_and_a_held_request():
    """The scheduler takes drafts for right until it hears otherwise: a step's tokens follow those that have come."""
    steps = Steps()
    request = steps.begin()
    assert steps.run(request, [0, 1, 2, 3], 4, admitted=True) == [0, 1, 2, 3]
    assert steps.run(request, [4, 5, 90], 7, accepted=2) == [4, 5]
    assert steps.run(request, [6, 91, 92], 10, accepted=1) == [6]  # 7 is right, and nobody had taken that back
    assert steps.run(request, [7, 93, 94], 10, accepted=3, held=True) == []
    # Found again with the pages that it left, the last of which ends with the token that it was held at.
    assert steps.run(request, [50], 9, admitted=True) == [7, 50]
    other = steps.begin(routed_experts_prompt_start=3)
    assert steps.run(other, [60, 61], 10, admitted=True) == [3, 4, 5, 6, 7, 60, 61]
