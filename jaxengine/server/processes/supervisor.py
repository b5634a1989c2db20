"""`jaxengine serve`: supervisor of the engine's process, the API processes and their store, which it starts.

A process that ends unexpectedly is restarted, with a growing delay if that repeats; an engine that keeps dying without
having served ends the server. A process that hangs is killed first. SIGTERM, SIGINT or SIGHUP drains the server, a
second one ends it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxengine.config.engine_config import EngineConfig
from jaxengine.paths import HOME
from jaxengine.server.base.options import ServerConfig, is_loopback
from jaxengine.server.processes.sockets import listen, listen_at, reserve_port

logger = logging.getLogger(__name__)

# An engine that ends this often within so many seconds, without having served in between, is not restarted.
_MAX_DEATHS = 3
_DEATHS_SECONDS = 60.0
# An API process is always restarted: at once for so many deaths, then after delays that double. After more deaths
# before it was ever ready, the server gives up.
_FREE_DEATHS = 2
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
_MAX_UNREADY_DEATHS = 8
# Time beyond shutdown_timeout after which remaining processes are killed.
_END_SECONDS = 10.0
# Time in seconds that an engine's process has to notice SIGTERM before it is killed.
_HEARS_SECONDS = 0.2
# Time for a silent process to log its state before it is killed.
_EXPLAIN_SECONDS = 2.0
# Ports on which every API process listens.
_SHARED_PORTS = ("grpc_port", "metrics_port")
# Interval of the checks for silent processes.
_LOOK_SECONDS = 1.0
# A socket's path has at most 107 bytes, on some systems 103; names within the folder take up to 26.
_LONGEST_FOLDER = 70
# The same sources in every process, whatever else is installed. A folder already on sys.path keeps its place after
# the standard library.
# Collections during imports free nothing, and take a sixth of their time. What is imported stays, so that later ones
# need not look at it.
_START = (
    "import gc, sys; gc.disable(); {home!r} in sys.path or sys.path.insert(0, {home!r}); "
    "from jaxengine.server.processes.child import Child; child = Child(); "
    "from jaxengine.server.processes.{module} import main; gc.freeze(); gc.enable(); main(child)"
)


@dataclasses.dataclass(eq=False)
class _Child:
    """Child process: its role, its state, and the supervisor's ends of its pipes.

    Attributes:
      module: name of a module of jaxengine.server.processes, its role.
      index: number of an API process; 0 for others.
      process, events: the process, and the pipe with its events.
      ready, served: whether it has started, and whether it has answered a request.
      said: bytes of an event's line whose end has not been read yet.
      heard: time of its last event; asked: time of the unanswered order to explain its silence, or None.
      killed: whether it was killed because it hangs.
    """

    module: str
    index: int
    process: subprocess.Popen[bytes]
    events: Any
    ready: bool = False
    served: bool = False
    said: bytes = b""
    heard: float = 0.0
    asked: float | None = None
    killed: bool = False

    @property
    def is_engine(self) -> bool:
        """Whether this child is the engine's process."""
        return self.module == "engine_process"

    @property
    def is_api(self) -> bool:
        """Whether this child is an API process."""
        return self.module == "api_process"

    @property
    def name(self) -> str:
        """Name of this child in log lines."""
        if self.is_api:
            return f"API process {self.index}"
        return "the engine" if self.is_engine else "the store of responses"

    def order(self, order: str, **fields: Any) -> None:
        """Send an order to the child as a line of JSON on its standard input. fields: further values of the order. If
        the child has ended, only logs that at debug level.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"order": order, **fields}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            logger.debug("%s %d is gone", self.module, self.index)


class Supervisor:
    """Supervisor that runs a server until it is drained or fails."""

    def __init__(self, server: ServerConfig, engine: EngineConfig):
        """Bind the HTTP port, or the Unix domain socket, and, if they are not None, the gRPC and metrics ports. Port 0
        takes a free one. The HTTP socket listens; the others are only reserved. Starts no process. Raises ConfigError
        for an unusable host, port or path.
        """
        asked = {name: port for name in _SHARED_PORTS if (port := getattr(server, name)) is not None}
        self._reserved = {name: reserve_port(name, server.host, port) for name, port in asked.items()}
        ports = {name: each.getsockname()[1] for name, each in self._reserved.items()}
        # Last, so that no file is left if another port is in use.
        self._listener = listen(server.host, server.port) if server.uds is None else listen_at(server.uds)
        if server.uds is None:
            ports["port"] = self._listener.getsockname()[1]
        self._server = dataclasses.replace(server, **ports)
        self._engine = engine
        self._children: list[_Child] = []
        self._deaths: dict[tuple[str, int], list[float]] = {}
        self._num_restarts = 0
        self._unready_deaths: dict[tuple[str, int], int] = {}
        # (module, index) of a process -> time of its restart.
        self._starts: dict[tuple[str, int], float] = {}
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._announced = False
        self._draining = False
        self._status: int | None = None
        self._give_up_at = float("inf")

    def run(self) -> int:
        """Run the server until it ends, and return the exit status.

        The status is 0 after draining, 128 plus the number of a signal that ends the server at once, and 1 if processes
        fail repeatedly or do not end in time. If a process ends before all were ready, it is that process's status (2
        for unusable options or an unusable model), or 1 if a signal ended it or its status is 0. Installs handlers for
        SIGTERM, SIGINT and, unless it is ignored (nohup), SIGHUP, so it must run in the main thread. No child and no
        socket file is left when it returns.
        """
        self._warn()
        awake, wake = socket.socketpair()
        for end in (awake, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # nohup ignores SIGHUP, which otherwise comes when the terminal is closed.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: self._signals.append(number))
        self._selector.register(awake, selectors.EVENT_READ)
        with tempfile.TemporaryDirectory(prefix="jaxengine-", dir=_folder_for_sockets()) as run_dir:
            self._run_dir = Path(run_dir)
            try:
                self._start("engine_process", 0)
                if self._server.api_server_count > 1:
                    self._start("store_process", 0)
                for index in range(self._server.api_server_count):
                    self._start("api_process", index)
                while self._status is None:
                    self._wait(awake)
            finally:
                if engines := [child for child in self._children if child.is_engine and child.process.poll() is None]:
                    for child in engines:  # so that nobody takes the kernel that it may be proving for the reason
                        child.process.terminate()
                    time.sleep(_HEARS_SECONDS)
                for child in self._children:
                    child.process.kill()
                for child in self._children:
                    child.process.wait()
                if self._server.uds is not None:
                    Path(self._server.uds).unlink(missing_ok=True)
        return self._status

    def _wait(self, awake: socket.socket) -> None:
        """Wait at most one second for events, then act on them: read the events of children, handle signals in order,
        check each ready child that has a hang timeout for silence, and start the processes whose restart is due (none
        while draining).

        If the time for draining is over, only logs an error and sets the status to 1. awake: socket that becomes
        readable when a signal arrives.
        """
        left = self._give_up_at - time.monotonic()
        if left <= 0:
            logger.error("processes did not end in time; they are killed")
            self._status = 1
            return
        for key, _ in self._selector.select(min(left, _LOOK_SECONDS)):
            if key.fileobj is awake:
                awake.recv(4096)
            else:
                self._listen_to(key.data)
        while self._signals and self._status is None:
            self._end(self._signals.pop(0))
        for child in list(self._children):
            timeout = self._server.engine_hang_timeout if child.is_engine else self._server.api_hang_timeout
            if child.ready and timeout:
                self._look_at(child, timeout)
        for which in [which for which, at in self._starts.items() if time.monotonic() >= at and not self._draining]:
            del self._starts[which]
            self._start(*which)

    def _look_at(self, child: _Child, timeout: float) -> None:
        """Check a process for silence: after `timeout` seconds without an event log an error and order it to log its
        state; if it is still silent 2 s later, log an error and kill it once. To be called often, as each call takes at
        most one of these steps. `_ended` restarts the killed process.
        """
        now = time.monotonic()
        if child.asked is None:
            if now - child.heard > timeout:
                what = "finished a step" if child.is_engine else "had a turn of its event loop"
                logger.error("%s has not %s for %.1f s", child.name, what, now - child.heard)
                child.asked = now
                child.order("explain")
        elif now - child.asked > _EXPLAIN_SECONDS and not child.killed:
            logger.error("%s hangs; its process is killed", child.name)
            child.killed = True
            child.process.kill()

    def _start(self, module: str, index: int) -> None:
        """Start a child process, append it to the children, watch the pipe on which it reports events, and write its
        job as a line of JSON to its standard input. API processes also inherit the HTTP listener.

        module: role of the process, see _Child.module. index: number of an API process; 0 for others.
        """
        read, write = os.pipe()
        job = {
            "server": dataclasses.asdict(self._server),
            "engine": dataclasses.asdict(self._engine),
            "engine_address": f"ipc://{self._run_dir / 'engine'}",
            "store_path": str(self._run_dir / "responses"),
            "run_dir": str(self._run_dir),
            "index": index,
            "num_restarts": self._num_restarts,
            "name": f"api {index}" if module == "api_process" else module.removesuffix("_process"),
            "status_fd": write,
            "listen_fd": self._listener.fileno(),
        }
        # Modules are not imported from the current folder, and the terminal's signals reach this process only.
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START.format(home=str(HOME), module=module)],
            stdin=subprocess.PIPE,
            pass_fds=[write, self._listener.fileno()] if module == "api_process" else [write],
            process_group=0,
        )
        os.close(write)
        events = os.fdopen(read, "rb", buffering=0)
        child = _Child(module, index, process, events)
        self._children.append(child)
        self._selector.register(events, selectors.EVENT_READ, child)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed at once; _ended handles that
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()

    def _listen_to(self, child: _Child) -> None:
        """Read available events of a child, or handle its end (`_ended`) if its pipe is closed. Each event marks the
        child as ready, records the time, and withdraws an order to explain its silence; "served" also marks that it has
        answered a request. Prints the server's addresses once, when all children are ready for the first time.
        """
        said = child.events.read(4096)
        if not said:
            self._ended(child)
            return
        child.heard, child.asked = time.monotonic(), None
        *lines, child.said = (child.said + said).split(b"\n")
        for line in lines:
            event = json.loads(line)["event"]
            child.ready, child.served = True, child.served or event == "served"
        if not self._announced and all(each.ready for each in self._children):
            self._announced = True
            with contextlib.suppress(OSError):  # a full disk, or nobody reads it
                print(f"jaxengine is ready: {self.urls()}", flush=True)

    def _ended(self, child: _Child) -> None:
        """Handle the end of a child: stop watching it, then restart it or end the server, and log that.

        Before all were ready for the first time, the server's status becomes the child's own, or 1 if that is 0 or a
        signal. Afterwards an engine is restarted at once, but its third death within a minute without having served
        ends the server with status 1. Other processes are restarted at once for two deaths within a minute without
        having served, or for one before being ready, then after a delay that doubles from 0.5 to 30 s; the eighth death
        in a row before being ready ends the server with status 1. The engine is informed of an API process's end. While
        draining, restarts nothing and calls `_end_rest`.
        """
        self._selector.unregister(child.events)
        child.events.close()
        self._children.remove(child)
        status = child.process.wait()
        if self._draining:
            self._end_rest()
            return
        if not self._announced:
            # The process has printed the reason itself.
            self._status = status if status > 0 else 1
            return
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        who = "the engine's process" if child.is_engine else child.name
        now = time.monotonic()
        which = child.module, child.index
        deaths = self._deaths.setdefault(which, [])
        deaths[:] = [] if child.served else [then for then in deaths if now - then < _DEATHS_SECONDS]
        deaths.append(now)
        if child.is_engine:
            if len(deaths) >= _MAX_DEATHS:
                logger.error("%s %s, for the %d. time without having served: giving up", who, how, len(deaths))
                self._status = 1
                return
            logger.error("%s %s; it is started again", who, how)
            self._num_restarts += 1
            self._start(*which)
            return
        for each in self._children:
            if each.is_engine and child.is_api:
                each.order("gone", index=child.index)
        unready = self._unready_deaths[which] = 0 if child.ready else self._unready_deaths.get(which, 0) + 1
        if unready >= _MAX_UNREADY_DEATHS:
            logger.error("%s %s, for the %d. time before it was ready: giving up", who, how, unready)
            self._status = 1
            return
        doublings = max(len(deaths) - 1, unready) - _FREE_DEATHS
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0**doublings) if doublings >= 0 else 0.0
        logger.error("%s %s; it is started again%s", who, how, f" in {wait:g} s" if wait else "")
        self._starts[which] = now + wait

    def _end(self, number: int) -> None:
        """Begin to drain the server because of signal `number`: order the engine and the API processes to drain, and
        set the time at which remaining processes are killed. If the server is already draining or not ready yet, set
        its status to 128 + `number` instead, which ends it at once.
        """
        if self._draining or not self._announced:
            self._status = 128 + number
            return
        self._draining = True
        self._give_up_at = time.monotonic() + self._server.shutdown_timeout + _END_SECONDS
        # The engine first: it expects the API processes to leave from then on.
        for child in self._children:
            if child.is_engine or child.is_api:
                child.order("drain")
        self._end_rest()

    def _end_rest(self) -> None:
        """Order all remaining processes to stop once no API process is left. If no process is left at all, set the
        status to 0, which ends the server.
        """
        if not self._children:
            self._status = 0
        elif not any(child.is_api for child in self._children):
            for child in self._children:
                child.order("stop")

    def urls(self) -> str:
        """Return one text with the server's addresses: of HTTP, and of gRPC and metrics if they have ports."""
        server, scheme = self._server, "https" if self._server.ssl_certfile else "http"
        host = f"[{server.host}]" if ":" in server.host else server.host
        grpc = "" if server.grpc_port is None else f", gRPC at {host}:{server.grpc_port}"
        if server.metrics_port is not None:
            grpc += f", metrics at http://{host}:{server.metrics_port}/metrics"
        http = f"{scheme}://{host}:{server.port}" if server.uds is None else f"{scheme} at unix:{server.uds}"
        return http + grpc

    def _warn(self) -> None:
        """Log a warning for each key file that every user may read, and one if the server's address is not loopback and
        no API key is set. Raises OSError for a key file that is gone, ConfigError for one that cannot be used any more.
        """
        for name in ("api_key_file", "admin_key_file"):
            path = getattr(self._server, name)
            # Not an error: Kubernetes mounts secrets so, in containers with no other users.
            if path is not None and os.stat(path).st_mode & stat.S_IROTH:
                logger.warning("WARNING: anybody on this machine may read the keys in %s (%s): chmod 600", path, name)
        is_open = self._server.uds is None and not is_loopback(self._listener.getsockname()[0])
        if is_open and not self._server.api_keys():
            logger.warning(
                "WARNING: anybody who can reach %s may use this server: set --api-key or --api-key-file", self.urls()
            )


def _folder_for_sockets() -> str:
    """Return the user's folder for temporary files, or "/tmp" if that folder's path has more than 70 bytes, which is
    too long for the paths of sockets in it.
    """
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= _LONGEST_FOLDER else "/tmp"
