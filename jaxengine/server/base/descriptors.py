"""Limits of connections per process, so that it never runs out of file descriptors."""

from __future__ import annotations

import resource

from jaxengine.server.base.options import ServerConfig

_MOST_CONNECTIONS = 10_000
# Descriptors for files, pipes and the engine's socket.
_SPARE = 256


def max_connections(config: ServerConfig) -> int:
    """Return the limit of a process's connections, for HTTP and gRPC each: max_connections, None for 10,000, but no
    more than half of the open files that the system allows beyond 256, and at least one.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = _MOST_CONNECTIONS if allowed == resource.RLIM_INFINITY else max(1, (allowed - _SPARE) // 2)
    return min(config.max_connections or _MOST_CONNECTIONS, room)


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to the number that its connections need, as far as the system allows.
    A limit that is higher stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * _MOST_CONNECTIONS + _SPARE
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
