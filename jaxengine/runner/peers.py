"""The engine's other processes as a ModelRunner sees them. jaxengine/cluster runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

_T = TypeVar("_T")
# Order number of orders that are not answered.
NO_ANSWER = 0


class Answer(NamedTuple):
    """Answer of another process to an order.

    Attributes:
      who: name of the process.
      content: plain JSON, with "error" and "faults" for an error.
      arrays: results of the order.
    """

    who: str
    content: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = ()


class Orders(Protocol):
    """Orders to the other processes, other than steps. Order names are those of
    jaxengine.cluster.order_taker.OrderTaker.
    """

    def give(self, name: str, arrays: Sequence[np.ndarray] = (), /, **arguments: Any) -> Callable[[], list[Answer]]:
        """Send an order to every other process; return a function that waits for their answers and returns them.

        name, arguments: name of the order and its plain JSON arguments. arrays: arrays to send with it. This method and
        the returned function raise ClusterError if a process is lost.
        """
        ...

    def leave(self, name: str, /, **arguments: Any) -> None:
        """Queue an order to be sent soon, from any thread and with any locks held; no answer is awaited."""
        ...


class Peers:
    """Interface of a ModelRunner to the engine's other processes. This base class is for an engine without any.

    Attributes:
      orders: for host 0 of several processes; None elsewhere.
    """

    orders: Any = None

    def agree(self, num_pages: int, programs: str) -> int:
        """Return the smallest num_pages of all processes, after waiting for all; without other processes, `num_pages`.

        num_pages: number of pages of this process. programs: digest that must be the same in all processes. Raises
        ClusterError if another process has a different digest or is lost.
        """
        return num_pages

    def await_ready(self) -> None:
        """Wait until every process has compiled; without other processes, return at once. Raises ClusterError if a
        process is lost.
        """

    def call(self, op: str, arrays: Sequence[np.ndarray], function: Callable[[], _T], **fields: Any) -> _T:
        """Make the other processes execute the operation `op` with these arrays and fields; return function(), which
        executes it here.
        """
        return function()

    def run(self, function: Callable[[], _T]) -> _T:
        """Return function(), which uses the devices and may wait for the other processes."""
        return function()


ALONE = Peers()
