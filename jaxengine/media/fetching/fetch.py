"""Reads data:, http(s): and file: addresses, as far as the operator allows it.

Addresses come from untrusted clients and are followed from inside the server's network. So hosts must be listed in
`allowed_media_domains`; a name is resolved once, to public addresses, and exactly these are connected to; redirects are
not followed; bytes, time and slowness are limited while receiving.
"""

from __future__ import annotations

import binascii
import http.client
import math
import re
import socket
import ssl
import time
import urllib.parse
from pathlib import Path
from typing import Any

from jaxengine.config.inputs.multimodal import ANY_DOMAIN, MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.base.frames import check_count
from jaxengine.media.decoding.images import check_bytes, read_file
from jaxengine.media.fetching import base64_pieces
from jaxengine.media.fetching.addresses import is_address, is_public, look_up
from jaxengine.media.fetching.proxies import proxy_of
from jaxengine.version import __version__

SCHEMES = "data:, http:, https: and file:"
_PORTS = {"http": 80, "https": 443}
_MAX_URL_CHARS = 8192
_PIECE_BYTES = 64 << 10
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_DATA = re.compile(r"data:([^,]{0,256}),", re.IGNORECASE)
_FRAMES = re.compile("data:video/jpeg;base64,", re.IGNORECASE)
# A body must arrive at this rate, bytes per second, after the seconds of grace.
_LEAST_RATE, _GRACE = 4096, 5.0
# Characters that are sent unescaped after the host (RFC 3986); others are percent-encoded.
_FORWARDED = "-._~!$&'()*+,;=:@/?%"


def scheme_of(url: str) -> str:
    """Return the scheme of an address (`url`), in lower case; "" if it has none."""
    found = _SCHEME.match(url)
    return found[1].lower() if found else ""


def fetch(url: str, options: MediaOptions) -> bytes:
    """Return the content at the address `url`, of the scheme data, http, https or file. Blocks; the network for at most
    options.media_fetch_timeout seconds.

    Raises MediaError for an address that is not allowed, does not answer, or has too much content.
    """
    scheme = scheme_of(url)
    if scheme == "data":
        return read_data(url, options.max_media_bytes)
    if scheme in _PORTS:
        return _fetch_http(url, scheme, options)
    if scheme == "file":
        return _read_local(url, options)
    shown = f"begins with {url[:20]!r}" if not scheme else f"has the scheme {scheme[:20]!r}"
    raise MediaError(f"{shown}; allowed: addresses of {SCHEMES}")


def check_source(url: str, options: MediaOptions) -> None:
    """Raise MediaError for an address that options do not allow, without any network access.

    The content of a data URL, the path of a file and the addresses of a host are only checked by `fetch`.
    """
    scheme = scheme_of(url)
    if scheme in _PORTS:
        _allowed_host(url, scheme, options)
    elif scheme == "file":
        _local_root(options)
    elif scheme != "data":
        fetch(url, options)


