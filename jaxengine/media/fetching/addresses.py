"""Addresses of hosts: looking up names in bounded time, and distinguishing the public internet from all other
networks.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from typing import Any

from jaxengine.media.base.errors import MediaError
from jaxengine.turns import FairThreads

# Names being looked up at once. A resolver may take a minute to give up, and cannot be interrupted.
_LOOKUPS = FairThreads(8, "look up names")
# Some supported versions of Python count some of these as global. IANA's registries of special addresses, without the
# anycast addresses in them that nobody serves files from; the deprecated relays of 6to4; and the address at which
# Azure's machines find their host.
_SPECIAL_IPV4 = tuple(
    ipaddress.IPv4Network(each)
    for each in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "168.63.129.16/32"),
    )
)
# The public IPv6 internet, and the special networks within it.
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_IPV6 = tuple(ipaddress.IPv6Network(each) for each in ("2001::/23", "2001:db8::/32", "3fff::/20"))
# Addresses that a gateway translates to the IPv4 address in their last four bytes (RFC 6052).
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Third quarter of addresses that tunnel to the IPv4 address in their last four bytes (ISATAP, RFC 5214).
_ISATAP = (0x5EFE, 0x02005EFE)


def look_up(host: str, port: int, until: float) -> list[Any]:
    """Return the addresses of a host for a TCP connection, in the form of socket.getaddrinfo. Blocks.

    until: deadline in time.monotonic seconds. A lookup that has begun goes on in its thread after the deadline. Raises
    MediaError for an unknown host, TimeoutError after the deadline.
    """
    try:
        if is_address(host):
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = _LOOKUPS.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            return found.result(max(0.0, until - time.monotonic()))
        finally:
            found.cancel()
    except TimeoutError:
        raise
    except (OSError, UnicodeError):
        raise MediaError("is on an unknown host") from None


def is_address(host: str) -> bool:
    """Whether a host is given as an IP address rather than by a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_public(address: str) -> bool:
    """Whether an IP address is on the public internet, not in a loopback, private, reserved or provider network.

    IPv6 addresses that lead to IPv4 addresses (mapped, NAT64, 6to4, Teredo, ISATAP) are not public if one of these is
    not. A zone ("%eth0") is ignored. Raises ValueError for text that is not an IP address.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not any(ip in network for network in _SPECIAL_IPV4)
    if (inner := _inner(ip)) and not all(is_public(str(each)) for each in inner):
        return False
    if ip.ipv4_mapped or ip in _NAT64 or ip.teredo:
        return True
    return ip in _GLOBAL_IPV6 and not any(ip in network for network in _SPECIAL_IPV6)


def _inner(ip: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses to which packets for `ip` may be forwarded; [] for an address that leads to none."""
    last = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if ip.ipv4_mapped or ip in _NAT64 or (int(ip) >> 32 & 0xFFFFFFFF) in _ISATAP:
        return [last]
    if ip.sixtofour:
        return [ip.sixtofour]
    return list(ip.teredo or ())
