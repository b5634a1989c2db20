"""The process that keeps responses for several API processes: where one of them ends, the others find what it kept."""

from __future__ import annotations

import asyncio
import faulthandler
from typing import Any

from jaxengine.server.options import ServerConfig
from jaxengine.server.processes.child import Child
from jaxengine.server.stored.link import StoreServer
from jaxengine.server.stored.store import ResponseStore

# The supervisor hears from the event loop at least this often, and so many times within api_hang_timeout.
_ALIVE_SECONDS, _ALIVE_TIMES = 1.0, 4


async def serve(child: Child) -> None:
    """Serves until the supervisor has it stop."""
    config = ServerConfig(**child.job["server"])
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def ordered(order: dict[str, Any]) -> None:
        if order["order"] == "explain":
            faulthandler.dump_traceback(all_threads=True)
        else:
            loop.call_soon_threadsafe(stop.set)  # there is no other order

    await asyncio.start_unix_server(StoreServer(ResponseStore()).serve, child.job["store_path"])
    child.follow(ordered)
    child.tell("ready")
    seconds = min(_ALIVE_SECONDS, config.api_hang_timeout / _ALIVE_TIMES) if config.api_hang_timeout else _ALIVE_SECONDS
    while not stop.is_set():
        child.tell("alive")
        try:
            await asyncio.wait_for(stop.wait(), seconds)
        except TimeoutError:
            continue


def main(child: Child) -> None:
    """The process."""
    child.end_with_parent()
    asyncio.run(serve(child))
    child.leave(0)
