"""Process that stores responses for several API processes, so that they outlive the one that generated them."""

from __future__ import annotations

import asyncio

from jaxengine.server.base.options import MIB, ServerConfig
from jaxengine.server.processes.child import Child, alive_seconds
from jaxengine.server.processes.memory import limit_memory, return_large_blocks
from jaxengine.server.stored.link import StoreServer
from jaxengine.server.stored.records import StoreBounds
from jaxengine.server.stored.store import ResponseStore

# Memory for all else than responses and what is being sent.
_MORE_BYTES = 256 * MIB


def memory_limit(bounds: StoreBounds, num_clients: int, max_request_bytes: int) -> int:
    """Return an upper bound in bytes of the memory that the store needs: 2 * num_bytes + 4 * num_clients *
    (conversation_bytes + 2 * max_request_bytes) + 256 MiB. These are its responses and, for each of its clients, the
    API processes, the largest message in each direction, encoded and decoded.
    """
    message = bounds.conversation_bytes + 2 * max_request_bytes
    return 2 * bounds.num_bytes + 4 * num_clients * message + _MORE_BYTES


async def serve(child: Child) -> None:
    """Serve the store of responses at the job's store_path, a Unix socket, until the supervisor orders the process to
    stop. Limits the process's memory to `memory_limit`. Reports "ready" to the supervisor once it listens, then "alive"
    at the interval that `alive_seconds` returns. Raises OSError if it cannot listen.
    """
    config = ServerConfig(**child.job["server"])
    bounds = StoreBounds(**config.store_bounds())
    await asyncio.start_unix_server(StoreServer(ResponseStore(bounds)).serve, child.job["store_path"])
    stop = child.stopping()
    return_large_blocks()
    limit_memory(memory_limit(bounds, config.api_server_count, config.max_request_bytes))
    child.tell("ready")
    seconds = alive_seconds(config.api_hang_timeout)
    while not stop.is_set():
        child.tell("alive")
        try:
            await asyncio.wait_for(stop.wait(), seconds)
        except TimeoutError:
            continue


def main(child: Child) -> None:
    """Run the store's process until the order to stop, then exit with status 0. The process also ends when the
    supervisor does.
    """
    child.end_with_parent()
    asyncio.run(serve(child))
    child.leave(0)
