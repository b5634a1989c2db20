"""Pages go to those who have the key and mean the same by them, and to nobody else; what does not come is a miss."""

from __future__ import annotations

import os
import socket
import threading
import time

import jax
import pytest

from jaxengine.tiers.jax_transfer import JaxTransport
from jaxengine.tiers.tcp import TcpTransport
from jaxengine.tiers.transport import FolderTransport, Source
from tests.jaxengine.tiers.test_disk import block, key

SECRET = b"of all engines, 32 bytes of them"
PATIENCE = 120.0  # seconds, of which no machine is so busy that it takes half without waiting for pages


def test_pages_by_tcp(monkeypatch):
    monkeypatch.setattr(TcpTransport, "patience", PATIENCE)
    producer, consumer = TcpTransport(SECRET, "model", ("localhost", 0)), TcpTransport(SECRET, "model")
    assert producer.address is not None and consumer.address is None
    source = Source(*producer.address, "a lease")
    producer.offer(key(1), block(1, 300_000))
    producer.offer(key(2), None)
    threading.Timer(0.1, producer.offer, (key(2), block(2))).start()
    reader = consumer.open(source)
    found = reader.read([key(1), key(2), key(3)])
    assert list(found) == [key(1), key(2)]
    assert (found[key(1)] == block(1, 300_000)).all() and (found[key(2)] == block(2)).all()
    producer.withdraw([key(1)])
    assert list(reader.read([key(1), key(2)])) == [key(2)]
    reader.close()
    end = time.monotonic() + 60
    while not (released := producer.released()) and time.monotonic() < end:
        time.sleep(0.01)
    assert released == ["a lease"] and producer.released() == []

    foreign, stranger = TcpTransport(SECRET, "another model"), TcpTransport(SECRET[::-1], "model")
    with pytest.raises(ConnectionError, match="has pages of other weights"):
        foreign.open(source).read([key(2)])
    with pytest.raises(ConnectionError, match="has another key"):
        stranger.open(source).read([key(2)])
    reader = consumer.open(source)
    assert list(reader.read([key(2)])) == [key(2)]
    producer.shutdown()
    start = time.monotonic()
    for each in (reader, consumer.open(source)):  # the second is not even tried
        with pytest.raises(ConnectionError):
            each.read([key(2)])
    assert time.monotonic() - start < consumer.patience
    for each in (consumer, foreign, stranger):
        each.shutdown()


