"""Runs a trace on a fleet: replicas of the engine's loop, each with a device and a clock of its own, behind a router.

A queue of events keeps the order of time: arrivals, the next step of each replica that has requests, what replicas
publish, deaths and drains. A replica without requests costs nothing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.engine.stats.timeline import Timeline
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.packing import Packer
from jaxengine.scheduler.pages.groups import short_digest
from jaxengine.server.base.routing import Replicas
from jaxengine.simulate.costs import Costs
from jaxengine.simulate.loop import SimulatedEngine, check_simulated, request_of
from jaxengine.simulate.trace import Trace

_DIGEST_BYTES = 32  # of a page of the first cache group; keys of other groups are longer
# Called with the request's short digests, its key, and the index of replicas; returns the number of one.
Router = Callable[[Sequence[int], str, Replicas], int]


@dataclass(frozen=True)
class FleetOptions:
    """Options of a fleet, besides those of its replicas' engine.

    Attributes:
      num_replicas: replicas at the beginning, and again after each death and drain.
      deaths, drains: how many replicas end at random moments of the trace: at once, or after their last request.
      restart_seconds: from the end of a replica until another one, with an empty cache, takes its place.
      publish_seconds: how old what the router knows of a prefix cache may be.
      seed: of the moments and the replicas.
    """

    num_replicas: int
    deaths: int = 0
    drains: int = 0
    restart_seconds: float = 60.0
    publish_seconds: float = 1.0
    seed: int = 0


@dataclass
class FleetOutcome:
    """Result of a fleet's run.

    Attributes:
      first_token, mean_interval, e2e: as of `Outcome`, of the requests that ended, in the order in which they did.
      seconds: from the first arrival to the last end.
      failed, retried: requests whose replica died after their first token and before; the latter ran elsewhere.
      refused: messages of requests that engines refused.
      queued: mean number of requests over time of each replica and its successors, f64[num_replicas].
      busy: seconds in which their device computed, f64[num_replicas].
      num_published: page digests that replicas published as new or gone.
      router_seconds, cpu_seconds: what a choice took on this machine, in the median, and the whole simulation of its
        processor.
    """

    trace: Trace
    options: FleetOptions
    router: str
    first_token: np.ndarray = field(default_factory=lambda: np.empty(0))
    mean_interval: np.ndarray = field(default_factory=lambda: np.empty(0))
    e2e: np.ndarray = field(default_factory=lambda: np.empty(0))
    seconds: float = 0.0
    failed: int = 0
    retried: int = 0
    refused: list[str] = field(default_factory=list)
    queued: np.ndarray = field(default_factory=lambda: np.empty(0))
    busy: np.ndarray = field(default_factory=lambda: np.empty(0))
    num_output_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_published: int = 0
    router_seconds: float = 0.0
    cpu_seconds: float = 0.0


def round_robin() -> Router:
    """Return a router that takes replicas in turn."""
    return _after_the_last(Replicas.in_turn)


def least_load() -> Router:
    """Return a router that takes a replica with the fewest requests: of equals, the one after the last choice."""
    return _after_the_last(Replicas.least_loaded)


def _after_the_last(choose: Callable[[Replicas, int], int]) -> Router:
    """Return a router that calls choose(replicas, its last choice, -1 at first)."""
    last = -1

    def router(digests: Any, key: Any, replicas: Replicas) -> int:
        """Return the choice of a replica, which is remembered for the next one. digests, key: not used."""
        nonlocal last
        last = choose(replicas, last)
        return last

    return router


def prefix() -> Router:
    """Return the router that serves (`jaxengine.server.base.routing`)."""
    return lambda digests, key, replicas: replicas.choose(digests, None, None, key=key)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round_robin": round_robin,
    "least_load": least_load,
    "prefix": prefix,
}


class _Replica:
    """An engine in the fleet, and a listener of its pages.

    Attributes:
      index, name: its index in the fleet, which is its successor's too.
      assigned: requests that it was given and whose end the router has not seen, by their number in the trace.
      inbox: those of them that came during the step that it computes.
      ended: those that ended with that step.
      changes: page digests that it has not published yet, and whether they are new.
    """

    def __init__(self, index: int, engine: SimulatedEngine, start: float, fleet: Replicas):
        """Set the engine's clock to `start`, and listen to the pools of all its ranks. fleet: what the router knows."""
        self.index, self.name, self.simulated, self._fleet = index, str(index), engine, fleet
        engine.runner.time.now = start
        engine.engine.timeline = Timeline(1, 1)
        self.alive, self.draining, self.is_scheduled, self.publishes = True, False, False, False
        self.assigned: dict[int, Request] = {}
        self.inbox: list[tuple[Request, np.ndarray]] = []
        self.ended: list[Request] = []
        self.changes: list[tuple[int, bool]] = []
        for rank in engine.engine.scheduler.ranks:
            rank.pool.listeners.append(self)

    def registered(self, digest: bytes, page: int) -> None:
        """Note that the pool now caches a page, by its digest; keys of other cache groups are ignored."""
        if len(digest) == _DIGEST_BYTES:
            self.changes.append((short_digest(digest), True))

    def dropped(self, digest: bytes) -> None:
        """Note that the pool no longer caches a page."""
        self.evicted([digest], [])

    def evicted(self, digests: Sequence[bytes], pages: Sequence[int]) -> None:
        """Note that the pool no longer caches these pages, by their digests."""
        self.changes += [(short_digest(digest), False) for digest in digests if len(digest) == _DIGEST_BYTES]

    def forgotten(self) -> None:
        """Note that the pool has dropped its whole cache: all that the router knows of it, and nothing else, is to be
        forgotten.
        """
        self.changes = [(digest, False) for digest in self._fleet.known(self.name)]


