"""Weight updates and sleep in an engine of several processes: orders from host 0 to the others, and the part that each
process does.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.weights.formats.arrays import ArraySource, fault_of, on_host
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.peers import NO_ANSWER, Answer, Orders
from jaxengine.runner.weights.weight_names import WeightUpdateError

MAX_PIECE_BYTES = 32 << 20  # most bytes of a tensor in one message; the channel takes twice as much
_DEFAULT_PIECE_BYTES = 16 << 20
Fault = tuple[str, str]  # a tensor's name, and what is wrong
_keys = itertools.count(1)


class Spread:
    """Orders of host 0 for new weights in all processes. Each process reads its parts; all put them in place between
    the same two steps, or drop them.

    Attributes:
      key: number by which the other processes identify these weights.
    """

    def __init__(self, runner: ModelRunner):
        """Take the orders of a runner's peers and a new key; sends nothing. runner: of host 0, with other processes."""
        self._orders: Orders = runner.peers.orders
        self._peers = runner.peers
        self.key = next(_keys)

    def begin(self, path: str | None, **options: Any) -> Callable[[], list[Answer]]:
        """Order the other processes to read their parts of the folder `path`, or, if it is None, to wait for tensors.
        Return a function that waits for their answers and returns them.

        options: fields of `jaxengine.runner.weights.weight_update.ReadOptions`. This method and the returned function
        raise ClusterError if a process is lost.
        """
        return self._orders.give("read_weights", key=self.key, path=path, **options)

    def sending(self, tensors: Iterator[tuple[str, Any]], chunk_bytes: int | None) -> Iterator[tuple[str, Any]]:
        """Yield the tensors unchanged, each after it has been sent to the other processes. An item that is not a
        numeric array is yielded without being sent. Raises ClusterError if a process is lost.

        chunk_bytes: largest size of a message in bytes, at most MAX_PIECE_BYTES; None for the default. A row of a
        tensor is always copied to host memory in one piece.
        """
        most = min(chunk_bytes or _DEFAULT_PIECE_BYTES, MAX_PIECE_BYTES)
        for name, array in tensors:
            held = [array]
            del array  # the consumer may hold the only reference
            if fault_of(held[0]) is None and _is_numeric(held[0].dtype):
                self._send(name, held[0], most)
            yield name, held.pop()

    def _send(self, name: str, array: Any, most: int) -> None:
        """Send one tensor to the other processes in pieces of at most `most` bytes, each after the previous one has
        been received. A tensor without elements is sent as one empty piece. Raises ClusterError if a process is lost.
        """
        source, shape = ArraySource({name: array}), tuple(array.shape)
        dtype = jnp.dtype(array.dtype)
        dtype = dtype if dtype.isnative else dtype.newbyteorder("=")  # a dtype's name does not include the byte order
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        about = {"key": self.key, "name": name, "dtype": dtype.name, "shape": list(shape)}
        about["num_bytes"], sent = math.prod(shape) * dtype.itemsize, 0
        step = max(1, most // max(1, row_bytes))
        for first in range(0, shape[0], step) if shape else (0,):
            rows = source.read(name, slice(first, first + step)) if shape else source.read(name)
            data = np.ascontiguousarray(rows, dtype).reshape(-1).view(np.uint8)
            for begin in range(0, len(data), most):
                piece = data[begin : begin + most]
                self._orders.give("take_tensor", [piece], first=sent, **about)()
                sent += len(piece)
        if not about["num_bytes"]:
            self._orders.give("take_tensor", [np.empty(0, np.uint8)], first=0, **about)()

    def end(self) -> Callable[[], list[Answer]]:
        """Report to the other processes that there are no more tensors. Return a function that waits for their answers
        and returns them. Both raise ClusterError if a process is lost.
        """
        return self._orders.give("end_tensors", key=self.key)

    def put(self, put: Callable[[], None]) -> None:
        """Replace the weights in all processes between the same two steps; `put` does so in this process."""
        arguments = {"key": self.key}
        self._peers.call("order", (), put, number=NO_ANSWER, name="put_weights", arguments=arguments)

    def forget_with(self, new: Any) -> None:
        """Order the other processes to drop their new weights once `new`, this process's part of the weights, is
        garbage-collected; not when this process ends.
        """
        weakref.finalize(new, self._orders.leave, "forget_weights", key=self.key).atexit = False

    def forget(self) -> None:
        """Order the other processes to drop their new weights now, and wait for that. Raises ClusterError if a process
        is lost.
        """
        self._orders.give("forget_weights", key=self.key)()


def raise_faults(answers: Sequence[Answer], of_given: Callable[[list[Fault]], list[Fault]] = list) -> None:
    """Raise WeightUpdateError with all faulty tensors that other processes report or, if there are none, with the first
    other error. Does nothing if no answer has an error. of_given: function of faults that returns them under the names
    that the caller knows.
    """
    failed = [each for each in answers if "error" in each.content]
    faults = [(name, f"{text} ({each.who})") for each in failed for name, text in each.content["faults"]]
    if faults:
        raise WeightUpdateError.of(of_given(faults))
    if failed:
        raise WeightUpdateError(f"the weights stay as they are: {failed[0].who}: {failed[0].content['error']}")


def everywhere(runner: ModelRunner, function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function of `jaxengine.runner.weights.sleep` in all processes, each with its own runner, and return this
    process's result.

    arguments: plain JSON. Raises the function's own errors in this process; RuntimeError, with the process's name, for
    an error in another process; ClusterError if a process is lost.
    """
    if runner.config.nnodes == 1:
        return function(runner, **arguments)
    orders: Orders = runner.peers.orders
    answers = orders.give(function.__name__, **arguments)
    try:
        result = runner.peers.run(lambda: function(runner, **arguments))
    finally:
        found = answers()
    for each in found:
        if "error" in each.content:
            raise RuntimeError(f"{each.who}: {each.content['error']}")
    return result


def whole(runner: ModelRunner, stage: int, index: int) -> np.ndarray:
    """Return a weight as a host array. Parts that only other processes hold are fetched from them.

    stage: number of the stage. index: index in the stage's list of arrays. Raises ClusterError if a process is lost.
    """
    array: Any = runner.stages[stage].params[index]
    if array.is_fully_addressable:
        return on_host(array)
    out = np.empty(array.shape, array.dtype)
    here = {_bounds(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    for part, (bounds, _) in enumerate(_owners(array)):
        slices = tuple(slice(begin, end) for begin, end in bounds)
        out[slices] = on_host(here[bounds]) if bounds in here else _fetched(runner, stage, index, part, out[slices])
    return out


def bytes_of_part(runner: ModelRunner, *, stage: int, index: int, part: int) -> np.ndarray | None:
    """Return the bytes u8[n] of a part of a weight, in C order, if this process is the one that sends this part; else
    None.

    stage: number of the stage. index: index in the stage's list of arrays. part: index of the part in `_owners`.
    """
    array: Any = runner.stages[stage].params[index]
    bounds, process = _owners(array)[part]
    if process != jax.process_index():
        return None
    data = next(shard.data for shard in array.addressable_shards if _bounds(shard.index, array.shape) == bounds)
    return np.ascontiguousarray(on_host(data)).reshape(-1).view(np.uint8)


def _fetched(runner: ModelRunner, stage: int, index: int, part: int, like: np.ndarray) -> np.ndarray:
    """Fetch a part of a weight from the process that owns it, in messages of at most MAX_PIECE_BYTES, and return it as
    an array of the shape and dtype of `like`.

    stage: number of the stage. index: index in the stage's list of arrays. part: index of the part in `_owners`. Raises
    ClusterError if a process is lost.
    """
    orders: Orders = runner.peers.orders
    data = np.empty(like.nbytes, np.uint8)
    for first in range(0, len(data), MAX_PIECE_BYTES):
        count = min(MAX_PIECE_BYTES, len(data) - first)
        wanted = {"stage": stage, "index": index, "part": part, "first": first, "count": count}
        (piece,) = [each for answer in orders.give("part_of_weight", (), **wanted)() for each in answer.arrays]
        data[first : first + count] = piece
    return data.view(like.dtype).reshape(like.shape)


def _owners(array: Any) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    """Return the distinct parts of an array, sorted so that all processes agree on the order: [begin, end) along each
    axis, and the lowest index of the processes that hold the part.
    """
    found: dict[tuple[tuple[int, int], ...], int] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        bounds = _bounds(index, array.shape)
        found[bounds] = min(found.get(bounds, device.process_index), device.process_index)
    return sorted(found.items())


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return [begin, end) along each axis of the part `index` of an array of `shape`."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _is_numeric(dtype: Any) -> bool:
    """Whether arrays of this dtype are numbers or bools, which can be sent as bytes."""
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
