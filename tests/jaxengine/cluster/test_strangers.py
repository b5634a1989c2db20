"""Who does not know the key: however slow, and however many, they keep nobody out who does."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from jaxengine.cluster import channel, host0
from jaxengine.cluster.channel import accept_channel, connect_channel
from jaxengine.cluster.host0 import Cluster, versions

KEY = b"k" * 32


def test_a_handshake_has_one_end_whatever_comes_of_it(monkeypatch):
    monkeypatch.setattr(channel, "_HANDSHAKE_SECONDS", 0.5)
    ours, theirs = _tcp_pair()

    def drip():
        with contextlib.suppress(OSError):
            for byte in channel._GREETING + bytes(600):
                theirs.sendall(bytes([byte]))
                time.sleep(0.05)

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        accept_channel(ours, KEY)
    ours.close()
    thread.join()
    theirs.close()


def test_strangers_make_room(monkeypatch, caplog):
    monkeypatch.setattr(host0, "_MAX_GREETINGS", 8)
    cluster = object.__new__(Cluster)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    cluster.__dict__.update(
        _config=SimpleNamespace(nnodes=2),
        _key=KEY,
        _changed=threading.Condition(),
        _workers={},
        _failure=None,
        _started=False,
        _closing=False,
        _greetings={},
        _listener=listener,
    )
    threading.Thread(target=cluster._accept, daemon=True).start()
    strangers = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(40)]
    cluster._relay = _broken_relay
    traffic, other = (connect_channel("127.0.0.1", port, KEY) for _ in range(2))
    traffic.send("coordinator")
    other.send("bye")
    for each in (traffic, other):
        with pytest.raises((channel.ClusterError, OSError)):
            each.receive()  # it is closed
    said = {record.getMessage() for record in caplog.records}
    assert said >= {
        "a connection from 127.0.0.1 was refused: its first message is 'bye'",
        "a connection from 127.0.0.1 with jax's start-up traffic has failed: broken",
    }
    worker = connect_channel("127.0.0.1", port, KEY)
    worker.send("hello", node_rank=1, host="here", versions=versions())
    with cluster._changed:
        assert cluster._changed.wait_for(lambda: 1 in cluster._workers, 30)
        assert len(cluster._greetings) <= 8
    # The first strangers were shown out, the last are still looked at.
    strangers[0].settimeout(30)
    assert strangers[0].recv(1) == b""
    strangers[-1].settimeout(0.05)
    with pytest.raises(TimeoutError):
        strangers[-1].recv(1)
    cluster._closing = True
    worker.close()
    for stranger in strangers:
        stranger.close()
    channel.close_connection(listener)


def test_workers_may_leave_while_an_engine_ends_before_its_start():
    cluster = object.__new__(Cluster)
    ended: list[str] = []

    class Leaving:
        """Connection of a worker that is gone once it gets a message."""

        def __init__(self, rank: int):
            self.rank = rank

        def send(self, op: str, **fields: str) -> None:
            ended.append(fields["reason"])
            cluster._lose(cluster._workers[self.rank], "it has ended")

        def close(self) -> None: ...

    cluster.__dict__.update(
        _changed=threading.Condition(),
        _workers={rank: host0._Worker(rank, "here", Leaving(rank)) for rank in (1, 2)},  # pyright: ignore[reportArgumentType]
        _failure=None,
        _started=False,
        _closing=False,
        _listener=socket.create_server(("127.0.0.1", 0)),
        _pid=os.getpid(),
    )
    cluster.shutdown("node rank 3 did not join")
    assert ended == ["node rank 3 did not join"] * 2 and not cluster._workers


def _broken_relay(channel) -> None:
    raise OSError("broken")


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        return listener.accept()[0], theirs
