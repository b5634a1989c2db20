"""Bytes of data:, http(s): and file: addresses, from where the operator allows it.

An address comes from a stranger and is followed by this machine, from inside of its network. So hosts are those of
`allowed_media_domains`; what a name leads to is looked up once, must be public, and is what is connected to; redirects
are not followed; bytes and time are bounded as they come. Knows nothing of what the bytes are.
"""

from __future__ import annotations

import binascii
import http.client
import ipaddress
import re
import socket
import ssl
import time
import urllib.parse
from pathlib import Path
from typing import Any

from jaxengine.config.multimodal import ANY_DOMAIN, MediaOptions
from jaxengine.media import base64_pieces
from jaxengine.media.errors import MediaError
from jaxengine.media.images import check_bytes, read_file
from jaxengine.version import __version__

SCHEMES = "data:, http:, https: and file:"
_PORTS = {"http": 80, "https": 443}
_MAX_URL_CHARS = 8192
_PIECE_BYTES = 64 << 10
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_DATA = re.compile(r"data:([^,]{0,256}),", re.IGNORECASE)
# IPv6 addresses that a gateway turns into the IPv4 address in their last four bytes (RFC 6052).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# What an address may have behind its host as it is (RFC 3986); the rest is sent in percent signs.
_FORWARDED = "-._~!$&'()*+,;=:@/?%"


def scheme_of(url: str) -> str:
    """The scheme of an address, in small letters; empty where it has none."""
    found = _SCHEME.match(url)
    return found[1].lower() if found else ""


def fetch(url: str, options: MediaOptions) -> bytes:
    """What an address leads to. Blocks at most options.media_fetch_timeout, beside looking up the host's name.

    Raises MediaError for one that is not allowed, does not answer or has too much to say.
    """
    scheme = scheme_of(url)
    if scheme == "data":
        return _read_data(url, options.max_media_bytes)
    if scheme in _PORTS:
        return _fetch_http(url, scheme, options)
    if scheme == "file":
        return _read_local(url, options)
    shown = f"begins with {url[:20]!r}" if not scheme else f"has the scheme {scheme[:20]!r}"
    raise MediaError(f"{shown}; allowed are addresses of {SCHEMES}")


def check_source(url: str, options: MediaOptions) -> None:
    """Raises MediaError for an address that cannot be allowed, without asking anybody."""
    scheme = scheme_of(url)
    if scheme in _PORTS:
        _allowed_host(url, scheme, options)
    elif scheme == "file":
        _local_root(options)
    elif scheme != "data":
        fetch(url, options)


