"""The other processes of an engine, as a ModelRunner sees them. What runs them is jaxengine/cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

_T = TypeVar("_T")
# Number of orders whose answers nobody waits for.
NO_ANSWER = 0


class Answer(NamedTuple):
    """Answer of another process to an order. who: names the process; content: plain JSON, with "error" and "faults" for
    an error."""

    who: str
    content: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = ()


class Orders(Protocol):
    """Orders to the other processes beside steps. Their names are those of jaxengine.cluster.order_taker.OrderTaker."""

    def give(self, name: str, arrays: Sequence[np.ndarray] = (), /, **arguments: Any) -> Callable[[], list[Answer]]:
        """Give an order; returns a function that waits for the answer of every process.

        arguments: plain JSON. Both raise ClusterError if a process is lost.
        """
        ...

    def leave(self, name: str, /, **arguments: Any) -> None:
        """Give an order soon, from any thread and whatever it holds; nobody waits for an answer."""
        ...


class Peers:
    """The other processes of an engine, as its ModelRunner sees them; this class is for an engine without any.

    Attributes:
      orders: for host 0 of several processes; None elsewhere.
    """

    orders: Any = None

    def agree(self, num_pages: int, programs: str) -> int:
        """The pages of the process with the least room. programs: what must be the same everywhere."""
        return num_pages

    def await_ready(self) -> None:
        """Returns when every process has compiled."""

    def call(self, op: str, arrays: Sequence[np.ndarray], function: Callable[[], _T], **fields: Any) -> _T:
        """Has the others execute what `op` names, with these arrays and fields; returns what `function`, which does it
        here, gives."""
        return function()

    def run(self, function: Callable[[], _T]) -> _T:
        """Calls what uses the devices, and may wait for the other processes; returns what it gives."""
        return function()


ALONE = Peers()
