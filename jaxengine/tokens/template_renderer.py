"""Renders chat templates in worker processes, with a deadline and a memory limit.

A template is a program. One that does not terminate, or exhausts memory, delays its own conversation by a few seconds
and does not affect other threads.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Mapping
from typing import Any

from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.tokens.template_worker import Answer, Refused, Render, Rendered, packed, unpacked
from jaxengine.workers.process import WorkerProcess

# Limits in seconds of rendering a conversation, and of waiting for a worker; normal templates take milliseconds.
RENDER_SECONDS = 5.0
WAIT_SECONDS = 2.0
_START_SECONDS = 60.0  # limit in seconds of a process's start
# With two, a slow conversation leaves one worker to the others.
NUM_PROCESSES = 2
_MODULE = "jaxengine.tokens.template_worker"


class TemplateFailure(ValueError):
    """Error of a template that has not produced a text."""


class BadTemplate(TemplateFailure):
    """Error of a template that is invalid for any input."""


class ConversationRefused(TemplateFailure):
    """Error of a template that ran but refused its input. It may accept another variant of the messages."""


class _Renderer:
    """Client of one worker process, which is started on demand and again after it has ended."""

    def __init__(self):
        self._process: WorkerProcess | None = None

    def render(self, message: Render) -> Rendered | Refused:
        """Render a message's template and wait for the answer. Starts a process if there is none, and tries once more
        in a new one if the old one ends.

        Raises TemplateFailure if the new process ends too, if it does not start within _START_SECONDS, or if rendering
        takes more than RENDER_SECONDS. The last two kill the process.
        """
        if self._process is not None and self._process.is_ours:
            answer = self._ask(self._process, message)
            if answer is not None:
                return answer
        # There is no process of ours, or it ended before or during this message: start another one.
        self._process = process = WorkerProcess(_MODULE, Answer)
        answer = self._await(process, _START_SECONDS) and self._ask(process, message)
        if answer is None:
            raise TemplateFailure("the process that renders it has ended")
        return answer

    def _ask(self, process: WorkerProcess, message: Render) -> Any:
        """Send the message and return the answer; None if the process has ended. If there is no answer within
        RENDER_SECONDS, kill the process and raise TemplateFailure.
        """
        process.send(message)
        return self._await(process, RENDER_SECONDS)

    def _await(self, process: WorkerProcess, seconds: float) -> Any:
        """Wait for the worker's next answer and return it; None if the worker has ended. If there is no answer within
        `seconds`, kill the worker and raise TemplateFailure.
        """
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
    """Renderer of templates in a pool of worker processes. Thread-safe."""

    def __init__(self):
        self._idle: queue.LifoQueue[_Renderer] = queue.LifoQueue()
        for _ in range(NUM_PROCESSES):
            self._idle.put(_Renderer())

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Return the text of a template, given as Jinja source. variables: plain JSON values.

        Raises BadTemplate for an invalid template, ConversationRefused if the template refuses its variables,
        TemplateFailure if it takes too long or ends its process, and OverloadedError if no worker becomes free within
        WAIT_SECONDS.
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
