"""Which addresses are public, and that names which nobody resolves hold up nobody else."""

from __future__ import annotations

import socket
import threading
import time
from contextvars import copy_context

import pytest

from jaxengine.media.base.errors import MediaError
from jaxengine.media.fetching import addresses
from jaxengine.media.fetching.addresses import is_public, look_up
from jaxengine.turns import OWNER, FairThreads
from tests.tables import each_row

PRIVATE = """
    0.0.0.0 0.1.2.3 10.0.0.5 100.64.0.1 100.100.100.200 100.127.255.255 127.0.0.1 127.8.8.8 169.254.169.254 172.16.0.1
    172.31.255.255 192.0.0.1 192.0.0.9 192.0.0.10 192.0.0.192 192.0.2.1 192.88.99.1 192.168.1.1 198.18.0.1
    198.19.255.255 198.51.100.7 203.0.113.7 224.0.0.1 233.252.0.1 239.255.255.255 240.0.0.1 255.255.255.255
    168.63.129.16

    :: ::1 ::10.0.0.1 ::8.8.8.8 fe80::1 fe80::1%eth0 febf::1 fec0::1 feff::1 fc00::1 fd00:ec2::254 ff00::1 ff02::1
    ff0e::1 100::1 100:0:0:1::1 200::1 4000::1 5f00::1 8000::1 e000::1 2001:db8::1 3fff::1 3fff:fff::1 2001:2::1
    2001:10::1 2001:20::1 2001:1ff::1

    ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::ffff:192.88.99.1 ::ffff:0:10.0.0.1 ::ffff:0:8.8.8.8
    64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b::192.0.0.9 64:ff9b:1::a00:1 64:ff9b:1::808:808 64:ff9b:0:1::808:808
    2002:7f00:1:: 2002:a00:1::1 2002:c058:6301::1 2001:0:808:808::f5ff:fffe 2001:0:a00:1::f7f7:f7f7
    2606:4700::5efe:a00:1 2606:4700::200:5efe:7f00:1
"""
PUBLIC = """
    1.1.1.1 8.8.8.8 11.0.0.1 100.63.255.255 100.128.0.1 172.32.0.1 192.0.1.1 192.88.98.1 198.17.255.255 198.20.0.1
    223.255.255.255 168.63.129.17
    2606:4700::1111 2001:4860:4860::8888 2a00::1 2001:200::1 3fff:1000::1
    ::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::1 2001:0:808:808::f7f7:f7f7 2606:4700::5efe:808:808
"""


@each_row("address", PRIVATE.split())
def test_what_is_not_public(address):
    assert not is_public(address)


@each_row("address", PUBLIC.split())
def test_what_is_public(address):
    assert is_public(address)


def test_names_that_nobody_resolves_end_in_time_and_hold_up_nobody(monkeypatch):
    go, asked = threading.Event(), []

    def resolve(host: str, port: int, **_: object) -> list:
        asked.append(host)
        if host.startswith("slow"):
            go.wait(60)
        if host == "unknown":
            raise socket.gaierror
        return [host]

    monkeypatch.setattr(addresses, "_LOOKUPS", FairThreads(4, "look up"))
    monkeypatch.setattr(addresses.socket, "getaddrinfo", resolve)

    def ask(owner: str, host: str, seconds: float = 60) -> list:
        OWNER.set(owner)
        return look_up(host, 80, time.monotonic() + seconds)

    for number in range(10):
        with pytest.raises(TimeoutError):
            copy_context().run(ask, "a", f"slow{number}", 0.01)
    assert asked == ["slow0", "slow1"]  # no more than its share, the others were given up
    assert copy_context().run(ask, "b", "some") == ["some"]
    assert copy_context().run(ask, "a", "8.8.8.8") == ["8.8.8.8"]  # nothing to look up
    with pytest.raises(MediaError, match="is on an unknown host"):
        copy_context().run(ask, "b", "unknown")
    go.set()
