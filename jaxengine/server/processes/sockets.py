"""Ports of a server, bound once for all of its processes."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import stat

from jaxengine.config.engine_config import ConfigError

_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens on a port of `host`, a name or an address. Port 0 takes a free one. Raises
    ConfigError, naming host or port, if the host is not an address of this machine or the port cannot be bound.
    """
    made = _bind("port", host, port)
    made.listen(_BACKLOG)
    return made


def listen_at(path: str) -> socket.socket:
    """Return a Unix domain socket that listens at a path. A socket there that no program listens at any more, as a
    killed server leaves it, is replaced. Raises ConfigError, naming uds, if the path cannot be bound.
    """
    made = socket.socket(socket.AF_UNIX)
    try:
        if not path or "\0" in path:  # Linux would take a free name, or the beginning
            raise ValueError("no path of a file")
        if _is_left_over(path):
            os.unlink(path)
        made.bind(path)
    except (OSError, ValueError) as error:
        made.close()
        reason = getattr(error, "strerror", None) or str(error)
        advice = "name a file that does not exist, of at most 107 bytes, in a folder that may be written"
        raise ConfigError.because("uds", f"uds {path!r} cannot be bound ({reason})", advice) from None
    made.listen(_BACKLOG)
    return made


def _is_left_over(path: str) -> bool:
    """Whether a path is that of a Unix domain socket that no program listens at."""
    with socket.socket(socket.AF_UNIX) as trial:
        trial.setblocking(False)  # the program that listens may take no connections
        return trial.connect_ex(path) == errno.ECONNREFUSED and stat.S_ISSOCK(os.stat(path).st_mode)


def reserve_port(option: str, host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound to a port of `host` but does not listen. Other processes of this user may
    listen on the same port (SO_REUSEPORT). Port 0 takes a free one.

    Raises ConfigError, naming host or `option`, if the host is not an address of this machine, or if the port cannot be
    bound.
    """
    # First without SO_REUSEPORT, to detect that another program has the port.
    with contextlib.closing(_bind(option, host, port)) as alone:
        port = alone.getsockname()[1]
    return _bind(option, host, port, reuse=True)


def listen_too(option: str, host: str, port: int) -> socket.socket:
    """Return a new TCP socket that listens on a port which `reserve_port` has reserved. Several processes may listen on
    it at once (SO_REUSEPORT). Raises ConfigError, naming host or `option`, if the socket cannot be bound.
    """
    made = _bind(option, host, port, reuse=True)
    made.listen(_BACKLOG)
    return made


def cut_unread(listener: socket.socket, seconds: float) -> None:
    """Make the system drop connections accepted by `listener` whose clients acknowledge no sent data for `seconds`
    (TCP_USER_TIMEOUT, rounded up to milliseconds).

    A server can only close such a connection, and closing waits for the client too. Does nothing for Unix domain
    sockets, and on systems without this socket option (all but Linux).
    """
    if hasattr(socket, "TCP_USER_TIMEOUT") and listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(seconds * 1000))


def _way_to_a_port(option: str, host: str, error: OSError) -> str:
    """Return advice, as a text, for a port that cannot be bound. It depends on the number of `error`: the port is in
    use, the port is reserved for the system (permission denied), or, for all other errors, `host` is not an address of
    this machine. option: name of the port's option, which the text shows as a flag.
    """
    flag = "--" + option.replace("_", "-")
    if error.errno == errno.EADDRINUSE:
        return f"stop the program that listens there, or give another {flag}, 0 for any that is free"
    if error.errno == errno.EACCES:
        return f"ports below 1024 are the system's: give another {flag}"
    return f"give --host an address that this machine has; {host} is not one"


def _bind(option: str, host: str, port: int, *, reuse: bool = False) -> socket.socket:
    """Return a TCP socket that is bound to a port of `host` (0: a free port) and does not listen. It has SO_REUSEADDR,
    and SO_REUSEPORT if `reuse`. Raises ConfigError that names "host" if that is not an address, or `option`, the name
    of the port's option, if the port cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        problem = f"host {host!r} is not an address of this machine ({error})"
        advice = "give 127.0.0.1 for this machine only, or 0.0.0.0 for all of its addresses"
        raise ConfigError.because("host", problem, advice) from None
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        problem = f"{option} {port} of {host} cannot be bound ({error.strerror})"
        raise ConfigError.because(option, problem, _way_to_a_port(option, host, error)) from None
    return made
