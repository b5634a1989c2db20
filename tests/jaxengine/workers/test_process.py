"""Worker processes and what is not meant for them: the terminal's signals, and forks of their parent."""

from __future__ import annotations

import os
import signal

from jaxengine.tokens.template_worker import Answer, Ready, Render, Rendered, packed
from jaxengine.workers.process import WorkerProcess
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
    worker.process.wait(10)
    assert capfd.readouterr().err == ""
