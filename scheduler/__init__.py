"""Which tokens run next: requests, pages, prefix cache, policy and packing. numpy only; no device, no text."""

from __future__ import annotations

from typing import Any

from models._names import explain_imports, missing

explain_imports()


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
