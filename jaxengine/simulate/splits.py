"""`--optimise parallel`: every way to split a model over chips, run over a trace and put in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxengine.plan.plan import SplitPlan
from jaxengine.simulate.loop import Outcome
from jaxengine.simulate.report import Limits, as_json, row
from jaxengine.simulate.setup import Setup, fitting
from jaxengine.simulate.trace import Trace


@dataclass(frozen=True)
class SplitRun:
    """Plan of a split, and the outcome of a trace on it."""

    plan: SplitPlan
    outcome: Outcome

    def row(self, limits: Limits) -> dict[str, Any]:
        """Return the run as a row of a table (see `report.row`), named by the flags of the split, or "one device"."""
        return row(self.plan.split.flags or "one device", self.outcome, limits)

    def key(self, limits: Limits) -> tuple[float, ...]:
        """Return a sorting key that puts the best run first: by fewest refused requests, then by most goodput if there
        are limits, rounded to three digits, then by the least mean time to the end of a request, infinity without one.
        """
        found = as_json(self.outcome, limits)
        good = -round(found["good_requests_per_second"] or 0.0, 3) if limits.given else 0.0
        return found["refused"], good, found["end"]["mean"] or float("inf")


def run_splits(setup: Setup, trace: Trace, limits: Limits) -> list[SplitRun]:
    """Run a trace on every split in `setup.splits` that fits, and return the runs, the best first by `SplitRun.key`. If
    none fits, raises the ConfigError of the first split.
    """
    plans = [each.plan for each in setup.splits if each.fits and each.plan is not None]
    if not plans:
        fitting(setup.splits[0])
    runs = [SplitRun(plan, setup.run(trace, plan)) for plan in plans]
    return sorted(runs, key=lambda run: run.key(limits))
