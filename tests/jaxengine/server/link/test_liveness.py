"""What an API process knows of the engine without asking: whether it stands still, whether a request has room."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.api.owner import Owner
from jaxengine.scheduler.base.errors import OverloadedError, RequestError
from jaxengine.server.link.messages import Load, Update
from jaxengine.server.link.queue_limits import QueueLimits
from jaxengine.server.link.remote_engine import _SILENT_SECONDS, _SILENT_STEPS, RemoteEngine


def remote(*, eager: bool = False) -> Any:
    engine: Any = object.__new__(RemoteEngine)
    engine.__dict__.update(
        _dead=None,
        _owner=Owner(has_devices=False),
        _draining=False,
        _welcomed=SimpleNamespace(done=lambda: True),
        inputs=SimpleNamespace(config=SimpleNamespace(enforce_eager=eager)),
        _heard=time.monotonic(),
        _longest_silence=0.0,
    )
    engine._update = lambda update: None
    return engine


async def test_an_engine_that_is_silent_is_not_healthy():
    engine = remote()
    await engine.check_health()
    engine._heard -= _SILENT_SECONDS + 1
    with pytest.raises(EngineDeadError, match="has not finished a step for 1[12] s"):
        await engine.check_health()
    engine._receive(Update(1, 0, Load()))
    await engine.check_health()
    # Steps that are long are given time for a few of them, until they are forgotten.
    engine._longest_silence = 2 * _SILENT_SECONDS / _SILENT_STEPS
    engine._heard = time.monotonic() - 1.5 * _SILENT_SECONDS
    await engine.check_health()
    for _ in range(1000):
        engine._receive(Update(1, 0, Load()))
    engine._heard -= 1.5 * _SILENT_SECONDS
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    engine = remote(eager=True)
    engine._heard -= 1000
    await engine.check_health()


async def test_a_process_that_did_not_listen_listens_first():
    engine = remote()
    engine._heard -= 100
    asyncio.get_running_loop().call_later(0.01, engine._receive, Update(1, 0, Load()))
    await engine.check_health()


def test_no_request_brings_more_than_the_queue_ever_holds():
    limits = QueueLimits.of(8, 10, 100)
    limits.check(Load(), 18, 10_000)
    with pytest.raises(RequestError, match="n is 19; allowed: 1 to 18") as caught:
        limits.check(Load(), 19, 10)
    assert caught.value.param == "n" and not isinstance(caught.value, OverloadedError)
    # Nobody waits, but not all of them find a place.
    with pytest.raises(OverloadedError):
        limits.check(Load(num_running=8), 11, 10)
    limits.check(Load(num_running=8), 10, 10)
    with pytest.raises(OverloadedError, match="prompt tokens"):
        limits.check(Load(8, 1, 95), 1, 10)
