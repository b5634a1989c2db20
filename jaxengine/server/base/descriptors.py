"""Limit of a process's connections, chosen so that it never runs out of file descriptors."""

from __future__ import annotations

import resource

from jaxengine.server.base.options import ServerConfig

_CONNECTIONS = 10_000
# Descriptors that are reserved for files, pipes and the engine's socket.
_SPARE = 256


def max_connections(config: ServerConfig) -> int:
    """Return how many connections a process may have, over HTTP and over gRPC each: config.max_connections, or 10,000
    if that is None. If the process may open L files, the result is at most (L - 256) // 2, and at least 1.
    """
    wanted = config.max_connections or _CONNECTIONS
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if allowed == resource.RLIM_INFINITY else min(wanted, max(1, (allowed - _SPARE) // 2))


def raise_descriptor_limit(config: ServerConfig) -> None:
    """Raise this process's soft limit of open files to 2 * n + 256, which n connections over HTTP and n over gRPC need,
    or to the hard limit if that is lower. n is config.max_connections, or 10,000 if that is None. A soft limit that is
    higher already stays.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2 * (config.max_connections or _CONNECTIONS) + _SPARE
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
