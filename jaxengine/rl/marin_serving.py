"""jaxengine as a ServingBackend of marin: a server of one model on this machine for the duration of a context.

Imports nothing of marin: both ends are protocols. A backend is its settings, which can be pickled.
"""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_READY = re.compile(r"jaxengine is ready: (https?://\S+?)(?:,|$)")
# Time in which the server may end running requests and then its processes, before it is killed.
_END_SECONDS = 60.0


@dataclass(frozen=True)
class ServedModel:
    """A running server of one model.

    Attributes:
      base_url: URL of the server, without /v1.
      model_id: name of the model in requests.
      process: the server.
    """

    base_url: str
    model_id: str
    process: subprocess.Popen[str]

    def check_alive(self) -> None:
        """Raise RuntimeError if the server has ended."""
        if (status := self.process.poll()) is not None:
            raise RuntimeError(f"the server of {self.model_id} ended with status {status}")


@dataclass(frozen=True)
class JaxengineBackend:
    """marin's ServingBackend over `jaxengine serve`.

    Attributes:
      name: name of the backend, for marin.
      startup_timeout_seconds: time after which a server that is not ready is ended.
      extra_args: further words of the command line.
    """

    name: str = "jaxengine"
    startup_timeout_seconds: float = 1800.0
    extra_args: tuple[str, ...] = ()

    @contextlib.contextmanager
    def serve(self, spec: Any) -> Iterator[ServedModel]:
        """Start a server for `spec`, a ModelSpec, on a free port of localhost; yield it once it is ready, and end it
        when the context closes, which may take twice _END_SECONDS.

        The chips are divided among replicas of tensor_parallel_size each. The server's standard output is logged; its
        errors go to this process's stderr. Raises ValueError if tensor_parallel_size does not divide num_chips,
        RuntimeError if the server ends or is not ready in time.
        """
        replicas, rest = divmod(spec.num_chips, spec.tensor_parallel_size)
        if rest or not replicas:
            chips = f"num_chips, {spec.num_chips}"
            raise ValueError(f"tensor_parallel_size must divide {chips}, got {spec.tensor_parallel_size}")
        words = ["--host", "127.0.0.1", "--port", "0", "--served-model-name", spec.model, "--dtype", spec.dtype]
        words += ["--tensor-parallel-size", str(spec.tensor_parallel_size), "--data-parallel-size", str(replicas)]
        if spec.max_model_len is not None:
            words += ["--max-model-len", str(spec.max_model_len)]
        with contextlib.ExitStack() as stack:
            if spec.chat_template_content is not None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxengine-"))
                template = Path(folder, "chat_template.jinja")
                template.write_text(spec.chat_template_content, encoding="utf-8")
                words += ["--chat-template", str(template)]
            command = [sys.executable, "-m", "jaxengine", "serve", "--model", spec.model_path, *words, *self.extra_args]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            output = _Output(process)
            stack.callback(output.join, _END_SECONDS)
            stack.callback(_end, process)
            yield ServedModel(output.url(self.startup_timeout_seconds), spec.model, process)


class _Output(threading.Thread):
    """Thread that reads and logs a server's standard output, and stores the URL in it."""

    def __init__(self, process: subprocess.Popen[str]):
        """Start the thread. process: its stdout is a text pipe."""
        super().__init__(name="jaxengine-serve", daemon=True)
        self._process = process
        self._url: str | None = None
        self._decided = threading.Event()
        self.start()

    def run(self) -> None:
        """Read and log lines until the output ends; wake `url` at the line that names the server's URL, and at the
        end.
        """
        assert self._process.stdout is not None
        for line in map(str.rstrip, self._process.stdout):
            logger.info("%s", line)
            if match := _READY.search(line):
                self._url = match[1]
                self._decided.set()
        self._decided.set()

    def url(self, seconds: float) -> str:
        """Wait at most `seconds` until the server is ready; return its URL. Raises RuntimeError if the server ends or
        is not ready in time.
        """
        if not self._decided.wait(seconds):
            raise RuntimeError(f"the server was not ready within {seconds} s")
        if self._url is None:
            raise RuntimeError(f"the server ended with status {self._process.wait()} before it was ready")
        return self._url


def _end(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM to a server and wait up to _END_SECONDS for its end; then kill it without waiting."""
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
