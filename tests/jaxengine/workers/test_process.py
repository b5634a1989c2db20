"""Worker processes and what is not meant for them: the terminal's signals, and forks of their parent."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import types

import pytest

from jaxengine.tokens.template_worker import Answer, Ready, Render, Rendered, packed
from jaxengine.workers.process import WorkerProcess, wait_for_any
from tests.forked import in_fork


def _answer(worker):
    while True:
        worker.wait(30)
        answers, alive = worker.receive()
        assert alive
        if answers:
            return answers[0]


def test_a_worker_heeds_neither_the_terminals_signals_nor_forks(capfd):
    worker = WorkerProcess("jaxengine.tokens.template_worker", Answer)
    assert os.getpgid(worker.process.pid) != os.getpgrp()  # before it has begun to ignore anything
    assert isinstance(_answer(worker), Ready)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.process.pid, number)
    assert in_fork(lambda: (worker.is_ours, worker.kill())) == "(False, None)"
    worker.send(Render(packed("Hello {{ name }}"), packed('{"name": "you"}')))
    assert _answer(worker) == Rendered(packed("Hello you"))
    worker.kill()
    worker.process.wait(60)
    # gRPC, which other tests of this process may have started, says that it does not follow forks.
    assert [line for line in capfd.readouterr().err.splitlines() if "fork_posix.cc" not in line] == []


def test_a_worker_is_heard_whatever_the_number_of_its_descriptor():
    """select() takes none above 1023, and a server has a descriptor for each connection."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit[1] != resource.RLIM_INFINITY and limit[1] < 1200:
        pytest.skip(f"this system allows {limit[1]} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], 1200), limit[1]))
    ours, other = socket.socketpair()
    high = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1100)
    try:
        worker = types.SimpleNamespace(fileno=lambda: high, has_more_to_send=False)
        other.send(b"x")
        wait_for_any([worker], 30)
        assert os.read(high, 1) == b"x"
        worker.has_more_to_send = True
        wait_for_any([worker], 30)  # can be sent more
    finally:
        os.close(high)
        ours.close()
        other.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
