"""Execution of host 0's orders (jaxengine.cluster.orders) on a worker: new weights, sleep, parts of weights."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.cluster.channel import ClusterError, Message
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.peers import NO_ANSWER
from jaxengine.runner.weights import sleep
from jaxengine.runner.weights.process_weights import bytes_of_part
from jaxengine.runner.weights.weight_names import WeightUpdateError
from jaxengine.runner.weights.weight_update import NewWeights, ReadOptions, read_here

# Limits of an answer, which is part of a message's header: characters of a text, number of faulty tensors, and bytes of
# their names and texts together.
_MAX_TEXT, _MAX_FAULTS, _MAX_FAULT_BYTES = 4000, 200, 512 << 10
# Functions of every process that give up memory and take it again.
_SLEEP = {
    "release_weights": sleep.release_weights,
    "restore_weights": sleep.restore_weights,
    "release_pools": sleep.release_pools,
    "allocate_pools": sleep.allocate_pools,
}


class OrderTaker:
    """Executor of host 0's orders on a worker; it also sends the answers.

    `take` finds the method for an order by its name. The methods take the order's number and arrays, and its arguments
    by name.
    """

    def __init__(self, runner: ModelRunner, send: Callable[..., None]):
        """Start without orders. runner: this process's part of the engine. send: sends a message to host 0."""
        self._runner, self._send = runner, send
        self._read: dict[int, _Reading] = {}
        self._part: np.ndarray | None = None  # bytes of the part of a weight that host 0 fetches
        self._does: Mapping[str, Callable[..., Any]] = {
            "read_weights": self._read_weights,
            "take_tensor": self._take_tensor,
            "end_tensors": self._end_tensors,
            "put_weights": self._put_weights,
            "forget_weights": self._forget_weights,
            "part_of_weight": self._part_of_weight,
            **{name: self._sleeper(function) for name, function in _SLEEP.items()},
        }

    def take(self, message: Message) -> None:
        """Execute the order in `message` by the method of its name. For some orders a thread sends the answer after the
        return.

        Raises ClusterError for an unknown order, and whatever the method raises.
        """
        name = message.fields["name"]
        if name not in self._does:
            raise ClusterError(f"host 0 gave the order {name[:40]!r}; there are: {', '.join(self._does)}")
        self._does[name](message.fields["number"], message.arrays, **message.fields["arguments"])

    def _answer(self, number: int, content: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Send the answer to an order; send nothing if the number says that none is expected. content: JSON values."""
        if number != NO_ANSWER:
            self._send("answer", arrays, number=number, content=dict(content))

    def _sleeper(self, function: Callable[..., Any]) -> Callable[..., None]:
        """Return the method for an order that calls `function` with this runner and answers with its result.

        The method answers with a RuntimeError or MemoryError of the function; other errors are raised.
        """

        def do(number: int, arrays: Sequence[np.ndarray], **arguments: Any) -> None:
            """Call the function and answer with its result, or with its RuntimeError or MemoryError."""
            try:
                self._answer(number, {"result": function(self._runner, **arguments)})
            except (RuntimeError, MemoryError) as error:
                self._answer(number, _fault(error))

        return do

    def _part_of_weight(self, number: int, arrays: Any, *, first: int, count: int, **which: int) -> None:
        """Answer with some bytes of a part of a weight, u8[n], or without an array if another process sends that part.

        Host 0 requests one part at a time, from its first byte on; the part is kept until its last byte is sent. first,
        count: offset of the first byte and number of bytes. which: stage, index and part, for
        `jaxengine.runner.weights.process_weights.bytes_of_part`, whose errors are raised.
        """
        if first == 0:
            self._part = bytes_of_part(self._runner, **which)
        found = [] if self._part is None else [self._part[first : first + count]]
        if self._part is not None and first + count >= len(self._part):
            self._part = None
        self._answer(number, {}, found)

    def _read_weights(self, number: int, arrays: Any, *, key: int, path: str | None, **options: Any) -> None:
        """Start to read new weights on a thread, under a key.

        path: path of a folder of weights; the order is answered when it has been read. None if host 0 sends tensors;
        the order is then answered at once. options: fields of ReadOptions.
        """
        report = None if path is None else lambda content: self._answer(number, content)
        self._read[key] = _Reading(self._runner, path, options, self._answer, report)
        if path is None:
            self._answer(number, {})

    def _take_tensor(self, number: int, arrays: Any, *, key: int, **about: Any) -> None:
        """Pass a piece of a tensor, arrays[0], to the reading under `key`, which answers. Raises KeyError if there is
        none.

        about: see `_Reading.pieces`.
        """
        self._read[key].pieces.put((number, arrays[0], about))

    def _end_tensors(self, number: int, arrays: Any, *, key: int) -> None:
        """Mark the end of the tensors of the reading under `key`, which then answers with the outcome. Raises KeyError
        if there is none.
        """
        self._read[key].pieces.put(lambda content: self._answer(number, content))

    def _put_weights(self, number: int, arrays: Any, *, key: int) -> None:
        """Switch to the weights of the reading under `key`, which must be complete, and remove the reading.

        The order is not answered: an error ends the worker.
        """
        new = self._read.pop(key).new
        assert new is not None, "host 0 switches once all processes have read their weights"
        new.put()

    def _forget_weights(self, number: int, arrays: Any, *, key: int) -> None:
        """Stop and remove the reading under `key` with its weights, if there is one, and answer in either case."""
        if (read := self._read.pop(key, None)) is not None:
            read.give_up()
        self._answer(number, {})


class _Reading:
    """New weights that a thread reads, or has read.

    Attributes:
      pieces: queue of the pieces of tensors that host 0 sends: (number of the order, bytes u8[n], dict). The dict has
        the tensor's name, dtype, shape and num_bytes, and the index of the piece's first byte. After the last piece
        comes the function that sends the outcome of the reading, or None if it was given up.
      new: the weights, once all have been read; None before.
    """

    def __init__(
        self,
        runner: ModelRunner,
        path: str | None,
        options: Mapping[str, Any],
        answer: Callable[..., None],
        report: Callable[[Mapping[str, Any]], None] | None,
    ):
        """Start the thread.

        path: folder of the weights; None for tensors that are sent. options: fields of ReadOptions. answer: sends the
        answer to an order. report: sends the outcome of reading a folder; None for tensors.
        """
        self._runner, self._path, self._options, self._answer, self._report = runner, path, options, answer, report
        self.pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.new: NewWeights | None = None
        self._stopped = threading.Event()
        self._sent = self._messages()
        threading.Thread(target=self._run, name="jaxengine-weights", daemon=True).start()

    def give_up(self) -> None:
        """Stop the reading if it still runs. It then sends no outcome for tensors."""
        self._stopped.set()
        self.pieces.put(None)

    @jax.transfer_guard("allow")
    def _run(self) -> None:
        """Read the weights and report the outcome: {}, or the error and the faulty tensors. Runs on the reading's
        thread.

        All tensors that host 0 sends are taken and answered even after an error. Nothing is reported without a function
        to report to.
        """
        content: Mapping[str, Any] = {}
        try:
            params = self._tensors() if self._path is None else self._path
            self.new = read_here(self._runner, params, ReadOptions(**self._options), stop=self._stopped.is_set)
        except Exception as error:
            content = _fault(error)
        if self._path is None:
            for _ in self._sent:  # host 0 sends all tensors even after a fault, and waits for the answers
                pass
        if self._report is not None:
            self._report(content)

    def _messages(self) -> Iterator[tuple[np.ndarray, Mapping[str, Any]]]:
        """Yield the bytes and the dict of each piece that host 0 sends, and set `_report` after the last piece. Ends
        early if the reading is given up.

        A piece is answered when the next one is requested. Host 0 waits for that even if a tensor is faulty, so the
        iterator must be read to its end.
        """
        while self._report is None and not self._stopped.is_set():
            piece = self.pieces.get()
            if piece is None or callable(piece):
                self._report = piece
                return
            number, data, about = piece
            yield data, about
            self._answer(number, {})

    def _tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, array) of each tensor, assembled from its pieces. No reference to the array is kept.

        Raises WeightUpdateError if the reading is given up.
        """
        held = np.empty(0, np.uint8)
        for data, about in self._sent:
            if about["first"] == 0:
                held = np.empty(about["num_bytes"], np.uint8)
            held[about["first"] : about["first"] + len(data)] = data
            if about["first"] + len(data) == len(held):
                array, held = [held.view(jnp.dtype(about["dtype"])).reshape(about["shape"])], np.empty(0, np.uint8)
                yield about["name"], array.pop()
        if self._stopped.is_set():
            raise WeightUpdateError("the update was given up before all weights were read")


def _fault(error: BaseException) -> dict[str, Any]:
    """Return the content of an answer that reports an error: its text as "error", and the faulty tensors as "faults".

    Both are cut to the limits of an answer. "faults" has [name, text] of each faulty tensor of a WeightUpdateError; it
    is empty for other errors, whose text begins with their type.
    """
    faults = error.faults if isinstance(error, WeightUpdateError) else []
    shown = [[name[:_MAX_TEXT], text[:_MAX_TEXT]] for name, text in faults[:_MAX_FAULTS]]
    while len(json.dumps(shown)) > _MAX_FAULT_BYTES:
        shown = shown[: len(shown) // 2]
    kind = "" if isinstance(error, WeightUpdateError) else f"{type(error).__name__}: "
    return {"error": f"{kind}{error}"[:_MAX_TEXT], "faults": shown}
