"""What an operator's server may ask of weights that a thread still reads; no engine."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from jaxengine.engine.extensions.weights import weight_orders
from jaxengine.engine.extensions.weights import weights as weights_module
from jaxengine.engine.extensions.weights.idle_sleep import IdleSleep
from jaxengine.engine.extensions.weights.weight_orders import MAX_READS, WeightOrders
from jaxengine.engine.extensions.weights.weights import Weights
from jaxengine.runner.weights import weight_update
from jaxengine.runner.weights.weight_update import WeightUpdateError
from jaxengine.scheduler.base.errors import RequestError
from tests.tables import each_row


class Memory:
    """Stands for jaxengine.runner.weights.sleep: notes its calls, of which those in `failing` find no memory."""

    def __init__(self, *failing: str):
        self.calls, self.failing = list[str](), set(failing)

    def _call(self, name: str) -> bool:
        self.calls.append(name)
        if name in self.failing:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return True

    def release_weights(self, runner: Any, keep: bool) -> None:
        self._call(f"release {'and keep' if keep else 'and drop'}")

    def restore_weights(self, runner: Any) -> bool:
        return self._call("restore")

    def release_pools(self, runner: Any) -> None:
        self._call("release pools")

    def allocate_pools(self, runner: Any) -> None:
        self._call("allocate pools")


@each_row(
    ("failing", "later"),
    [
        (["restore"], ["release pools", "release and keep"]),
        (["allocate pools"], ["release pools", "release and keep"]),
        (["release and keep"], ["restore", "allocate pools"]),
        (["release and keep", "restore"], ["restore", "release pools", "release and keep"]),
    ],
)
def test_memory_that_is_not_to_be_had_is_given_back(monkeypatch, failing, later):
    """A wake that fails takes nothing, a sleep of its own that fails is undone, and both may be tried again."""
    weights = paused_weights()
    idle = IdleSleep(weights, seconds=1e-9)
    idle.attach(weights.loop)
    monkeypatch.setattr(weights_module, "sleep", memory := Memory(*failing))
    falls_asleep = "release and keep" not in failing
    idle.rest()
    if falls_asleep:
        with pytest.raises(RuntimeError):
            weights.rouse()
    assert memory.calls[-len(later) :] == later
    assert weights.dozes == bool(weights.asleep) == ("restore" in failing or falls_asleep)
    memory.failing.clear()
    weights.rouse()
    assert not weights.asleep and not weights.is_held and not weights.loop.scheduler.paused
    idle.rest()
    assert weights.dozes and not weights.is_paused


def test_a_sleep_of_its_own_becomes_the_operators(monkeypatch):
    """Without memory for a wake: level 2 drops the copies, level 1 has nothing to do."""
    for level, calls in ((1, ["release and keep"]), (2, ["release and drop"])):
        weights = paused_weights()
        monkeypatch.setattr(weights_module, "sleep", memory := Memory("restore", "allocate pools"))
        weights.doze()
        memory.calls.clear()
        weights.begin_sleep(level, "abort")
        assert WeightOrders(weights).fall_asleep(level) and memory.calls == calls
        assert weights.is_paused and not weights.dozes
        with pytest.raises(RequestError, match="sleeps without"):
            weights.resume()


def paused_weights(requests: list[Any] | None = None) -> Weights:
    """Make the weights of an engine without devices; `requests` are those that it has."""
    requests = requests or []
    weights, runner = Weights(), SimpleNamespace(config=SimpleNamespace(nnodes=1))
    scheduler: Any = SimpleNamespace(paused=False, requests=requests, extensions=[], num_unfinished=len(requests))
    scheduler.preempt_all = scheduler.reset_prefix_cache = lambda: None
    weights.attach(SimpleNamespace(runner=runner, scheduler=scheduler, in_flight=[]))  # type: ignore[arg-type]
    return weights


def test_pauses_of_several_end_one_by_one():
    """Requests go on when nobody's pause is left, in whatever order they end; nobody's ends another's."""
    for order in (("first", "second", None), (None, "second", "first"), ("second", None, "first")):
        weights = paused_weights()
        scheduler = weights.loop.scheduler
        weights.hold("first", "keep")
        assert not weights.is_paused and weights.settle("first")
        weights.pause("keep")
        weights.hold("second", "wait")
        assert weights.is_paused and weights.settle("first") and weights.settle("second") and weights.settle()
        for key in order:
            assert scheduler.paused and weights.is_held
            weights.resume() if key is None else weights.release(key)
            assert weights.is_paused == (None in order[order.index(key) + 1 :])
        assert not scheduler.paused and not weights.is_held
        with pytest.raises(RequestError, match="ended before it was complete"):
            weights.settle()


