"""Limit of a process's connections, chosen so that it never runs out of file descriptors."""

from __future__ import annotations

import resource

from jaxengine.server.base.options import ServerConfig

_MOST_CONNECTIONS = 10_000
# Descriptors that are reserved for files, pipes and the engine's socket.
_SPARE = 256


def max_connections(config: ServerConfig) -> int:
    """Return how many connections a process may have, over HTTP and over gRPC each: config.max_connections, or 10,000
    if that is None, but at most half of the process's open file limit less 256, and at least one.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = _MOST_CONNECTIONS if allowed == resource.RLIM_INFINITY else max(1, (allowed - _SPARE) // 2)
    return min(config.max_connections or _MOST_CONNECTIONS, room)


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit of open files to the number that 10,000 connections need, or to the hard limit if
    that is lower. A soft limit that is higher already stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * _MOST_CONNECTIONS + _SPARE
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
