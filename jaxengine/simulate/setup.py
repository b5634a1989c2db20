"""Subject of a simulation: a model on chips, planned from the headers of its files, with the costs of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.execution.compilation_config import CompilationConfig
from jaxengine.plan.chips import Chips, read_chips
from jaxengine.plan.model import PlannedModel, open_planned
from jaxengine.plan.plan import PARALLEL, SplitPlan, plan_split, platform_for
from jaxengine.plan.splits import Ranked, rank_splits
from jaxengine.simulate.costs import Costs, HostCosts, MeasuredCosts, RooflineCosts
from jaxengine.simulate.fleet import FleetOptions, FleetOutcome, run_fleet
from jaxengine.simulate.loop import Outcome, check_simulated, run_trace
from jaxengine.simulate.trace import Trace

# Options that must equal those of a measurement, because its costs are not valid for other values.
_MEASURED_WITH = ("model", "dtype", "quantization", "kv_cache_dtype", *PARALLEL)
_LENGTH = 1024


@dataclass(frozen=True)
class Setup:
    """Subject of a simulation.

    Attributes:
      model, chips: the model and its devices.
      splits: the model's splits over the chips, the best first.
      measured: costs of a running engine; None for a roofline.
      efficiency, host: share of the roofline that is reached, and the host's costs; used without measured costs.
      progress: function that is called with a text about the current progress.
    """

    model: PlannedModel
    chips: Chips
    splits: list[Ranked]
    measured: MeasuredCosts | None
    efficiency: float
    host: HostCosts
    progress: Callable[[str], None] = lambda what: None

    @property
    def plan(self) -> SplitPlan:
        """Plan of the best split. Raises ConfigError if the model does not fit."""
        return fitting(self.splits[0])

    def costs(self, plan: SplitPlan) -> Costs:
        """Return the costs of a plan's steps: the measured ones if there are any, otherwise a roofline. Raises
        ConfigError for a chip without figures.
        """
        if self.measured is not None:
            return self.measured
        return self._roofline if plan is self.plan else RooflineCosts(plan, self.efficiency, self.host)

    @cached_property
    def _roofline(self) -> RooflineCosts:
        """Roofline costs of the best split's plan, cached so that each bucket is computed once for all runs."""
        return RooflineCosts(self.plan, self.efficiency, self.host)

    def num_pages(self, plan: SplitPlan) -> int:
        """Return the pages of a replica: those of the measured engine, or the plan's if there was no measurement or if
        options fix the number.
        """
        if self.measured is None or plan.config.fixes_pages:
            return plan.num_pages
        return self.measured.num_pages

    def run(self, trace: Trace, plan: SplitPlan | None = None) -> Outcome:
        """Run a trace on a plan (None: the best split's) and return the outcome; report progress.

        Raises ConfigError if the best split does not fit or the chip has no figures, RuntimeError if requests never
        end.
        """
        plan = plan or self.plan
        packer = plan.stages[0].programs.packer

        def progress(done: int, total: int) -> None:
            """Call the setup's progress with the split and the number of requests that have ended."""
            self.progress(f"{plan.split.flags} {done:,} of {total:,} requests")

        return run_trace(trace, plan.config, packer, self.num_pages(plan), plan.windows, self.costs(plan), progress)

    def run_fleet(self, trace: Trace, options: FleetOptions, router: str) -> FleetOutcome:
        """Run a trace on a fleet of engines with the best split's plan, and return the outcome; report progress.

        router: a name in `fleet.ROUTERS`. Raises ConfigError if the best split does not fit or the chip has no figures,
        RuntimeError if requests never end.
        """
        plan = self.plan

        def progress(done: int, total: int) -> None:
            """Call the setup's progress with the router and the number of requests that have ended."""
            self.progress(f"{router}: {done:,} of {total:,} requests")

        packer = plan.stages[0].programs.packer
        engine = plan.config, packer, self.num_pages(plan), plan.windows, self.costs(plan)
        return run_fleet(trace, options, router, *engine, progress)

    def with_shapes(self, shapes: CompilationConfig) -> SplitPlan:
        """Return a plan of the best split with other step shapes. If these do not fit, the plan's `error` says why.
        Raises ConfigError if the best split itself does not fit.
        """
        model = replace(self.model, config=replace(self.model.config, compilation_config=shapes))
        return plan_split(model, self.chips, self.plan.split)


def fitting(ranked: Ranked) -> SplitPlan:
    """Return the plan of a split. Raises the split's ConfigError if it does not fit."""
    if ranked.error is not None:
        raise ranked.error
    assert ranked.plan is not None
    return ranked.plan


@contextmanager
def open_setup(
    options: Mapping[str, Any],
    chips: str | None,
    measured: MeasuredCosts | None,
    efficiency: float,
    host: HostCosts,
    progress: Callable[[str], None] = lambda what: None,
) -> Iterator[Setup]:
    """Open a model, plan its splits, and yield a Setup, as a context manager that closes the model at the end.

    options: engine options; the options of a measurement are added where they are absent. chips: a text for
    `read_chips`; None, allowed only with a measurement, for one CPU. measured, efficiency, host, progress: see Setup.

    Raises ConfigError without both chips and measurement, for chips of another platform than was measured, for options
    that contradict the measurement or each other, and for parallel sizes that do not match the chips; and the errors of
    `open_planned` for a model that cannot be read.
    """
    if measured is not None:
        options = _with_measured(options, measured)
    elif chips is None:
        raise ConfigError("chips", None, "the name of a chip, or --costs with a file of jaxengine calibrate-costs")
    found = read_chips(chips or "cpu")
    if measured is not None and found.chip.platform != measured.platform:
        raise ConfigError("chips", chips or "cpu", f"a chip of {measured.platform}, where the costs were measured")
    config = EngineConfig.from_options(**options)
    check_simulated(config)
    model = open_planned(config, platform_for(found.chip))
    try:
        given = {name: options[name] for name in PARALLEL if name in options}
        splits = rank_splits(model, found, given, _LENGTH, progress)
        yield Setup(model, found, splits, measured, efficiency, host, progress)
    finally:
        model.close()


def _with_measured(options: Mapping[str, Any], measured: MeasuredCosts) -> dict[str, Any]:
    """Return the options of the measurement, replaced by those in `options` where these are given. Raises ConfigError
    if an option in _MEASURED_WITH differs from the measurement's value, or from the default if it has none.
    """
    for name in _MEASURED_WITH:
        if name in options and options[name] != measured.options.get(
            name, EngineConfig.__dataclass_fields__[name].default
        ):
            allowed = f"{measured.options.get(name)!r}, with which the costs were measured"
            raise ConfigError(name, options[name], allowed)
    return {**measured.options, **options}
