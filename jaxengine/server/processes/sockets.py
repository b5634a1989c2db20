"""The ports of a server, bound once for all of its processes."""

from __future__ import annotations

import contextlib
import errno
import math
import socket

from jaxengine.config.engine_config import ConfigError

_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens on a port of `host`, a name or an address; port 0 takes a free one. Raises
    ConfigError for an unusable host or port.
    """
    made = _bind("port", host, port)
    made.listen(_BACKLOG)
    return made


def reserve_port(option: str, host: str, port: int) -> socket.socket:
    """Return a bound socket that accepts nothing; processes of this user may listen on its port (SO_REUSEPORT).

    Port 0 takes a free one. Raises ConfigError as `listen` does, naming `option`, also where another program has the
    port.
    """
    # First without SO_REUSEPORT, to detect that another program has the port.
    with contextlib.closing(_bind(option, host, port)) as alone:
        port = alone.getsockname()[1]
    return _bind(option, host, port, reuse=True)


def listen_too(option: str, host: str, port: int) -> socket.socket:
    """Return a listening socket on a port that `reserve_port` holds, as several processes may have. Raises ConfigError
    as `listen` does, naming `option`.
    """
    made = _bind(option, host, port, reuse=True)
    made.listen(_BACKLOG)
    return made


def cut_unread(listener: socket.socket, seconds: float) -> None:
    """Make the system drop connections of `listener` whose clients acknowledge nothing for `seconds`.

    A server can only close such a connection, and closing waits for the client too. Does nothing on systems without the
    option (others than Linux).
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(seconds * 1000))


def _way_to_a_port(option: str, host: str, error: OSError) -> str:
    """Return advice for a port that cannot be bound, as a text: by the error's number, for a port in use, one below
    1024, else for an address that is not this machine's. option: of the port.
    """
    flag = "--" + option.replace("_", "-")
    if error.errno == errno.EADDRINUSE:
        return f"stop the program that listens there, or give another {flag}, 0 for any that is free"
    if error.errno == errno.EACCES:
        return f"ports below 1024 are the system's: give another {flag}"
    return f"give --host an address that this machine has; {host} is not one"


def _bind(option: str, host: str, port: int, *, reuse: bool = False) -> socket.socket:
    """Return a TCP socket that is bound to a port, 0 for a free one, and does not listen. reuse: with SO_REUSEPORT.

    option: of the port. Raises ConfigError that names host if that is no address, `option` if the port cannot be bound.
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
