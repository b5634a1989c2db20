"""The process that stores responses for several API processes, so that they outlive the one that made them."""

from __future__ import annotations

import asyncio

from jaxengine.server.options import ServerConfig
from jaxengine.server.processes.child import Child, alive_seconds
from jaxengine.server.stored.link import StoreServer
from jaxengine.server.stored.store import ResponseStore


async def serve(child: Child) -> None:
    """Serves until the supervisor's order to stop."""
    config = ServerConfig(**child.job["server"])
    await asyncio.start_unix_server(StoreServer(ResponseStore()).serve, child.job["store_path"])
    stop = child.stopping()
    child.tell("ready")
    seconds = alive_seconds(config.api_hang_timeout)
    while not stop.is_set():
        child.tell("alive")
        try:
            await asyncio.wait_for(stop.wait(), seconds)
        except TimeoutError:
            continue


def main(child: Child) -> None:
    """Runs the process."""
    child.end_with_parent()
    asyncio.run(serve(child))
    child.leave(0)
