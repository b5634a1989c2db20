"""HTTP proxies through which files are fetched: which one, and tunnels to addresses that were checked."""

from __future__ import annotations

import base64
import urllib.parse
import urllib.request
from typing import Any, NamedTuple

from jaxengine.config.inputs.multimodal import PROXY_OF_ENVIRONMENT, MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.fetching.addresses import look_up

_PORT = 80
_MOST_HEAD_BYTES = 8192


class Proxy(NamedTuple):
    """A proxy that was looked up.

    Attributes:
      address: an entry of socket.getaddrinfo.
      credentials: the value of a header Proxy-Authorization; "" for none.
    """

    address: tuple[Any, ...]
    credentials: str

    def tunnel(self, sock: Any, address: str, port: int) -> None:
        """Request a tunnel to an IP address and port (CONNECT, RFC 9110, 9.3.6) over a socket that is connected to the
        proxy, and wait for the answer.

        Raises MediaError for a status other than 200 and for an answer without the end of an HTTP head in
        _MOST_HEAD_BYTES; OSError for a broken
        connection, and TimeoutError after the deadline of the socket.
        """
        target = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        given = f"Proxy-Authorization: {self.credentials}\r\n" if self.credentials else ""
        sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{given}\r\n".encode())
        head, byte = bytearray(), bytearray(1)
        while not head.endswith(b"\r\n\r\n"):  # byte by byte: what follows is the tunnel's
            if len(head) > _MOST_HEAD_BYTES or not sock.recv_into(byte):
                raise MediaError("is not reached: the proxy (media_proxy) gives no answer of HTTP")
            head += byte
        if head.split(None, 2)[1:2] != [b"200"]:
            raise MediaError("is not reached: the proxy (media_proxy) refuses to connect")


def proxy_of(scheme: str, host: str, port: int, options: MediaOptions, until: float) -> Proxy | None:
    """Return the proxy through which a host is reached by http or https (`scheme`), looked up; None without a proxy.

    It is options.media_proxy, "" for none; with PROXY_OF_ENVIRONMENT that of HTTP_PROXY or HTTPS_PROXY, or else
    ALL_PROXY, in either case of letters, unless NO_PROXY lists the host. "http://" may be absent, the port is 80 by
    default, and a user and password before the host become the credentials. until: deadline in time.monotonic seconds.
    Raises MediaError for an unknown host and for an option or variable that is not http://HOST:PORT, TimeoutError after
    the deadline.
    """
    named = options.media_proxy
    if named == PROXY_OF_ENVIRONMENT:
        found = urllib.request.getproxies_environment()
        is_bypassed = urllib.request.proxy_bypass_environment(f"{host}:{port}", found)  # type: ignore[attr-defined]
        named = "" if is_bypassed else found.get(scheme) or found.get("all") or ""
    if not named:
        return None
    try:
        parts = urllib.parse.urlsplit(named if "://" in named else f"http://{named}")
        name, at = parts.hostname, parts.port or _PORT
        if parts.scheme != "http" or name is None:
            raise ValueError
    except ValueError:
        raise MediaError("is reached through a proxy (media_proxy) that is not http://HOST:PORT") from None
    credentials = ""
    if parts.username is not None:
        user, password = (urllib.parse.unquote(each or "") for each in (parts.username, parts.password))
        credentials = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
    try:
        return Proxy(look_up(name, at, until)[0], credentials)
    except MediaError:
        raise MediaError("is reached through a proxy (media_proxy), which is on an unknown host") from None
