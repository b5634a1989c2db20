"""Copies of pages on their way to the host."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxengine.engine.extensions.offload.page_stores import OffloadStats, PageStores, Tiers
from jaxengine.tiers.host import HostTier


def test_a_flush_returns_in_time_when_a_copy_takes_longer():
    arrived, block = threading.Event(), np.arange(8, dtype=np.uint8)

    def blocks() -> dict[bytes, np.ndarray]:
        assert arrived.wait(20)
        return {b"a": block}

    mover: Any = SimpleNamespace(save=lambda ranks: [SimpleNamespace(entries=ranks[0], blocks=blocks)])
    tiers = Tiers(HostTier(100), None)
    stores = PageStores(mover, tiers, OffloadStats(), threading.Event(), is_bounded=True)
    stores.send([[(b"a", 0)]], states=False)
    stores.flush(time.monotonic() + 0.01)
    assert stores.is_busy and b"a" not in tiers.host
    arrived.set()
    stores.flush(time.monotonic() + 20)
    assert not stores.is_busy and tiers.host.get(b"a") is block
    stores.shutdown()
