"""Execution of host 0's orders (jaxengine.cluster.orders) on a worker: new weights, sleep, parts of weights."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxengine.cluster.channel import ClusterError, Message
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.peers import NO_ANSWER
from jaxengine.runner.weights import sleep
from jaxengine.runner.weights.process_weights import bytes_of_part
from jaxengine.runner.weights.weight_names import WeightUpdateError
from jaxengine.runner.weights.weight_update import NewWeights, ReadOptions, read_here

# Limits of an answer, which is part of a message's header: characters of a text, faulty tensors, and bytes of their
# names and texts together.
_MAX_TEXT, _MAX_FAULTS, _MAX_FAULT_BYTES = 4000, 200, 512 << 10
# Functions of every process that give up memory and take it again.
_SLEEP = {
    "release_weights": sleep.release_weights,
    "restore_weights": sleep.restore_weights,
    "release_pools": sleep.release_pools,
    "allocate_pools": sleep.allocate_pools,
}


class OrderTaker:
    """Executor of host 0's orders on a worker; it sends the answers.

    The methods for orders, which `take` finds by name, take the order's number and arrays, and its arguments by name.
    """

    def __init__(self, runner: ModelRunner, send: Callable[..., None]):
        """Start without orders. runner: this process's part of the engine; send: sends a message to host 0."""
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
        """Execute the order that `message` gives, by the method of its name. An answer that a thread sends may follow
        after the return.

        Raises ClusterError for an unknown order, and whatever a switch to new weights raises.
        """
        name = message.fields["name"]
        if name not in self._does:
            raise ClusterError(f"host 0 gave the order {name[:40]!r}; there are: {', '.join(self._does)}")
        self._does[name](message.fields["number"], message.arrays, **message.fields["arguments"])

    def _answer(self, number: int, content: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Send the answer to an order, unless none is expected. content: JSON values."""
        if number != NO_ANSWER:
            self._send("answer", arrays, number=number, content=dict(content))

    def _sleeper(self, function: Callable[..., Any]) -> Callable[..., None]:
        """Return the method for an order that calls `function` of this runner and answers with its result or error.

        Errors other than RuntimeError and MemoryError are raised.
        """

        def do(number: int, arrays: Sequence[np.ndarray], **arguments: Any) -> None:
            """Call the function and send its result or its error."""
            try:
                self._answer(number, {"result": function(self._runner, **arguments)})
            except (RuntimeError, MemoryError) as error:
                self._answer(number, _fault(error))

        return do

    def _part_of_weight(self, number: int, arrays: Any, *, first: int, count: int, **which: int) -> None:
        """Answer with some bytes of a part of a weight, u8[n], or without an array if another process is the one to
        send it. Host 0 requests one part at a time, from its first byte on.

        number: of the order. first, count: the bytes; which: stage, index and part, as of
        `jaxengine.runner.weights.process_weights.bytes_of_part`. Raises as `bytes_of_part`.
        """
        if first == 0:
            self._part = bytes_of_part(self._runner, **which)
        found = [] if self._part is None else [self._part[first : first + count]]
        if self._part is not None and first + count >= len(self._part):
            self._part = None
        self._answer(number, {}, found)

    def _read_weights(self, number: int, arrays: Any, *, key: int, path: str | None, **options: Any) -> None:
        """Begin to read new weights under a key. path: of a folder, whose end is answered; None: host 0 sends tensors,
        and the beginning is answered. options: fields of ReadOptions.
        """
        report = None if path is None else lambda content: self._answer(number, content)
        self._read[key] = _Reading(self._runner, path, options, self._answer, report)
        if path is None:
            self._answer(number, {})

    def _take_tensor(self, number: int, arrays: Any, *, key: int, **about: Any) -> None:
        """Pass a piece of a tensor on to a reading, which answers. Raises KeyError if none has this key. about: see
        `_Reading.pieces`.
        """
        self._read[key].pieces.put((number, arrays[0], about))

    def _end_tensors(self, number: int, arrays: Any, *, key: int) -> None:
        """End the tensors of a reading, which answers with their faults. Raises KeyError if none has this key."""
        self._read[key].pieces.put(lambda content: self._answer(number, content))

    def _put_weights(self, number: int, arrays: Any, *, key: int) -> None:
        """Switch to the weights of the reading under `key`, which must be complete. Not answered: an error ends the
        worker.
        """
        new = self._read.pop(key).new
        assert new is not None, "host 0 switches once all processes have read their weights"
        new.put()

    def _forget_weights(self, number: int, arrays: Any, *, key: int) -> None:
        """Give up the reading of a key and its weights, and answer; answers also if there is none."""
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
        """Start the thread. path: of a folder, None for tensors that are sent. options: fields of ReadOptions. answer:
        answers an order. report: sends the outcome of reading a folder; None for tensors.
        """
        self._runner, self._path, self._options, self._answer, self._report = runner, path, options, answer, report
        self.pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.new: NewWeights | None = None
        self._stopped = threading.Event()
        self._sent = self._messages()
        threading.Thread(target=self._run, name="jaxengine-weights", daemon=True).start()

    def give_up(self) -> None:
        """End the reading, if it still runs, without an answer."""
        self._stopped.set()
        self.pieces.put(None)

    def _run(self) -> None:
        """Read the weights and report the outcome, on the reading's thread: {}, or the error and the faulty tensors. Of
        tensors that host 0 sends, all are taken and answered even after an error. Reports nothing if the reading was
        given up without a report.
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
        """Yield the bytes and the dict of each piece that host 0 sends, and set `_report` after the last.

        A piece is answered when the next one is taken; host 0 waits for that even if the tensor is faulty, so one
        iterator serves to the end.
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
        """Yield the name of each tensor, and the tensor assembled from its pieces, to which no reference is kept.

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
    """Return the content of an answer that reports an error: its text, and the faulty tensors, cut to the limits."""
    faults = error.faults if isinstance(error, WeightUpdateError) else []
    shown = [[name[:_MAX_TEXT], text[:_MAX_TEXT]] for name, text in faults[:_MAX_FAULTS]]
    while len(json.dumps(shown)) > _MAX_FAULT_BYTES:
        shown = shown[: len(shown) // 2]
    kind = "" if isinstance(error, WeightUpdateError) else f"{type(error).__name__}: "
    return {"error": f"{kind}{error}"[:_MAX_TEXT], "faults": shown}
