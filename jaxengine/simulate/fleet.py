"""Runs a trace on a fleet: replicas of the engine's loop, each with its own device and clock, behind a router.

A queue of events in order of time has arrivals, the next step of each replica with requests, publications of replicas'
caches, deaths and drains.
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

_DIGEST_BYTES = 32  # length of a page's key in the first cache group; keys of other groups are longer
# Function (short digests of the request's pages, key of the request, index of replicas) -> number of a replica.
Router = Callable[[Sequence[int], str, Replicas], int]


@dataclass(frozen=True)
class FleetOptions:
    """Options of a fleet, in addition to those of its replicas' engines.

    Attributes:
      num_replicas: replicas at the beginning, and again after each death and drain.
      deaths: number of replicas that end at once at random moments of the trace.
      drains: number of replicas that, from random moments of the trace on, take no more requests and end after their
        last one.
      restart_seconds: from the end of a replica until another one, with an empty cache, takes its place.
      publish_seconds: delay after which the router knows of a change of a replica's prefix cache.
      seed: seed of the random moments and replicas.
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
      trace, options, router: what was run; the router by its name.
      first_token, mean_interval, e2e: seconds as in `Outcome`, one for each request that ended, in order of their ends.
      seconds: from the first arrival to the last end.
      failed: number of requests whose replica died after their first token.
      retried: number of requests whose replica died before their first token, and which ran on another one.
      refused: messages of requests that engines refused.
      queued: f64[num_replicas], mean over time of the requests of each replica and its successors.
      busy: f64[num_replicas], seconds in which the devices of each replica and its successors computed.
      num_output_tokens, num_steps, num_preemptions, num_prefix_queries, num_prefix_hits: totals over all replicas; the
        last two in tokens, as in `Outcome`.
      num_published: number of page digests that replicas published as new or gone.
      router_seconds: median real time of a choice of the router on this machine.
      cpu_seconds: CPU time of the simulation on this machine.
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
    """Return a router that chooses the replicas in turn."""
    return _after_the_last(Replicas.in_turn)


def least_load() -> Router:
    """Return a router that chooses a replica with the fewest requests; among equals, the first one after its last
    choice.
    """
    return _after_the_last(Replicas.least_loaded)


def _after_the_last(choose: Callable[[Replicas, int], int]) -> Router:
    """Return a router that calls `choose(replicas, last)`, where last is the router's previous choice, -1 at first."""
    last = -1

    def router(digests: Any, key: Any, replicas: Replicas) -> int:
        """Choose a replica, store the choice for the next call, and return it. digests, key: not used."""
        nonlocal last
        last = choose(replicas, last)
        return last

    return router


def prefix() -> Router:
    """Return the router of a real server (`jaxengine.server.base.routing`)."""
    return lambda digests, key, replicas: replicas.choose(digests, None, None, key=key)


ROUTERS: dict[str, Callable[[], Router]] = {
    "round_robin": round_robin,
    "least_load": least_load,
    "prefix": prefix,
}


class _Replica:
    """Engine in the fleet. It listens to changes of the engine's prefix cache.

    Attributes:
      index, name: its index in the fleet, as a number and as a text. Its successor has the same.
      alive, draining: whether it has not ended, and whether it takes no more requests.
      is_scheduled: whether its next step is in the queue of events.
      publishes: whether a publication is in the queue of events.
      assigned: requests routed to it whose end the router has not seen, by their number in the trace.
      inbox: requests, with their tokens, that have arrived since its current step began.
      ended: requests that end with its current step.
      changes: (page digest, whether it is new) of unpublished changes, in order.
    """

    def __init__(self, index: int, engine: SimulatedEngine, start: float, fleet: Replicas):
        """Set the engine's clock to `start`, and listen to the page pools of all its data-parallel replicas. fleet: the
        router's index of replicas.
        """
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
        """Append a change: the pool now caches the page with this digest. Keys of other cache groups, which are longer,
        are ignored.
        """
        if len(digest) == _DIGEST_BYTES:
            self.changes.append((short_digest(digest), True))

    def dropped(self, digest: bytes) -> None:
        """Append a change: the pool no longer caches the page with this digest. A longer key is ignored."""
        self.evicted([digest], [])

    def evicted(self, digests: Sequence[bytes], pages: Sequence[int]) -> None:
        """Append changes: the pool no longer caches the pages with these digests. Longer keys are ignored; pages is not
        used.
        """
        self.changes += [(short_digest(digest), False) for digest in digests if len(digest) == _DIGEST_BYTES]

    def forgotten(self) -> None:
        """Replace all unpublished changes because the pool has dropped its whole cache: the router must forget every
        digest that it knows of this replica.
        """
        self.changes = [(digest, False) for digest in self._fleet.known(self.name)]


