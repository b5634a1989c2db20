"""What an operator's server may ask of weights that a thread still reads; no engine."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from jaxengine.engine.extensions import weight_orders
from jaxengine.engine.extensions.weight_orders import MAX_READS, WeightOrders
from jaxengine.engine.extensions.weights import Weights
from jaxengine.runner.weight_update import WeightUpdateError, checksums, read_weights
from jaxengine.scheduler.errors import RequestError


def test_weights_are_switched_once_they_are_read(monkeypatch):
    may_read = threading.Event()

    def read(runner, path, *, strict):
        assert may_read.wait(10)
        return path

    monkeypatch.setattr(weight_orders, "read_weights", read)
    switched = SimpleNamespace(_asdict=lambda: {"version": 7})
    weights = SimpleNamespace(
        check=lambda *_: None, loop=SimpleNamespace(runner=None), switch=lambda new, version, kv: switched
    )
    orders = WeightOrders(weights)
    first, *others = (orders.read_weights(str(number), None, "keep", "drop", True) for number in range(MAX_READS))
    with pytest.raises(RequestError, match="still being read"):
        orders.switch_weights(first, None, "drop")
    with pytest.raises(RequestError, match="are being read or wait for their switch"):
        orders.read_weights("another", None, "keep", "drop", True)
    may_read.set()
    while not orders.weights_are_read(first):
        pass
    assert orders.switch_weights(first, None, "drop") == {"version": 7}
    with pytest.raises(RequestError, match="there are no weights"):
        orders.switch_weights(first, None, "drop")
    for number in others:
        orders.forget_read_weights(number)
    orders.read_weights("another", None, "keep", "drop", True)


def test_what_concerns_the_weights_of_several_processes_is_refused():
    """This process has a part of them, and would change that alone."""
    runner = SimpleNamespace(config=SimpleNamespace(nnodes=2), stages=[])
    weights = Weights()
    weights.loop = SimpleNamespace(runner=runner)  # type: ignore[assignment]
    weights.check_sleep(0, "abort")
    for level in (1, 2):
        with pytest.raises(RequestError, match="level is .*2 processes: 0") as error:
            weights.check_sleep(level, "abort")
        assert error.value.param == "level"
    with pytest.raises(RequestError, match="checksum"):
        checksums(runner)  # type: ignore[arg-type]
    with pytest.raises(WeightUpdateError, match="2 processes"):
        read_weights(runner, {})  # type: ignore[arg-type]
