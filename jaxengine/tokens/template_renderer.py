"""Has chat templates rendered where they can be killed: with a deadline and a memory limit, in processes of their own.

A template is a program. One that never ends, or takes all memory there is, costs its own conversation a few seconds and
no other thread anything. Knows nothing of messages or of tokens.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Mapping
from typing import Any

from jaxengine.tokens.template_worker import Answer, Refused, Render, Rendered, packed, unpacked
from jaxengine.workers.process import WorkerProcess
from scheduler.errors import OverloadedError

# That a conversation may take to render, and that it may wait for others to be; ours take milliseconds.
RENDER_SECONDS = 5.0
WAIT_SECONDS = 2.0
_START_SECONDS = 60.0  # that a process may take to start
# A conversation that takes long leaves one for the others.
NUM_PROCESSES = 2
_MODULE = "jaxengine.tokens.template_worker"


class TemplateFailure(ValueError):
    """There is no text."""


class BadTemplate(TemplateFailure):
    """The template itself is at fault, whatever it is given."""


class ConversationRefused(TemplateFailure):
    """The template ran, but not with what it was given: another way to write the same may do."""


class _Renderer:
    """A process, started with its first conversation and after each that it did not survive."""

    def __init__(self):
        self._process: WorkerProcess | None = None

    def render(self, message: Render) -> Rendered | Refused:
        """Raises TemplateFailure where there is no answer."""
        if self._process is not None:
            answer = self._ask(self._process, message)
            if answer is not None:
                return answer
        # None before, or one that had ended before it was asked, or did at this message: it gets another one.
        self._process = process = WorkerProcess(_MODULE, Answer)
        answer = self._await(process, _START_SECONDS) and self._ask(process, message)
        if answer is None:
            raise TemplateFailure("the process that renders it has ended")
        return answer

    def _ask(self, process: WorkerProcess, message: Render) -> Any:
        process.send(message)
        return self._await(process, RENDER_SECONDS)

    def _await(self, process: WorkerProcess, seconds: float) -> Any:
        """What the process says; None when it has ended. One that says nothing in time is killed."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            process.wait(left)
            answers, alive = process.receive()
            if answers:
                return answers[0]
            if not alive:
                return None
        process.kill()
        self._process = None
        raise TemplateFailure(f"it takes more than {seconds:g} s")


class TemplateRenderer:
    """Renders templates. Safe to use from several threads."""

    def __init__(self):
        self._idle: queue.LifoQueue[_Renderer] = queue.LifoQueue()
        for _ in range(NUM_PROCESSES):
            self._idle.put(_Renderer())

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text of a template; `variables` are plain JSON values.

        Raises TemplateFailure, or OverloadedError where all processes are at conversations that take long.
        """
        message = Render(packed(source), packed(json.dumps(variables, ensure_ascii=False)))
        try:
            renderer = self._idle.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            text = f"{NUM_PROCESSES} chat templates have been rendered for more than {WAIT_SECONDS:g} s"
            raise OverloadedError(f"{text}; try again", retry_after=RENDER_SECONDS) from None
        try:
            answer = renderer.render(message)
        finally:
            self._idle.put(renderer)
        if isinstance(answer, Refused):
            raise (ConversationRefused if answer.usable else BadTemplate)(answer.reason)
        return unpacked(answer.text)
