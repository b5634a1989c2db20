"""How many connections a process may have, so that it never runs out of file descriptors."""

from __future__ import annotations

import resource

from jaxengine.server.options import ServerConfig

_MOST_CONNECTIONS = 10_000
# Files, pipes, the engine's socket.
_SPARE = 256


def max_connections(config: ServerConfig) -> int:
    """How many a process may have, of each of HTTP and gRPC, with the open files that the system allows it."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = _MOST_CONNECTIONS if allowed == resource.RLIM_INFINITY else max(1, (allowed - _SPARE) // 2)
    return min(config.max_connections or _MOST_CONNECTIONS, room)


def raise_descriptor_limit() -> None:
    """Lets this process open as many files as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * _MOST_CONNECTIONS + _SPARE
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
