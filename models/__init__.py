"""Model families in flax.nnx, their configurations and their checkpoint loaders.

Independent of requests, scheduling policies and text. Importing this package is cheap: of its own modules only
`_names`, which explains failed imports of another package called `models`.
"""

from __future__ import annotations

from typing import Any

from models._names import explain_imports, missing

explain_imports()


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
