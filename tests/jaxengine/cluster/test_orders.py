"""Orders beside steps: whatever becomes of one, host 0 gets its answer, or an error, and nothing is left behind."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.cluster import order_taker
from jaxengine.cluster.channel import ClusterError, Message, decode, encode
from jaxengine.cluster.host0 import Cluster
from jaxengine.cluster.order_taker import OrderTaker
from jaxengine.cluster.orders import OpenOrders
from jaxengine.runner.weights.process_weights import Spread
from jaxengine.runner.weights.weight_names import WeightUpdateError

SECONDS = 20


class Pair:
    """Host 0's orders and a worker that takes them, with every message as the connection would have it."""

    def __init__(self, runner: Any = None):
        self.failure: str | None = None
        self.orders = OpenOrders(self._announce, self._check, lambda function: function(), 1)
        self.taker = OrderTaker(runner, self._send)

    def _announce(self, op: str, arrays=(), **fields: Any) -> None:
        self.taker.take(decode(encode(Message(op, fields, arrays))))

    def _send(self, op: str, arrays=(), **fields: Any) -> None:
        self.orders.answered("the worker", decode(encode(Message(op, fields, arrays))))

    def _check(self) -> None:
        if self.failure is not None:
            raise ClusterError(self.failure)

    def ask(self, name: str, arrays=(), /, **arguments: Any) -> Any:
        """Content of the answer; fails if none comes."""
        timer = threading.Timer(SECONDS, setattr, (self, "failure", f"no answer to {name}"))
        timer.start()
        try:
            return self.orders.give(name, arrays, **arguments)()[0].content
        finally:
            timer.cancel()


def read_with(monkeypatch, read) -> Pair:
    """A pair whose worker reads new weights by `read`, and has the order to, for key 1."""
    monkeypatch.setattr(order_taker, "read_here", lambda runner, params, options, **_: read(params))
    pair = Pair()
    assert pair.ask("read_weights", key=1, path=None) == {}
    return pair


def piece(name: str, first: int = 0, num_bytes: int = 4) -> tuple[list[np.ndarray], dict[str, Any]]:
    place = {"name": name, "dtype": "float32", "shape": [num_bytes // 4], "num_bytes": num_bytes, "first": first}
    return [np.zeros(4, np.uint8)], {"key": 1, **place}


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("RESOURCE_EXHAUSTED")])
def test_a_worker_without_room_for_a_tensor_answers_for_it_and_for_all_that_follow(monkeypatch, error):
    def read(tensors):
        next(tensors)
        raise error

    pair = read_with(monkeypatch, read)
    for name, first in (("a", 0), ("b", 0), ("b", 4), ("c", 0)):
        arrays, place = piece(name, first, 8 if name == "b" else 4)
        assert pair.ask("take_tensor", arrays, **place) == {}
    assert pair.ask("end_tensors", key=1) == {"error": f"{type(error).__name__}: {error}", "faults": []}
    assert pair.ask("forget_weights", key=1) == {}


def test_tensors_are_put_together_and_a_forgotten_reading_stops(monkeypatch):
    found, ended = [], threading.Event()

    def read(tensors):
        try:
            found.extend((name, array.tolist()) for name, array in tensors)
        finally:
            ended.set()

    pair = read_with(monkeypatch, read)
    for first in (0, 4):
        arrays, place = piece("a", first, 8)
        pair.ask("take_tensor", [np.array([first], np.float32).view(np.uint8)], **place)
    assert pair.ask("forget_weights", key=1) == {} and ended.wait(SECONDS)
    assert found == [("a", [0.0, 4.0])]
    assert pair.ask("forget_weights", key=1) == {}  # again, as a finalizer may


def test_tensors_of_any_dtype_order_and_shape_arrive_as_they_are(monkeypatch):
    found: dict[str, np.ndarray] = {}
    pair = read_with(monkeypatch, lambda tensors: found.update(tensors))
    numbers = np.arange(12, dtype=np.float32).reshape(4, 3)
    sent = {
        "big-endian": numbers.astype(">f4"),
        "turned": numbers.T,
        "bfloat16": jnp.asarray(numbers, jnp.bfloat16),
        "float8": np.asarray(numbers, jnp.float8_e4m3fn),
        "a number": np.array(3, np.int64),
        "nothing": np.empty((2, 0), np.float16),
    }
    runner: Any = SimpleNamespace(peers=SimpleNamespace(orders=pair.orders))
    spread = Spread(runner)
    spread.key = 1
    assert [name for name, _ in spread.sending(iter(sent.items()), 8)] == [*sent]
    assert spread.end()()[0].content == {}
    for name, array in sent.items():
        assert found[name].dtype == jnp.dtype(array.dtype).newbyteorder("="), name
        assert np.array_equal(found[name], np.asarray(array)), name


def test_a_message_has_room_for_what_is_wrong_with_tensors(monkeypatch):
    faults = [("\N{GRINNING FACE}" * 9000, "x" * 9000)] * 500

    def read(tensors):
        raise WeightUpdateError.of(faults)

    pair = read_with(monkeypatch, read)
    told = pair.ask("end_tensors", key=1)
    assert told["faults"] and told["faults"][0][0] == faults[0][0][:4000]


def test_answers_that_nobody_waits_for_are_not_kept(monkeypatch):
    pair = read_with(monkeypatch, list)
    left = pair.orders.give("forget_weights", key=2)
    assert len(pair.orders._answers) == 1
    del left
    gc.collect()
    assert len(pair.orders._answers) == 0


@pytest.mark.parametrize(
    ("failure", "is_closing", "said"), [("node rank 1 is lost", False, "is lost"), (None, True, "has been shut down")]
)
def test_who_waits_hears_of_a_loss_and_of_the_end(failure, is_closing, said):
    cluster = object.__new__(Cluster)
    cluster.__dict__.update(_failure=failure, _closing=is_closing)
    orders = OpenOrders(lambda *arguments, **fields: None, cluster._check_open, lambda function: function(), 1)
    with pytest.raises(ClusterError, match=said):
        orders.give("forget_weights", key=1)()


def test_a_part_is_fetched_in_pieces_of_one_copy(monkeypatch):
    copies = []

    def bytes_of_part(runner, *, stage, index, part):
        copies.append(part)
        return np.arange(10, dtype=np.uint8) if part == 3 else None

    monkeypatch.setattr(order_taker, "bytes_of_part", bytes_of_part)
    pair = Pair()
    pieces = [
        pair.orders.give("part_of_weight", (), stage=0, index=0, part=3, first=first, count=4)()[0].arrays[0].tolist()
        for first in (0, 4, 8)
    ]
    assert sum(pieces, []) == [*range(10)] and copies == [3] and pair.taker._part is None
    (other,) = pair.orders.give("part_of_weight", (), stage=0, index=0, part=2, first=0, count=4)()
    assert len(other.arrays) == 0
