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

# Limits of rendering a conversation, and of waiting for a worker; normal templates take milliseconds.
RENDER_SECONDS = 5.0
WAIT_SECONDS = 2.0
_START_SECONDS = 60.0  # limit of a process's start
# With two, a slow conversation leaves one worker to the others.
NUM_PROCESSES = 2
_MODULE = "jaxengine.tokens.template_worker"


class TemplateFailure(ValueError):
    """Raised if a template produced no text."""


class BadTemplate(TemplateFailure):
    """Raised for a template that is invalid for any input."""


class ConversationRefused(TemplateFailure):
    """Raised if the template ran but refused its input; another variant of the messages may be accepted."""


class _Renderer:
    """A worker process, started on demand and restarted after it has ended."""

    def __init__(self):
        self._process: WorkerProcess | None = None

    def render(self, message: Render) -> Rendered | Refused:
        """Render the message's template and wait for the answer; in a new process if the old one has ended, or ends
        meanwhile.

        Raises TemplateFailure if the new one ends too, does not start within _START_SECONDS, or takes more than
        RENDER_SECONDS; these also kill the process.
        """
        if self._process is not None and self._process.is_ours:
            answer = self._ask(self._process, message)
            if answer is not None:
                return answer
        # There was no process of ours, or it had ended before or during this message: another one is started.
        self._process = process = WorkerProcess(_MODULE, Answer)
        answer = self._await(process, _START_SECONDS) and self._ask(process, message)
        if answer is None:
            raise TemplateFailure("the process that renders it has ended")
        return answer

    def _ask(self, process: WorkerProcess, message: Render) -> Any:
        """Send the message and wait for the answer; None if the process has ended. After RENDER_SECONDS kills it and
        raises TemplateFailure.
        """
        process.send(message)
        return self._await(process, RENDER_SECONDS)

    def _await(self, process: WorkerProcess, seconds: float) -> Any:
        """Wait for the worker's answer; None if it has ended. Kills it and raises TemplateFailure after `seconds`."""
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
    """Renders templates in a pool of worker processes. Thread-safe."""

    def __init__(self):
        self._idle: queue.LifoQueue[_Renderer] = queue.LifoQueue()
        for _ in range(NUM_PROCESSES):
            self._idle.put(_Renderer())

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Render a template, Jinja source, and wait for its text; `variables` are plain JSON values.

        Raises BadTemplate, ConversationRefused, or TemplateFailure if it takes too long or ends its process;
        OverloadedError if all workers stay busy for the WAIT_SECONDS that it waits for one.
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
