"""A fork of an API process must not use its parent's connection to the engine."""

from __future__ import annotations

import asyncio

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.link.remote_engine import RemoteEngine
from tests.forked import in_fork


def test_a_forks_client_is_refused_and_leaves_the_connection(tmp_path):
    async def run():
        engine = RemoteEngine(f"ipc://{tmp_path}/engine", ServerConfig(), 0)
        for call in (engine._check_alive, engine._check):
            assert "belongs to process" in in_fork(call)
        engine._dead = None
        assert in_fork(lambda: engine.errored) == "True" and not engine.errored
        assert in_fork(engine.close) == "None"
        engine.close()

    asyncio.run(run())