class _Fleet:
    """Simulation of a fleet: its replicas, its events, and what has happened."""

    def __init__(
        self,
        outcome: FleetOutcome,
        make: Callable[[], SimulatedEngine],
        config: ResolvedConfig,
        progress: Callable[[int, int], None],
    ):
        """Start options.num_replicas replicas at time 0.

        outcome: to be filled; it has the trace, the options and the name of the router. make: builds an engine of the
        fleet. progress(ended, requests): called at times.
        """
        self.outcome, self.trace, self.options = outcome, outcome.trace, outcome.options
        self._make, self._config, self._progress = make, config, progress
        self._choose, self._rng = ROUTERS[outcome.router](), np.random.default_rng(self.options.seed)
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._numbers = count()
        # What the router knows, and the replicas by their number in it.
        self._known, self._replicas = Replicas(), dict[int, _Replica]()
        self._backlog: list[int] = []
        self._lives: list[tuple[float, float, float, int]] = []
        self._num_ended, self._choices = 0, array("d")
        # By a replica's index: its requests times seconds, and when this was last added to.
        self._area, self._changed = np.zeros((2, self.options.num_replicas))
        outcome.busy = np.zeros(self.options.num_replicas)
        for index in range(self.options.num_replicas):
            self._add(index, 0.0)

    def _add(self, index: int, now: float) -> None:
        """Start a replica with this index, an empty cache and its clock at `now`, and tell the router of it."""
        replica = _Replica(index, self._make(), now, self._known)
        self._replicas[self._known.add(replica.name)] = replica

    def run(self) -> None:
        """Run all events in order of time until each request has ended, failed or been refused; then fill the
        outcome.
        """
        last = self.trace.requests[-1].arrival
        for index, request in enumerate(self.trace.requests):
            self._at(request.arrival, self._route, index)
        for times, end in ((self.options.deaths, self._die), (self.options.drains, self._drain)):
            for moment in self._rng.uniform(0.0, last, times).tolist():
                self._at(moment, end, None)
        total, now = len(self.trace.requests), 0.0
        while self._num_ended < total:
            now, _, happen, what = heappop(self._events)
            happen(now, what)
        for replica in self._replicas.values():
            self._count(replica, now)
        self._finish(now)

    def _at(self, now: float, happen: Callable[..., None], what: Any) -> None:
        """Put an event into the queue: at the time `now`, `happen(now, what)` is called. Events of one time keep their
        order.
        """
        heappush(self._events, (now, next(self._numbers), happen, what))

    def _route(self, now: float, index: int) -> None:
        """Give request `index` of the trace to the replica that the router chooses, and schedule a step if that replica
        is idle. The request joins the backlog if no replica takes requests.
        """
        if not self._known.num_open:
            self._backlog.append(index)
            return
        request, tokens = request_of(self.trace, index, self._config.max_model_len)
        hashes = request.extend_page_hashes(request.prompt_token_ids, self._config.block_size)
        begun = time.perf_counter()
        replica = self._replicas[self._choose(list(map(short_digest, hashes)), request.request_id, self._known)]
        self._choices.append(time.perf_counter() - begun)
        self._measure(replica, now)
        replica.assigned[index] = request
        self._known.set_queue(replica.name, len(replica.assigned))
        replica.inbox.append((request, tokens))
        if not replica.is_scheduled:
            replica.is_scheduled = True
            clock = replica.simulated.runner.time
            clock.now = max(clock.now, now)
            self._at(clock.now, self._step, replica)

    def _step(self, now: float, replica: _Replica) -> None:
        """Note what the replica's last step has ended, and run the next one, as far as its results are there.

        First come the ends of the last step and the requests in the inbox, of which refused ones end here. A drained
        replica without requests ends. Schedules the next step and, after changes of the cache, their publication.
        """
        if not replica.alive:
            return
        simulated = replica.simulated
        for request in replica.ended:
            self._ended(now, replica, request)
        replica.ended.clear()
        for request, tokens in replica.inbox:
            if (refused := simulated.queue(request, tokens)) is not None:
                self.outcome.refused.append(refused)
                self._gone(now, replica, int(request.request_id))
        replica.inbox.clear()
        if replica.draining and not replica.assigned:
            self._end(now, replica)
            return
        replica.is_scheduled = simulated.engine.has_unfinished
        if replica.is_scheduled:
            replica.ended += simulated.step().finished
            self._at(max(now, simulated.runner.time.now), self._step, replica)
        if replica.changes and not replica.publishes:
            replica.publishes = True
            self._at(now + self.options.publish_seconds, self._publish, replica)

    def _ended(self, now: float, replica: _Replica, request: Request) -> None:
        """Note the end of a request that got tokens, and its times, whose tokens the caller now has."""
        self._gone(now, replica, int(request.request_id))
        count = len(request.output_token_ids)
        assert request.first_token_time is not None
        self._lives.append((request.arrival_time, request.first_token_time, request.last_token_time, count))

    def _gone(self, now: float, replica: _Replica, index: int) -> None:
        """Take request `index` from a replica and from what the router knows of its queue, and count it as ended."""
        self._measure(replica, now)
        del replica.assigned[index]
        self._known.set_queue(replica.name, len(replica.assigned))
        self._count_end()

    def _count_end(self) -> None:
        """Count a request as ended; call progress(ended, requests) after every 256th."""
        self._num_ended += 1
        if self._num_ended % 256 == 0:
            self._progress(self._num_ended, len(self.trace.requests))

    def _measure(self, replica: _Replica, now: float) -> None:
        """Add the replica's requests times the seconds since the last call for its index to what `queued` is made
        of.
        """
        index = replica.index
        self._area[index] += len(replica.assigned) * (now - self._changed[index])
        self._changed[index] = now

    def _publish(self, now: float, replica: _Replica) -> None:
        """Give the router the changes of a replica's cache, the last one of each digest, and clear them; nothing for a
        dead replica.
        """
        if not replica.alive:
            return
        last = dict(replica.changes)
        self._known.learn(replica.name, [digest for digest, is_new in last.items() if is_new])
        self._known.forget(replica.name, [digest for digest, is_new in last.items() if not is_new])
        self.outcome.num_published += len(replica.changes)
        replica.changes.clear()
        replica.publishes = False

    def _one(self) -> _Replica | None:
        """Return a replica at random of those that take requests; None if there is none."""
        found = [each for each in self._replicas.values() if not each.draining]
        return found[self._rng.integers(len(found))] if found else None

    def _die(self, now: float, _: None) -> None:
        """End a replica at once: requests without output run elsewhere, those with output fail.

        It is chosen at random of those that take requests; without one nothing happens.
        """
        if (replica := self._one()) is None:
            return
        self._measure(replica, now)
        requests, replica.assigned = replica.assigned, {}
        self._end(now, replica)
        for index, request in requests.items():
            if request.first_token_time is not None and request.first_token_time <= now:
                self.outcome.failed += 1
                self._count_end()
            else:
                self.outcome.retried += 1
                self._route(now, index)

    def _drain(self, now: float, _: None) -> None:
        """Have a random replica take no more requests, if any takes some; it ends after its last one, at once if it has
        none.
        """
        if (replica := self._one()) is not None:
            replica.draining = True
            self._known.set_draining(replica.name, True)
            if not replica.assigned:
                self._end(now, replica)

    def _end(self, now: float, replica: _Replica) -> None:
        """Take a replica away from the router and count its work; another one takes its place after
        `restart_seconds`.
        """
        replica.alive = False
        self._known.remove(replica.name)
        self._replicas = {number: each for number, each in self._replicas.items() if each is not replica}
        self._count(replica, now)
        self._at(now + self.options.restart_seconds, self._start, replica.index)

    def _start(self, now: float, index: int) -> None:
        """Add a replica of this index with an empty cache, and route the backlog of requests that no replica took."""
        self._changed[index] = now
        self._add(index, now)
        waiting, self._backlog = self._backlog, []
        for request in waiting:
            self._route(now, request)

    def _count(self, replica: _Replica, now: float) -> None:
        """Add what a replica has done to the outcome."""
        self._measure(replica, now)
        outcome, engine = self.outcome, replica.simulated.engine
        outcome.busy[replica.index] += replica.simulated.runner.busy
        outcome.num_steps += engine.stats.num_steps
        outcome.num_output_tokens += engine.stats.num_generated_tokens
        for name in ("num_preemptions", "num_prefix_queries", "num_prefix_hits"):
            setattr(outcome, name, getattr(outcome, name) + getattr(engine.scheduler, name))

    def _finish(self, now: float) -> None:
        """Set the times, the mean queues and the median seconds of a choice in the outcome. now: when the last request
        ended.
        """
        outcome = self.outcome
        outcome.seconds = now - self.trace.requests[0].arrival
        outcome.router_seconds = float(np.median(self._choices))
        outcome.queued = self._area / outcome.seconds if outcome.seconds else self._area
        if self._lives:
            arrival, first, last, tokens = map(np.array, zip(*self._lives, strict=True))
            outcome.first_token, outcome.e2e = first - arrival, last - arrival
            outcome.mean_interval = (last - first) / np.maximum(1, tokens - 1)


def run_fleet(
    trace: Trace,
    options: FleetOptions,
    router: str,
    config: ResolvedConfig,
    packer: Packer,
    num_pages: int,
    windows: tuple[int | None, ...],
    costs: Costs,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FleetOutcome:
    """Run a trace on a fleet to its end. router: a name of ROUTERS; all others as of `run_trace`.

    Raises ConfigError as `check_simulated`. RuntimeError if requests wait forever, as `SimulatedEngine.step`.
    """
    check_simulated(config)
    outcome, begun = FleetOutcome(trace, options, router), time.process_time()
    fleet = _Fleet(outcome, lambda: SimulatedEngine(config, packer, num_pages, windows, costs), config, progress)
    fleet.run()
    outcome.cpu_seconds = time.process_time() - begun
    return outcome
