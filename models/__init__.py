"""Model families in flax.nnx, their configurations and their checkpoint loaders.

Knows nothing of requests, scheduling policies or text. Importing this package imports nothing heavy: of its own only
`_names`, which answers those who meant another package `models`.
"""

from __future__ import annotations

from typing import Any

from models._names import explain_imports, missing

explain_imports()


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
