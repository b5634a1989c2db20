"""Messages between processes: what is written is read, and nothing else is, whoever sends it."""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxengine.cluster import channel
from jaxengine.cluster.channel import (
    MAX_MESSAGE_BYTES,
    Channel,
    ClusterError,
    Message,
    accept_channel,
    connect_channel,
    decode,
    encode,
    read_cluster_key,
)
from jaxengine.config.engine_config import ConfigError

KEY, THERE, BACK = b"k" * 32, b"t" * 32, b"b" * 32
STEP = Message("forward", {"num_tokens": 8, "num_seqs": 8}, [np.arange(12, dtype=np.int32).reshape(2, 6)])


def with_header(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(4, "little") + raw + data


@pytest.mark.parametrize(
    "message",
    [
        STEP,
        Message("end", {}),
        Message("change", {"name": "bias row"}, [np.array(3, np.int32), np.linspace(0, 1, 5, dtype=np.float32)]),
        Message("forward", {"num_tokens": 1, "num_seqs": 1}, [np.zeros((0, 3), np.int32)]),
    ],
)
def test_a_message_comes_as_it_was_sent(message):
    found = decode(encode(message))
    assert (found.op, found.fields) == (message.op, message.fields)
    for one, other in zip(found.arrays, message.arrays, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)
        assert one.flags.aligned


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "a header of 0"),
        (b"\xff\xff\xff\xff[]", "a header of 4294967295"),
        (with_header(b"{]"), "not JSON"),
        (with_header(b"[" * 60000), "not JSON"),
        (with_header({"op": "forward"}), "not [operation, fields, arrays]"),
        (with_header(["run", {}, []]), "a message's operation is 'run'"),
        (with_header(["forward", {"num_tokens": 8}, []]), "must have the fields num_tokens, num_seqs"),
        (with_header(["forward", {"num_tokens": True, "num_seqs": 8}, []]), "must have the fields"),
        (with_header(["end", {}, None]), "dtypes and shapes"),
        (with_header(["end", {}, [["object", [1]]]], bytes(8)), "dtypes and shapes"),
        (with_header(["end", {}, [["int32", [-1]]]], bytes(8)), "dtypes and shapes"),
        (with_header(["end", {}, [["int32", [2**30, 2**30, 2**30]]]], bytes(8)), "in the middle of an array"),
        (encode(STEP)[:-1], "in the middle of an array"),
        (encode(STEP) + b"\0", "1 bytes more"),
    ],
)
def test_other_bytes_are_one_clear_error(payload, said):
    with pytest.raises(ClusterError) as caught:
        decode(payload)
    assert said in str(caught.value)


def test_fields_that_the_other_side_would_refuse_are_not_sent():
    with pytest.raises(ClusterError, match="the fields of a message 'start' have 1[0-9]{6} bytes; allowed: 1048576"):
        encode(Message("start", {"options": {"chat_template": "x" * 1_100_000}}))
    large = Message("start", {"options": {"chat_template": "x" * 900_000}})
    assert decode(encode(large)).fields == large.fields


def test_no_bytes_are_another_error():
    rng = np.random.default_rng(0)
    whole = encode(STEP)
    for _ in range(2000):
        changed = bytearray(whole[: rng.integers(len(whole) + 1)])
        for place in rng.integers(0, max(1, len(changed)), 3):
            changed[place : place + 1] = rng.bytes(1)
        try:
            decode(bytes(changed))
        except ClusterError:
            continue


@pytest.fixture
def ends():
    """Both ends of a connection, not yet a channel."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        yield one, other


def channels(key: bytes, other_key: bytes) -> tuple[Channel, Channel]:
    """A worker's and host 0's."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        worker = pool.submit(connect_channel, "127.0.0.1", server.getsockname()[1], key)
        connection = server.accept()[0]
        try:
            host0 = accept_channel(connection, other_key)
        except ClusterError as error:
            connection.close()
            raise ClusterError(f"{error}; {worker.exception()}") from None
        return worker.result(), host0


def test_who_knows_the_key_is_heard():
    worker, host0 = channels(KEY, KEY)
    for number in range(3):
        worker.send("plan", num_pages=number, programs="x")
        assert host0.receive().fields == {"num_pages": number, "programs": "x"}
        host0.send("forward", STEP.arrays, **STEP.fields)
        assert np.array_equal(worker.receive().arrays[0], STEP.arrays[0])
    worker.close()
    with pytest.raises(OSError):
        host0.receive()
    host0.close()