def read_data(url: str, limit: int) -> bytes:
    """Return the bytes of a data URL (RFC 2397), base64 or percent-encoded. Raises MediaError for other text, and for
    more than `limit` bytes.
    """
    head = _DATA.match(url)
    if head is None:
        raise MediaError("is not a data URL; allowed: data:image/png;base64,... or data:image/png,...")
    is_base64 = head[1].rpartition(";")[2].strip().lower() == "base64"
    # Three bytes are four base64 characters, or up to nine percent-encoded ones.
    check_bytes((len(url) - head.end()) * 3 // 4 - 2 if is_base64 else (len(url) - head.end()) // 3, limit)
    body = url[head.end() :]
    try:
        raw = urllib.parse.unquote_to_bytes(body) if "%" in body or not is_base64 else body.encode("ascii")
        if is_base64:
            raw = _from_base64(raw)
    except (binascii.Error, UnicodeError):
        raise MediaError(
            "is not valid base64: data:image/png;base64, must be followed by A-Z, a-z, 0-9, + and /"
        ) from None
    check_bytes(len(raw), limit)
    return raw


def read_frames(url: str, limit: int) -> tuple[list[bytes], dict[str, float]] | None:
    """Return the frames of a data URL of type video/jpeg, base64 with commas between JPEGs, for `read_video`: one a
    second, as in vLLM. None for another address. Raises MediaError for too many frames, for more than `limit` bytes of
    all together, and the errors of `read_data`.
    """
    if (head := _FRAMES.match(url)) is None:
        return None
    count = url.count(",")
    check_count(count)
    check_bytes((len(url) - head.end()) * 3 // 4 - 3 * count, limit)
    return [read_data(head[0] + each, limit) for each in url[head.end() :].split(",")], {"fps": 1.0}


def _from_base64(text: bytes) -> bytes:
    """Return the bytes of base64 in which white space is ignored and padding is optional, as in URLs. Raises
    binascii.Error for other text.
    """
    size = base64_pieces.PIECE_BYTES
    text = b"".join([text[at : at + size].translate(None, b" \t\r\n\f") for at in range(0, len(text), size)])
    return base64_pieces.decode(text + b"=" * (-len(text) % 4))


def _read_local(url: str, options: MediaOptions) -> bytes:
    """Return the content of the file that a file: address names.

    Raises MediaError without options.allowed_local_media_path, for a path outside of it (links followed), an address
    with a host other than localhost, a query or a fragment, a file that cannot be read, and more than max_media_bytes.
    """
    root = _local_root(options)
    parts = urllib.parse.urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise MediaError("is not a local file; allowed: file:///folder/name")
    try:
        path = Path(urllib.parse.unquote(parts.path, errors="strict")).resolve()
    except (OSError, RuntimeError, ValueError):  # invalid name, or circular links
        path = None
    if path is None or not path.is_relative_to(root):
        raise MediaError("leads out of the folder from which files may be read (allowed_local_media_path)")
    return read_file(path, options.max_media_bytes)


def _local_root(options: MediaOptions) -> Path:
    """Return the folder allowed_local_media_path, links resolved. Raises MediaError if it is not set."""
    if not options.allowed_local_media_path:
        raise MediaError("is a local file; none may be read, for allowed_local_media_path is not set")
    return Path(options.allowed_local_media_path).resolve()


def _allowed_host(url: str, scheme: str, options: MediaOptions) -> tuple[str, int, str]:
    """Check that an http(s) address may be fetched, without looking up its host; return (host in ASCII without a dot at
    the end, port, percent-encoded path with query).

    scheme: "http" or "https". Raises MediaError for an invalid address, one with credentials, and a host that options
    do not allow.
    """
    if len(url) > _MAX_URL_CHARS:
        raise MediaError(f"has {len(url)} characters; allowed: {_MAX_URL_CHARS}")
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port or _PORTS[scheme]
        host = host.rstrip(".").encode("idna").decode() if not host.isascii() else host.rstrip(".")
    except ValueError:
        host, port, parts = "", 0, None
    if parts is None or not host or parts.username is not None or parts.password is not None:
        raise MediaError("is not a valid web address; allowed: https://host/path")
    domains = options.allowed_media_domains
    if not domains:
        raise MediaError("is an address on the web; none may be fetched, for allowed_media_domains is not set")
    if ANY_DOMAIN not in domains and host not in domains:
        raise MediaError("is on a host from which nothing may be fetched (allowed_media_domains)")
    path = parts.path or "/"
    return host, port, urllib.parse.quote(f"{path}?{parts.query}" if parts.query else path, safe=_FORWARDED)


def _fetch_http(url: str, scheme: str, options: MediaOptions) -> bytes:
    """Return the body at an address of `scheme` http or https. Blocks for at most options.media_fetch_timeout seconds,
    and closes the connection.

    Raises MediaError for every failure: a forbidden or unknown host, a timeout, too slow a server, a status other than
    200, and too much content.
    """
    host, port, path = _allowed_host(url, scheme, options)
    until = time.monotonic() + options.media_fetch_timeout
    connection: http.client.HTTPConnection | None = None
    try:
        sock = _connect(scheme, host, port, options, until)
        # The connection exists already: http.client must not open one.
        connection = http.client.HTTPConnection(host, port)
        connection.sock = sock
        if scheme == "https":
            connection.sock = sock = _secured(sock, host)
        connection.request("GET", path, headers=_headers(host, port, scheme))
        response = connection.getresponse()
        sock.hurry()
        return _body(response, options.max_media_bytes)
    except TimeoutError:
        if time.monotonic() < until:
            raise MediaError(f"arrives too slowly; allowed: {_LEAST_RATE} bytes a second and more") from None
        raise MediaError(f"takes longer than {options.media_fetch_timeout:g} seconds (media_fetch_timeout)") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(f"cannot be fetched ({type(error).__name__})") from None
    finally:
        if connection is not None:
            connection.close()


def _headers(host: str, port: int, scheme: str) -> dict[str, str]:
    """Return the headers of a request; "Host" has the port unless it is the scheme's default."""
    named = f"[{host}]" if ":" in host else host
    return {
        "Host": named if port == _PORTS[scheme] else f"{named}:{port}",
        "User-Agent": f"jaxengine/{__version__}",
        "Accept": "image/*, video/*, audio/*",
        "Accept-Encoding": "identity",
        "Connection": "close",
    }


def _body(response: http.client.HTTPResponse, limit: int) -> bytes:
    """Return the complete body of a response. Raises MediaError for a status other than 200, a compressed body, more
    than `limit` bytes, and fewer than announced.
    """
    if 300 <= response.status < 400:
        raise MediaError(f"is a redirect (status {response.status}); give the address of the file itself")
    if response.status != 200:
        raise MediaError(f"is answered with status {response.status}")
    if (response.getheader("Content-Encoding") or "identity").lower() != "identity":
        raise MediaError("is sent compressed, which was not requested")
    announced, data = response.length, bytearray()
    check_bytes(announced or 0, limit)
    while piece := response.read(_PIECE_BYTES):
        data += piece
        check_bytes(len(data), limit)
    if announced is not None and len(data) < announced:
        raise MediaError(f"ends after {len(data)} of {announced} bytes")
    return bytes(data)


def _connect(scheme: str, host: str, port: int, options: MediaOptions, until: float) -> _Socket:
    """Return a socket connected to the first of the host's addresses that answers, through a proxy if there is one
    (`proxy_of`) for addresses of `scheme`.

    All addresses must be public, unless options.allowed_media_domains lists the host and it is an IP address. until:
    deadline in time.monotonic seconds, also of later reads. Raises MediaError for a host that is unknown or not
    allowed, and for an unusable proxy or one that refuses; OSError if no address answers, TimeoutError after the
    deadline.
    """
    named = host in options.allowed_media_domains and is_address(host)
    found = look_up(host, port, until)
    # All of them: a name with both public and private addresses is suspicious.
    if not named and not all(is_public(str(address[0])) for *_, address in found):
        raise MediaError("is on a host with a private address, which is not contacted")
    error: OSError | None = None
    proxy = proxy_of(scheme, host, port, options, until)
    for family, kind, protocol, _, address in found:
        sock: _Socket | None = None
        try:
            sock = _Socket(family, kind, protocol) if proxy is None else _Socket(*proxy.address[:3])
            sock.until = until
            sock.settimeout(sock.left())
            if proxy is None:
                sock.connect(address)
            else:
                sock.connect(proxy.address[4])
                proxy.tunnel(sock, str(address[0]), port)
            return sock
        except (OSError, MediaError) as failure:
            if sock is not None:
                sock.close()
            if isinstance(failure, (TimeoutError, MediaError)):
                raise
            error = failure
    raise error or MediaError("is on an unknown host")


class _Timed:
    """Mixin for sockets with one deadline for all reads, and a minimum rate after `hurry` has been called.

    until: the deadline, in time.monotonic seconds.
    """

    until = 0.0
    _hurried_at = math.inf
    _received = 0

    def hurry(self) -> None:
        """Begin to require the minimum rate _LEAST_RATE after _GRACE seconds: from now on the deadline depends on the
        bytes received, up to `until`.
        """
        self._hurried_at, self._received = time.monotonic(), 0

    def left(self) -> float:
        """Return the seconds until the deadline, or until the minimum rate is missed. Raises TimeoutError if that has
        passed.
        """
        until = min(self.until, self._hurried_at + _GRACE + self._received / _LEAST_RATE)
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def recv_into(self, *args: Any, **options: Any) -> int:
        """Receive into a buffer; return the number of bytes. Raises TimeoutError after the deadline, or once the rate
        is below the minimum (`left`).
        """
        self.settimeout(self.left())  # pyright: ignore[reportAttributeAccessIssue]
        count = super().recv_into(*args, **options)  # pyright: ignore[reportAttributeAccessIssue]
        self._received += count
        return count


class _Socket(_Timed, socket.socket):
    pass


class _TlsSocket(_Timed, ssl.SSLSocket):
    pass


def _secured(sock: _Socket, host: str) -> _TlsSocket:
    """Return the connection `sock` wrapped in TLS, with the certificate verified for `host` and the same deadline.

    Raises OSError, including ssl.SSLError and TimeoutError.
    """
    context = ssl.create_default_context()
    context.sslsocket_class = _TlsSocket
    sock.settimeout(sock.left())
    secured: Any = context.wrap_socket(sock, server_hostname=host)
    secured.until = sock.until
    return secured