class _Fleet:
    """Simulation of a fleet with its replicas and its events. It fills in an outcome."""

    def __init__(
        self,
        outcome: FleetOutcome,
        make: Callable[[], SimulatedEngine],
        config: ResolvedConfig,
        progress: Callable[[int, int], None],
    ):
        """Start options.num_replicas replicas at time 0.

        outcome: outcome to fill; it has the trace, the options and the name of the router. make: function that creates
        an engine of the fleet. progress(ended, requests): called after every 256th end.
        """
        self.outcome, self.trace, self.options = outcome, outcome.trace, outcome.options
        self._make, self._config, self._progress = make, config, progress
        self._choose, self._rng = ROUTERS[outcome.router](), np.random.default_rng(self.options.seed)
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._numbers = count()
        # The router's index of replicas, and the replicas by their number in it.
        self._known, self._replicas = Replicas(), dict[int, _Replica]()
        self._backlog: list[int] = []
        self._lives: list[tuple[float, float, float, int]] = []
        self._num_ended, self._choices = 0, array("d")
        # By a replica's index: the integral of its requests over time, and the time up to which it is computed.
        self._area, self._changed = np.zeros((2, self.options.num_replicas))
        outcome.busy = np.zeros(self.options.num_replicas)
        for index in range(self.options.num_replicas):
            self._add(index, 0.0)

    def _add(self, index: int, now: float) -> None:
        """Start a replica with this index, an empty cache and its clock at `now`, and add it to the router's index."""
        replica = _Replica(index, self._make(), now, self._known)
        self._replicas[self._known.add(replica.name)] = replica

    def run(self) -> None:
        """Run all events in order of time until each request has ended, failed or been refused; then fill in the
        outcome.

        Must be called once. Raises RuntimeError if requests wait forever.
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
        """Put an event into the queue: `happen(now, what)` is to be called at the time `now`. Events with the same time
        run in the order in which they were added.
        """
        heappush(self._events, (now, next(self._numbers), happen, what))

    def _route(self, now: float, index: int) -> None:
        """Route request `index` of the trace: put it into the inbox of the replica that the router chooses, and
        schedule a step if that replica is idle. Measures the real time of the choice. If no replica takes requests, the
        request is appended to the backlog.
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
        """Finish a replica's previous step and run its next one.

        First the requests that ended with the previous step leave, then the requests in the inbox enter the engine, or
        leave if it refuses them. A draining replica without requests ends here. Otherwise runs a step if the engine has
        requests, and schedules the next call at its end. Schedules the publication of cache changes if there are any.
        Does nothing for a dead replica.
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
        """Remove a finished request, which got at least one token, from its replica at time `now`, and record its times
        and its number of output tokens.
        """
        self._gone(now, replica, int(request.request_id))
        count = len(request.output_token_ids)
        assert request.first_token_time is not None
        self._lives.append((request.arrival_time, request.first_token_time, request.last_token_time, count))

    def _gone(self, now: float, replica: _Replica, index: int) -> None:
        """Remove request `index` from its replica, update the router's queue length, and count the request as ended."""
        self._measure(replica, now)
        del replica.assigned[index]
        self._known.set_queue(replica.name, len(replica.assigned))
        self._count_end()

    def _count_end(self) -> None:
        """Count one request as ended, and call progress(ended, requests) after every 256th."""
        self._num_ended += 1
        if self._num_ended % 256 == 0:
            self._progress(self._num_ended, len(self.trace.requests))

    def _measure(self, replica: _Replica, now: float) -> None:
        """Add the replica's number of requests times the seconds since the last call for its index to the integral from
        which `queued` is computed.
        """
        index = replica.index
        self._area[index] += len(replica.assigned) * (now - self._changed[index])
        self._changed[index] = now

    def _publish(self, now: float, replica: _Replica) -> None:
        """Apply the unpublished changes of a replica's cache to the router's index, only the last change of each
        digest, then clear them. Adds their number to the outcome. Does nothing for a dead replica.
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
        """Return a random replica among those that take requests; None if there is none."""
        found = [each for each in self._replicas.values() if not each.draining]
        return found[self._rng.integers(len(found))] if found else None

    def _die(self, now: float, _: None) -> None:
        """End a random replica, among those that take requests, at once. Its requests that have output fail, and the
        others are routed again. Does nothing if no replica takes requests.
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
        """Make a random replica, among those that take requests, take no more of them. It ends after its last request,
        or at once if it has none. Does nothing if no replica takes requests.
        """
        if (replica := self._one()) is not None:
            replica.draining = True
            self._known.set_draining(replica.name, True)
            if not replica.assigned:
                self._end(now, replica)

    def _end(self, now: float, replica: _Replica) -> None:
        """Remove a replica from the router's index and add its counts to the outcome. Schedules the start of its
        successor after `restart_seconds`.
        """
        replica.alive = False
        self._known.remove(replica.name)
        self._replicas = {number: each for number, each in self._replicas.items() if each is not replica}
        self._count(replica, now)
        self._at(now + self.options.restart_seconds, self._start, replica.index)

    def _start(self, now: float, index: int) -> None:
        """Add a replica with this index and an empty cache, and route all requests of the backlog."""
        self._changed[index] = now
        self._add(index, now)
        waiting, self._backlog = self._backlog, []
        for request in waiting:
            self._route(now, request)

    def _count(self, replica: _Replica, now: float) -> None:
        """Add a replica's device time, steps, tokens, preemptions, prefix-cache counts and, with `_measure`, its
        requests until `now` to the outcome.
        """
        self._measure(replica, now)
        outcome, engine = self.outcome, replica.simulated.engine
        outcome.busy[replica.index] += replica.simulated.runner.busy
        outcome.num_steps += engine.stats.num_steps
        outcome.num_output_tokens += engine.stats.num_generated_tokens
        for name in ("num_preemptions", "num_prefix_queries", "num_prefix_hits"):
            setattr(outcome, name, getattr(outcome, name) + getattr(engine.scheduler, name))

    def _finish(self, now: float) -> None:
        """Set the outcome's duration, times of requests, mean queue lengths and median time of a choice.

        now: time at which the last request ended. The times of requests stay empty if none ended.
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
    """Run a trace on a fleet until all requests have ended, and return the outcome.

    router: a name in ROUTERS. config, packer, num_pages, windows: those of each replica's engine. costs: costs of
    steps. progress(ended, requests): called after every 256th end. Raises ConfigError for a config that
    `check_simulated` refuses, RuntimeError if requests wait forever.
    """
    check_simulated(config)
    outcome, begun = FleetOutcome(trace, options, router), time.process_time()
    fleet = _Fleet(outcome, lambda: SimulatedEngine(config, packer, num_pages, windows, costs), config, progress)
    fleet.run()
    outcome.cpu_seconds = time.process_time() - begun
    return outcome