def test_who_does_not_is_not():
    with pytest.raises(ClusterError, match="it has another cluster key; host 0 has another cluster key"):
        channels(KEY, b"l" * 32)


def test_what_is_not_a_worker_is_refused(ends):
    one, other = ends
    one.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n" + bytes(100))
    with pytest.raises(ClusterError, match="not a worker"):
        accept_channel(other, KEY)


@pytest.mark.parametrize("change", ["a byte", "its length", "again", "back"])
def test_a_message_of_somebody_else_is_refused(ends, change):
    one, other = ends
    keys = THERE, BACK
    Channel(one, *keys).send("end")
    sent = bytearray(other.recv(1000))
    reader = Channel(one, *keys) if change == "back" else Channel(one, *reversed(keys))
    if change == "again":
        other.sendall(sent)
        assert reader.receive().op == "end"
    elif change == "a byte":
        sent[-20] ^= 1
    elif change == "its length":
        sent[0] -= 1
    other.sendall(sent)
    with pytest.raises(ClusterError, match="not sent by the other end"):
        reader.receive()


def test_a_connection_that_ends_in_a_message_is_lost(ends):
    one, other = ends
    Channel(one, THERE, BACK).send("plan", num_pages=7, programs="x")
    one.shutdown(socket.SHUT_WR)
    sent = other.recv(1000)
    for kept in (0, 5, 20, len(sent) - 1):
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as again:
            again.sendall(sent[:kept])
            again.close()
            with server.accept()[0] as reader, pytest.raises(ConnectionResetError):
                Channel(reader, BACK, THERE).receive()


def test_nobody_between_reads_or_repeats_a_connection():
    """Recorded bytes of a connection hold no word of its messages, and host 0 refuses them when they come again."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as tap:
        heard: dict[str, bytearray] = {"worker": bytearray(), "host 0": bytearray()}

        def listen(name: str, source: socket.socket, sink: socket.socket) -> None:
            while part := source.recv(1 << 16):
                heard[name] += part
                sink.sendall(part)
            sink.shutdown(socket.SHUT_WR)

        with ThreadPoolExecutor(3) as pool:
            worker = pool.submit(connect_channel, "127.0.0.1", tap.getsockname()[1], KEY)
            inner, outer = tap.accept()[0], socket.create_connection(server.getsockname())
            pool.submit(listen, "worker", inner, outer)
            pool.submit(listen, "host 0", outer, inner)
            host0 = accept_channel(server.accept()[0], KEY)
            worker.result().send("failed", reason="a secret of the worker")
            assert host0.receive().fields == {"reason": "a secret of the worker"}
            host0.send("bytes", [np.frombuffer(b"a secret of host 0", np.uint8)])
            assert bytes(worker.result().receive_bytes()) == b"a secret of host 0"
            host0.send("end")
            with pytest.raises(ClusterError, match="sent 'end'"):
                worker.result().receive_bytes()
            host0.close()
            worker.result().close()
        for end in (inner, outer):
            end.close()
        assert all(len(each) > 100 and b"secret" not in each for each in heard.values())
        with socket.create_connection(server.getsockname()) as again, server.accept()[0] as connection:
            again.sendall(heard["worker"])
            with pytest.raises(ClusterError, match="another cluster key"):
                accept_channel(connection, KEY)


def test_a_public_value_that_fixes_the_secret_is_refused(ends):
    one, other = ends
    one.sendall(channel._GREETING + bytes(32))
    with pytest.raises(ClusterError, match="small group"):
        accept_channel(other, KEY)


def test_a_message_that_claims_to_be_large_is_not_waited_for(ends):
    one, other = ends
    one.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(8, "little") + bytes(32))
    with pytest.raises(ClusterError, match=f"claims {MAX_MESSAGE_BYTES + 1} bytes"):
        Channel(other, THERE, BACK).receive()
    with pytest.raises(ClusterError, match="allowed:"):
        Channel(other, THERE, BACK).send("change", [np.zeros(MAX_MESSAGE_BYTES, np.int32)], name="x")


def test_a_key_file_is_its_owners_alone(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(b"  " + KEY + b"\n")
    os.chmod(file, 0o600)
    assert read_cluster_key(str(file)) == KEY
    os.chmod(file, 0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_cluster_key(str(file))
    os.chmod(file, 0o600)
    file.write_bytes(b"short")
    for wrong, said in ((str(file), "holds 5 bytes"), (None, "nnodes"), (str(tmp_path / "no"), "No such file")):
        with pytest.raises(ConfigError, match=said):
            read_cluster_key(wrong)
