"""`jaxengine serve` as a user runs it, for tests: started, waited for, looked into, ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_READY = re.compile(
    r"jaxengine is ready: (?P<url>https?://[^\s,]+)"
    r"(, gRPC at (?P<grpc>[^\s,]+))?(, metrics at (?P<metrics>\S+))?$"
)


@dataclass
class ServerProcess:
    """A running server.

    Attributes:
      base_url: of HTTP, without a path.
      grpc_address: host:port, None without gRPC. metrics_url: with path, None without a port of its own.
      run_dir_parent: where it makes its run folder.
    """

    process: subprocess.Popen[str]
    base_url: str
    grpc_address: str | None
    metrics_url: str | None
    run_dir_parent: Path
    _errors: Any

    @property
    def pid(self) -> int:
        """The supervisor's."""
        return self.process.pid

    @property
    def engine_pid(self) -> int:
        """The engine's process; waits for one while it is started again."""
        return _poll(lambda: next(iter(self._children("engine_process")), None), "an engine's process")

    @property
    def engine_address(self) -> str:
        """Of the engine's socket, in the server's run folder."""
        (folder,) = self.run_dir_parent.glob("jaxengine-*")
        return f"ipc://{folder}/engine"

    @property
    def api_pids(self) -> list[int]:
        return self._children("api_process")

    @property
    def store_pids(self) -> list[int]:
        return self._children("store_process")

    def errors(self) -> str:
        """What was written to standard error so far."""
        return Path(self._errors.name).read_text()

    def stop(self, *, signals: int = 1, timeout: float = 30.0) -> int:
        """Sends SIGTERM so many times; the exit status."""
        for _ in range(signals):
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def remove(self) -> None:
        """Ends the server, if it has not ended, and forgets what it wrote."""
        if self.process.poll() is None:
            self.stop()
        self._errors.close()
        shutil.rmtree(self.run_dir_parent)

    def _children(self, module: str) -> list[int]:
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        found = [int(pid) for pid in path.read_text().split()] if path.exists() else []
        return [pid for pid in found if f"server.processes.{module}".encode() in _command(pid)]


def start_server(options: dict[str, Any], *, wait: float = 600.0, **changes: Any) -> ServerProcess:
    """Starts a server with options of EngineConfig and ServerConfig; returns when it is ready."""
    parent = Path(tempfile.mkdtemp(prefix="serve-"))
    command, errors = [sys.executable, "-m", "jaxengine", "serve"], (parent / "stderr").open("w")
    options = {"port": 0, "disable_access_log": True, **options, **changes}
    command += [options.pop("model"), *_flags(options)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "TMPDIR": str(parent)}
    )
    timer = threading.Timer(wait, process.kill)
    timer.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := _READY.search(line.strip()):
                return ServerProcess(process, *found.group("url", "grpc", "metrics"), parent, errors)
    finally:
        timer.cancel()
    process.wait()
    errors.close()
    said = (parent / "stderr").read_text()[-4000:]
    shutil.rmtree(parent)
    raise AssertionError(f"the server ended with {process.returncode}: {said}")


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is not only waiting to be taken note of."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _poll(look: Any, what: str, seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"there was not {what} within {seconds} s"
        time.sleep(0.01)
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _flags(options: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag[2:])
        elif isinstance(value, (list, tuple)):
            flags += [f"{flag}={item}" for item in value]
        elif value is not None:
            flags.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags
