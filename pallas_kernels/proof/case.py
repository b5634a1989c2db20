"""Case of a proof: a computation that calls the operation under test, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxengine.pallas_kernels.proof.calls import Call


class Case(NamedTuple):
    """Computation with the operation of a recorded call.

    Attributes:
      run: function of the inputs that looks the implementation up when it is traced: as a kernel, or in plain XLA
        within `registry.without_rows`.
      inputs: function from a mix and a random generator to `run`'s arguments, a tuple of pytrees of arrays.
      mixes: names of the kinds of inputs that there are, the one most likely to show a fault first.
    """

    run: Callable[..., Any]
    inputs: Callable[[str, np.random.Generator], tuple[Any, ...]]
    mixes: tuple[str, ...]


Maker = Callable[[Call], Case]
