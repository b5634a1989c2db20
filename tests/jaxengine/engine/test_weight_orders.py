"""What an operator's server may ask of weights that a thread still reads; no engine."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from jaxengine.engine.extensions import weight_orders
from jaxengine.engine.extensions.weight_orders import MAX_READS, WeightOrders
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