def test_a_pause_that_waits_and_is_given_up_leaves_the_others():
    """Requests that it waits for go on until then, and stop; no weights are switched meanwhile."""
    request = SimpleNamespace(arrival_index=0)
    weights = paused_weights([request])
    weights.hold("wait", "wait")
    weights.pause("keep")
    weights.hold("keep", "keep")
    assert not weights.loop.scheduler.paused and not any(weights.settle(key) for key in (None, "wait", "keep"))
    assert not weights.is_still
    weights.release("wait")
    assert weights.loop.scheduler.paused and weights.settle() and weights.settle("keep")


def test_weights_are_switched_once_they_are_read(monkeypatch):
    may_read = threading.Event()

    def read(runner, path, *, strict, chunk_bytes, target, stop):
        assert target == ("draft" if path == "0" else "model") and may_read.wait(60)
        return path

    monkeypatch.setattr(weight_orders, "read_weights", read)
    switched = SimpleNamespace(_asdict=lambda: {"version": 7})
    weights = paused_weights()
    weights.switch = lambda new, version, kv: switched  # type: ignore[assignment]
    orders = WeightOrders(weights)
    with pytest.raises(RequestError, match="target is 'both'; allowed: model, draft"):
        orders.read_weights("0", None, "keep", "drop", True, target="both")  # type: ignore[arg-type]
    first = orders.read_weights("0", None, "keep", "drop", True, target="draft")
    others = [orders.read_weights(str(number), None, "keep", "drop", True) for number in range(1, MAX_READS)]
    with pytest.raises(RequestError, match="still being read"):
        orders.switch_weights(first, None, "drop")
    with pytest.raises(RequestError, match="are being read or wait for their switch"):
        orders.read_weights("another", None, "keep", "drop", True)
    may_read.set()
    while not orders.weights_are_read(first):
        pass
    with pytest.raises(RequestError, match="pause"):
        orders.switch_weights(first, None, "drop")
    orders.hold_engine(first, "keep")
    assert orders.switch_weights(first, None, "drop") == {"version": 7} and not weights.is_held
    with pytest.raises(RequestError, match="there are no weights"):
        orders.switch_weights(first, None, "drop")
    for number in others:
        while not orders.weights_are_read(number):
            pass
        orders.forget_read_weights(number)
    orders.read_weights("another", None, "keep", "drop", True)


def test_reads_that_nobody_waits_for_end(monkeypatch):
    """Readings are asked to stop, and count until they have: each has memory of its own."""
    may_end = threading.Event()

    def read(runner, path, *, strict, chunk_bytes, target, stop):
        while not stop():
            pass
        assert may_end.wait(60)
        raise WeightUpdateError("given up")

    monkeypatch.setattr(weight_orders, "read_weights", read)
    weights = paused_weights()
    orders = WeightOrders(weights)
    begin = partial(orders.read_weights, "folder", None, "keep", "drop", True)
    first, second = begin(), begin()
    orders.hold_engine(second, "keep")
    orders.forget_read_weights(first)
    monkeypatch.setattr(weight_orders, "_LEASE_SECONDS", -1.0)  # the second one's caller is gone
    assert orders.expire() == float("inf") and not weights.is_held
    with pytest.raises(RequestError, match="are being read"):
        begin()
    may_end.set()
    for thread in orders._ending:
        thread.join()
    orders.forget_read_weights(begin())


def test_a_folder_is_not_read_on():
    source = weight_update._StoppableSource(SimpleNamespace(read=lambda *_: "read"), lambda: bool(asked))  # type: ignore
    asked: list[int] = []
    assert source.read("a") == "read"
    asked.append(1)
    with pytest.raises(WeightUpdateError, match="was stopped"):
        source.read("a")


def test_versions_have_64_bits():
    """Also those that are counted on: messages and answers have no room for others."""
    weights = paused_weights()
    for version in (0, -(2**63), 2**63 - 1, str(2**64), "ü", None):
        weights.check(version, "keep", "drop")
    wrong: tuple[Any, ...] = (2**63, -(2**63) - 1, 2**64 + 1, 10**5000, True, 1.0, "\ud800")
    for version in wrong:
        with pytest.raises(RequestError, match="version is .*; allowed: ") as error:
            weights.check(version, "keep", "drop")
        assert error.value.param == "version"
    weights.version = 2**63 - 1
    with pytest.raises(RequestError, match="counts on from 9223372036854775807"):
        weights.check(None, "keep", "drop")