def _read_data(url: str, limit: int) -> bytes:
    """The bytes in a data URL (RFC 2397)."""
    head = _DATA.match(url)
    if head is None:
        raise MediaError("is no data URL; allowed is data:image/png;base64,... or data:image/png,...")
    is_base64 = head[1].rpartition(";")[2].strip().lower() == "base64"
    # Three bytes are four characters, or at most nine of percent signs.
    check_bytes((len(url) - head.end()) * 3 // 4 - 2 if is_base64 else (len(url) - head.end()) // 3, limit)
    body = url[head.end() :]
    try:
        raw = urllib.parse.unquote_to_bytes(body) if "%" in body or not is_base64 else body.encode("ascii")
        if is_base64:
            raw = _from_base64(raw)
    except (binascii.Error, UnicodeError):
        raise MediaError("holds no base64: data:image/png;base64, must be followed by A-Z, a-z, 0-9, + and /") from None
    check_bytes(len(raw), limit)
    return raw


def _from_base64(text: bytes) -> bytes:
    """As URLs have it: with white space, and without padding. Raises binascii.Error."""
    size = base64_pieces.PIECE_BYTES
    text = b"".join([text[at : at + size].translate(None, b" \t\r\n\f") for at in range(0, len(text), size)])
    return base64_pieces.decode(text + b"=" * (-len(text) % 4))


def _read_local(url: str, options: MediaOptions) -> bytes:
    root = _local_root(options)
    parts = urllib.parse.urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise MediaError("is no local file; allowed is file:///folder/name")
    try:
        path = Path(urllib.parse.unquote(parts.path, errors="strict")).resolve()
    except (OSError, RuntimeError, ValueError):  # no file can have such a name, or links lead in a circle
        path = None
    if path is None or not path.is_relative_to(root):
        raise MediaError("leads out of the folder from which files may be read (allowed_local_media_path)")
    return read_file(path, options.max_media_bytes)


def _local_root(options: MediaOptions) -> Path:
    if not options.allowed_local_media_path:
        raise MediaError("is a local file; none may be read, for allowed_local_media_path is not set")
    return Path(options.allowed_local_media_path).resolve()


def _allowed_host(url: str, scheme: str, options: MediaOptions) -> tuple[str, int, str]:
    """(host, port, path with query) of an address that may be asked."""
    if len(url) > _MAX_URL_CHARS:
        raise MediaError(f"has {len(url)} characters; allowed are {_MAX_URL_CHARS}")
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port or _PORTS[scheme]
        host = host.rstrip(".").encode("idna").decode() if not host.isascii() else host.rstrip(".")
    except ValueError:
        host, port, parts = "", 0, None
    if parts is None or not host or parts.username is not None or parts.password is not None:
        raise MediaError("is no address of a file on the web; allowed is https://host/path")
    domains = options.allowed_media_domains
    if not domains:
        raise MediaError("is an address on the web; none may be fetched, for allowed_media_domains is not set")
    if ANY_DOMAIN not in domains and host not in domains:
        raise MediaError("is on a host from which nothing may be fetched (allowed_media_domains)")
    path = parts.path or "/"
    return host, port, urllib.parse.quote(f"{path}?{parts.query}" if parts.query else path, safe=_FORWARDED)


def _fetch_http(url: str, scheme: str, options: MediaOptions) -> bytes:
    host, port, path = _allowed_host(url, scheme, options)
    until = time.monotonic() + options.media_fetch_timeout
    connection: http.client.HTTPConnection | None = None
    try:
        sock = _connect(host, port, options, until)
        # The connection is there already: http.client is not to look for one.
        connection = http.client.HTTPConnection(host, port)
        connection.sock = sock
        if scheme == "https":
            connection.sock = _secured(sock, host)
        connection.request("GET", path, headers=_headers(host, port, scheme))
        return _body(connection.getresponse(), options.max_media_bytes)
    except TimeoutError:
        raise MediaError(f"takes longer than {options.media_fetch_timeout:g} seconds (media_fetch_timeout)") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(f"cannot be fetched ({type(error).__name__})") from None
    finally:
        if connection is not None:
            connection.close()


def _headers(host: str, port: int, scheme: str) -> dict[str, str]:
    named = f"[{host}]" if ":" in host else host
    return {
        "Host": named if port == _PORTS[scheme] else f"{named}:{port}",
        "User-Agent": f"jaxengine/{__version__}",
        "Accept": "image/*, video/*",
        "Accept-Encoding": "identity",
        "Connection": "close",
    }


def _body(response: http.client.HTTPResponse, limit: int) -> bytes:
    if 300 <= response.status < 400:
        raise MediaError(f"leads elsewhere (status {response.status}); give the address of the file itself")
    if response.status != 200:
        raise MediaError(f"is answered with status {response.status}")
    if (response.getheader("Content-Encoding") or "identity").lower() != "identity":
        raise MediaError("comes compressed, which was not asked for")
    announced, data = response.length, bytearray()
    check_bytes(announced or 0, limit)
    while piece := response.read(_PIECE_BYTES):
        data += piece
        check_bytes(len(data), limit)
    if announced is not None and len(data) < announced:
        raise MediaError(f"ends after {len(data)} of {announced} bytes")
    return bytes(data)


def _connect(host: str, port: int, options: MediaOptions, until: float) -> _Socket:
    """A socket to one of the host's addresses, each of which was found to be allowed."""
    named = host in options.allowed_media_domains and _is_address(host)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise MediaError("is on a host that is not known") from None
    # All of them: a name with one private address among public ones is not an honest one.
    if not named and not all(is_public(str(address[0])) for *_, address in found):
        raise MediaError("is on a host with a private address, which is not asked")
    error: OSError | None = None
    for family, kind, protocol, _, address in found:
        sock = _Socket(family, kind, protocol)
        sock.until = until
        try:
            sock.settimeout(sock.left())
            sock.connect(address)
            return sock
        except OSError as failure:
            sock.close()
            if isinstance(failure, TimeoutError):
                raise
            error = failure
    raise error or MediaError("is on a host that is not known")


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the internet: none of this machine, its network or its provider."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Timed:
    """What reads from a socket until one time for everything, however slowly it comes.

    until: by time.monotonic.
    """

    until = 0.0

    def left(self) -> float:
        """Seconds. Raises TimeoutError where there are none."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def recv_into(self, *args: Any, **options: Any) -> int:
        self.settimeout(self.left())  # pyright: ignore[reportAttributeAccessIssue]
        return super().recv_into(*args, **options)  # pyright: ignore[reportAttributeAccessIssue]


class _Socket(_Timed, socket.socket):
    pass


class _TlsSocket(_Timed, ssl.SSLSocket):
    pass


def _secured(sock: _Socket, host: str) -> _TlsSocket:
    """The connection over TLS, with a host that has shown a certificate for its name."""
    context = ssl.create_default_context()
    context.sslsocket_class = _TlsSocket
    sock.settimeout(sock.left())
    secured: Any = context.wrap_socket(sock, server_hostname=host)
    secured.until = sock.until
    return secured
