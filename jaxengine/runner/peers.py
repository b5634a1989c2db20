"""The other processes of an engine, as a ModelRunner sees them. What runs them is jaxengine/cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

_T = TypeVar("_T")


class Peers:
    """The other processes of an engine, as its ModelRunner sees them; this class is for an engine without any."""

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