def test_a_reader_does_not_wait_for_what_is_silent_or_not_needed(monkeypatch):
    monkeypatch.setattr("jaxengine.tiers.tcp._CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(TcpTransport, "patience", PATIENCE)
    producer, consumer = TcpTransport(SECRET, "model", ("127.0.0.1", 0)), TcpTransport(SECRET, "model")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start, (host, port) = time.monotonic(), silent.getsockname()
        for message in ("does not answer", "not long ago"):
            reader = consumer.open(Source(host, port, "a lease"))
            with pytest.raises(ConnectionError, match=message):
                reader.read([key(1)])
            reader.close()
    assert producer.address is not None
    producer.offer(key(1), None)  # and it does not come
    reader = consumer.open(Source(*producer.address, "a lease"))
    assert reader.read([key(1)], is_over=lambda: True) == {}
    reader.close()
    assert time.monotonic() - start < consumer.patience
    for each in (producer, consumer):
        each.shutdown()


def test_pages_by_jax(monkeypatch):
    monkeypatch.setattr(JaxTransport, "patience", PATIENCE)
    producer, consumer = JaxTransport(SECRET, "model", "localhost", 0), JaxTransport(SECRET, "model", "127.0.0.1", None)
    assert producer.address is not None and consumer.address is None
    source = Source(*producer.address, "a lease")
    producer.offer(key(1), block(1, 300_000))
    producer.offer(key(2), block(2))
    # A name that a request gives may by now be another host's: pages come from where the answer says.
    monkeypatch.delattr("jaxengine.tiers.jax_transfer.address_of")
    reader = consumer.open(source)
    found = reader.read([key(1), key(3), key(2)])
    assert list(found) == [key(1), key(2)]
    assert (found[key(1)] == block(1, 300_000)).all() and (found[key(2)] == block(2)).all()
    assert reader.read([key(3)]) == {}
    assert "cannot reach this engine's kv_ip, 127.0.0.1" in consumer._advice("10.0.0.1:80")
    assert consumer._advice("[::1]:80") == ""

    by_tcp = TcpTransport(SECRET, "model", ("127.0.0.1", 0))  # the same key, but another form of answers
    by_tcp.offer(key(1), block(1))
    assert by_tcp.address is not None
    for one, other in ((TcpTransport(SECRET, "model"), source), (consumer, Source(*by_tcp.address, ""))):
        with pytest.raises(ConnectionError, match="or transport"):
            one.open(other).read([key(1)])

    frames = JaxTransport.frames

    def forged(blocks):
        told = frames(producer, blocks)
        return [*frames(producer, [block(9, len(each)) for each in blocks])[:-1], told[-1]]

    with monkeypatch.context() as failing:
        failing.setattr("jax.device_put", lambda *given: (_ for _ in ()).throw(jax.errors.JaxRuntimeError("no memory")))
        assert reader.read([key(1)]) == {}
    assert list(reader.read([key(1)])) == [key(1)]
    producer.frames = forged
    assert reader.read([key(2)]) == {}
    answered = threading.Event()

    def withdrawn(blocks):
        answered.set()
        return [*frames(producer, blocks)[:-1], bytes(8) + frames(producer, blocks)[-1][8:]]

    producer.frames, start = withdrawn, time.monotonic()
    assert reader.read([key(1)], answered.is_set) == {}  # of a request that has ended
    assert time.monotonic() - start < JaxTransport.patience / 2
    monkeypatch.setattr(JaxTransport, "patience", 0.2)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ConnectionError, match="did not come"):  # an offer that was withdrawn
            reader.read([key(1)])
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ConnectionError, match="not long ago"):
        consumer.open(source).read([key(1)])
    reader.close()
    for each in (producer, consumer, by_tcp):
        each.shutdown()


def test_a_port_that_is_taken():
    first = TcpTransport(SECRET, "model", ("127.0.0.1", 0))
    assert first.address is not None
    with pytest.raises(OSError, match="in use"):
        TcpTransport(SECRET, "model", first.address)
    first.shutdown()
    with pytest.raises(OSError, match="label too long"):
        TcpTransport(SECRET, "model", ("a" * 70, 0))


def test_pages_by_a_folder(tmp_path):
    producer, consumer = (FolderTransport(tmp_path, 1.0, produces) for produces in (True, False))
    reader = consumer.open(Source(None, None, "a lease"))
    threading.Timer(0.05, producer.offer, (key(1), block(1))).start()
    assert (reader.read([key(1)])[key(1)] == block(1)).all()
    (path,) = (each for each in tmp_path.rglob("*") if each.is_file())
    path.unlink()  # by another producer, for which it is old
    producer.offer(key(1), block(1))
    assert producer._disk.flush(10) and path.exists()
    os.utime(path, (0, 0))
    producer.offer(key(1), block(1))  # another lease of it
    assert path.stat().st_mtime > 1
    end = time.monotonic() + 60
    while path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not path.exists()
    producer.offer(key(2), block(2))
    assert producer._disk.flush(10)
    assert reader.read([key(1)], is_over=lambda: True) == {}
    vars(reader)["_deadline"] = 0.0
    assert list(reader.read([key(1), key(2)])) == [key(2)]  # what came counts
    with pytest.raises(TimeoutError):
        reader.read([key(1)])
    producer.shutdown()
    consumer.shutdown()
