"""Processes that are killed in each phase of a transfer: pages that came are those offered, and others go on."""

from __future__ import annotations

import resource
import threading

import numpy as np
import pytest

from jaxengine.tiers.disk import DiskTier
from jaxengine.tiers.transport import Transport
from tests.jaxengine.tiers.test_disk import block, key
from tests.jaxengine.tiers.transport_process import BLOCK_BYTES, KEYS, NEVER, opened, process, source_of

MORE = [pytest.param(each, marks=pytest.mark.thorough("another transport")) for each in ("tcp", "jax", "folder")]
TRANSPORTS = ["tcp", *MORE[1:]]


def come(transport: Transport, port: int, keys: list[bytes]) -> int:
    """How many of these blocks come; each must be right."""
    reader = transport.open(source_of(port))
    try:
        found = reader.read(keys)
    except OSError:
        return 0
    finally:
        reader.close()
    for name, content in found.items():
        np.testing.assert_array_equal(content, block(KEYS.index(name), BLOCK_BYTES))
    return len(found)


@pytest.fixture
def consumer(request, tmp_path):
    transport = opened(request.param, tmp_path, produces=False)
    yield request.param, transport
    transport.shutdown()


@pytest.mark.parametrize("consumer", TRANSPORTS, indirect=True)
def test_a_killed_producer(consumer, tmp_path, thorough):
    name, transport = consumer
    # Seconds until it is killed: before the first read, while it sends, while a reader waits for what never comes.
    phases = (0.0, KEYS), (0.02, KEYS), (0.05, KEYS), (0.3, [*KEYS, NEVER])
    for delay, keys in phases if thorough else phases[1:2]:
        with process(name, tmp_path, "offer") as (producer, port):
            assert come(transport, port, KEYS[:3]) == 3
            reader = transport.open(source_of(port))
            reader.read(KEYS[:1])  # is connected
            timer = threading.Timer(delay, producer.kill)
            timer.start()
            while timer.is_alive():
                come(transport, port, keys)
            timer.join()
        reader.close()
        assert come(transport, port, KEYS) == (len(KEYS) if name == "folder" else 0)


@pytest.mark.parametrize("consumer", MORE, indirect=True)
def test_a_killed_consumer(consumer, tmp_path):
    name, reading = consumer
    producer = opened(name, tmp_path, produces=True)
    for number, each in enumerate(KEYS):
        producer.offer(each, block(number, BLOCK_BYTES))
    port = producer.address[1] if producer.address else 0
    for _ in range(3):
        with process(name, tmp_path, "read", port) as (_, number):  # and is killed in one of the next reads
            assert number == len(KEYS)
        assert come(reading, port, KEYS) == len(KEYS)
    producer.withdraw(KEYS)
    assert not getattr(producer, "_pages", ())
    producer.shutdown()


def test_a_disk_that_takes_no_more(tmp_path):
    """As the file system says it, and not os.replace: a file is cut, and is no file afterwards."""
    tier = DiskTier(tmp_path / "kv")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, limits[1]))
    try:
        for number, size in enumerate((1000, 5 << 20, 2000)):
            assert tier.write(key(number), block(number, size))
        assert tier.flush(30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tier.num_failed, tier.num_written, tier.num_bad) == (1, 2, 0)
    assert [tier.read(key(number)) is None for number in range(3)] == [False, True, False]
    assert sum(each.is_file() for each in tier.folder.rglob("*")) == 2
    tier.shutdown()
