"""Host 0 of an engine of several processes, the one that schedules: its side of the connections to the workers.

Host 0 announces each program to the workers (worker.py) before it executes the program itself: all execute the same
programs in the same order. It admits workers and detects lost ones. jax's start-up traffic passes through the same
port, master_port. Devices exchange data over connections of their own, in a network that must be trusted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from jaxengine.cluster.channel import Channel, ClusterError, Message, accept_channel, close_connection, read_cluster_key
from jaxengine.cluster.orders import OpenOrders
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.runner.peers import _T, Peers
from jaxengine.version import __version__

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0
_END_SECONDS = 10.0
# Seconds after a failed exchange between devices within which the loss of a process counts as its cause.
BLAME_SECONDS = 5.0
_CHECK_SECONDS = 0.05
# The most connections that are not authenticated yet; one more closes the oldest. A worker authenticates within
# milliseconds, so strangers cannot keep it out.
_MAX_GREETINGS = 64
# Time after which jax ends a process because another one is lost. It must never do so: this module does, and logs why.
_NEVER_SECONDS = 10**6


@dataclass(eq=False)
class _Worker:
    """State of a worker process, as far as host 0 knows it.

    Attributes:
      node_rank: its number, 1 to nnodes - 1.
      host: its host name and address, for messages.
      channel: its connection.
      plan: its message "plan"; None until that arrives.
      ready: whether it has compiled its programs.
      ended: whether it has sent "bye" or is lost.
    """

    node_rank: int
    host: str
    channel: Channel
    plan: Message | None = None
    ready: bool = False
    ended: bool = False

    def __str__(self) -> str:
        """Return the worker's name in messages: its node rank and host."""
        return f"node rank {self.node_rank} ({self.host})"


class Cluster(Peers):
    """Host 0's side of an engine of several processes. After construction jax has the devices of all processes.

    Once a process is lost every call raises ClusterError, and the interpreter exits with status 1.

    Attributes:
      orders: sends orders to the workers and collects their answers.
    """

    def __init__(self, config: EngineConfig):
        """Listen for workers, wait until all have joined, send them the options, and initialise jax.distributed.

        This process must not have used jax's devices before. Starts threads and registers an exit handler.

        Raises:
          ConfigError: an option is invalid, or jax.distributed is initialised already.
          ClusterError: workers are missing after config.cluster_timeout seconds; names them.
        """
        self._config = config
        self._key = read_cluster_key(config.cluster_key_file)
        if jax.distributed.is_initialized():
            allowed = "1 where jax.distributed was initialised before: one engine over several processes in each"
            raise ConfigError("nnodes", config.nnodes, allowed)
        self._changed = threading.Condition()
        self._workers: dict[int, _Worker] = {}
        self._failure: str | None = None
        self._started = self._closing = False
        self._greetings: dict[socket.socket, None] = {}
        with free_listener() as found:
            self._coordinator_port = found.getsockname()[1]
        self._listener = _listen(config.master_addr, config.master_port)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        later = lambda function: self._calls.put((function, Future()))  # noqa: E731
        self.orders = OpenOrders(self.announce, self._check_open, later, config.nnodes - 1)
        for target in (self._accept, self._call):
            threading.Thread(target=target, name=f"jaxengine {target.__name__}", daemon=True).start()
        self._pid = os.getpid()
        atexit.register(self._leave)
        try:
            self._await("join", lambda worker: True)
            options = _options(config)
            self.announce("start", options=options)
            self.run(lambda: join_jax(self._coordinator_port, config.nnodes, 0, config.cluster_timeout))
        except BaseException as error:
            self.shutdown(str(error))
            raise

    def agree(self, num_pages: int, programs: str) -> int:
        """Wait until all workers have loaded the model, then return the smallest number of pages of any process, and
        send it to all of them.

        num_pages: number of pages of this process. programs: text that identifies the programs that this process runs.
        Raises ClusterError if a worker has other programs, is lost, or is not done in time.
        """
        self._await("load the model", lambda worker: worker.plan is not None)
        plans = {worker: worker.plan.fields for worker in self._workers.values() if worker.plan is not None}
        for worker, plan in plans.items():
            if plan["programs"] != programs:
                problem = "has another model, other sizes or other kernels (kernel_proof) than host 0"
                raise ClusterError(f"{worker} {problem} under the same options")
        num_pages = min(num_pages, *(plan["num_pages"] for plan in plans.values()))
        self.announce("plan", num_pages=num_pages, programs=programs)
        return num_pages

    def await_ready(self) -> None:
        self._await("compile", lambda worker: worker.ready)

    def call(self, op: str, arrays: Sequence[np.ndarray], function: Callable[[], _T], **fields: Any) -> _T:
        """Announce an operation to the workers, then `run` the function that executes it here; return its result.

        arrays, fields: content of the message. Raises ClusterError if a process is lost, and the errors of `function`.
        """
        self.announce(op, arrays, **fields)
        return self.run(function)

    def announce(self, op: str, arrays: Sequence[np.ndarray] = (), **fields: Any) -> None:
        """Send all workers the operation `op`, a key of OPERATIONS, which this process will execute too; return without
        waiting.

        arrays, fields: content of the message. Raises ClusterError if a process is lost.
        """
        self.check()
        for worker in self._workers.values():
            try:
                worker.channel.send(op, arrays, **fields)
            except OSError as error:
                self._lose(worker, str(error))
                self.check()

    def run(self, function: Callable[[], _T]) -> _T:
        """Call `function` on another thread, because devices may wait forever for a lost process; return its result.

        Raises ClusterError once a process is lost. An error of `function` is raised after up to BLAME_SECONDS, as
        ClusterError if the loss of a process is detected in the meantime.
        """
        outcome: Future[_T] = Future()
        self._calls.put((function, outcome))
        with self._blaming():
            while not (outcome.done() or wait([outcome], _CHECK_SECONDS).done):
                self.check()
            return outcome.result()

    def check(self) -> None:
        """Raise ClusterError if a process is lost."""
        if self._failure is not None:
            raise ClusterError(self._failure)

    def _check_open(self) -> None:
        """Raise ClusterError if a process is lost, or once the engine shuts down."""
        self.check()
        if self._closing:
            raise ClusterError("the engine has been shut down")

    def shutdown(self, reason: str | None = None) -> None:
        """Send the workers "end", or "failed" with `reason`, wait up to _END_SECONDS for them, and close connections.

        reason: reason of a failure; None for a normal end. A second call does nothing, nor does one in a fork of this
        process, which shares the connections.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
            workers = list(self._workers.values())  # a worker that leaves before the start is removed in the meantime
        for worker in workers:
            with contextlib.suppress(OSError):  # the worker may be gone already
                if reason is None:
                    worker.channel.send("end")
                else:
                    worker.channel.send("failed", reason=reason)
        with self._changed:
            self._changed.wait_for(lambda: all(worker.ended for worker in workers), _END_SECONDS)
        close_connection(self._listener)
        for worker in workers:
            worker.channel.close()

    def _await(self, what: str, arrived: Callable[[_Worker], bool]) -> None:
        """Wait until `arrived` is true for all workers, at most config.cluster_timeout seconds; log now and then who is
        missing.

        what: what the workers do at this point, a verb for messages ("join"). After the return a worker that leaves is
        lost, and no other may join. Raises ClusterError with the node ranks that are missing, or if a process is lost.
        """
        config = self._config
        deadline = time.monotonic() + config.cluster_timeout
        said = time.monotonic()
        with self._changed:
            while missing := sorted(
                set(range(1, config.nnodes)) - {rank for rank, worker in self._workers.items() if arrived(worker)}
            ):
                self.check()
                now = time.monotonic()
                if now >= deadline:
                    raise ClusterError(f"{_named(missing)} did not {what} within {config.cluster_timeout} s")
                if now - said >= LOG_SECONDS:
                    logger.info("waiting for %s to %s, %.0f s left", _named(missing), what, deadline - now)
                    said = now
                self._changed.wait(min(deadline - now, LOG_SECONDS))
            self._started = True  # from now on a worker that leaves is lost, and none may join

    def _call(self) -> None:
        """Call the functions that `run` and `orders.leave` queue, one by one, forever, and set their futures."""
        while True:
            function, outcome = self._calls.get()
            try:
                outcome.set_result(function())
            except BaseException as error:
                outcome.set_exception(error)
            del function, outcome  # else they hold arrays until the next call

    def _leave(self) -> None:
        """Exit handler: end the workers, and if a process was lost exit this process at once with status 1.

        It must run before jax's own, which waits for devices that wait for the lost process.
        """
        self.shutdown()
        if self._failure is not None and os.getpid() == self._pid:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        """Context manager that turns an error of its block into a ClusterError if the loss of a process is known or is
        detected within BLAME_SECONDS.
        """
        try:
            yield
        except ClusterError:
            raise
        except Exception as error:
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, BLAME_SECONDS)
            if self._failure is not None:
                raise ClusterError(self._failure) from error
            raise

    def _accept(self) -> None:
        """Accept connections until the listener is closed, and start a thread that serves each.

        If more than _MAX_GREETINGS connections are not authenticated yet, the oldest of them is closed.
        """
        while True:
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError:
                return  # closed
            with self._changed:
                self._greetings[connection] = None
                stranger = next(iter(self._greetings)) if len(self._greetings) > _MAX_GREETINGS else None
                if stranger is not None:
                    del self._greetings[stranger]
            if stranger is not None:
                close_connection(stranger)
            threading.Thread(target=self._greet, args=(connection, address), daemon=True).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        """Serve a new connection, from its handshake to its end, then close it. One that is refused, or fails later, is
        logged with `address`.

        It belongs to a worker, or carries jax's start-up traffic of one.
        """
        outcome = "was refused"
        try:
            try:
                channel = accept_channel(connection, self._key)
            finally:
                with self._changed:
                    self._greetings.pop(connection, None)
            hello = channel.receive()
            if hello.op == "coordinator":
                outcome = "with jax's start-up traffic has failed"
                self._relay(channel)
            else:
                self._follow(self._enter(channel, hello, address))
        except (ClusterError, OSError) as error:
            logger.warning("a connection from %s %s: %s", address, outcome, error)
        finally:
            close_connection(connection)

    def _enter(self, channel: Channel, hello: Message, address: str) -> _Worker:
        """Admit a worker by its first message, `hello`, log that, and return the worker.

        address: from which it connects, for messages. Wakes the threads that wait for workers. If its node rank is
        invalid or taken, its versions differ, or the engine has started, sends it "refused" and raises ClusterError
        with the reason. Raises ClusterError at once for another first message.
        """
        if hello.op != "hello":
            raise ClusterError(f"its first message is {hello.op!r}")
        rank, nnodes = hello.fields["node_rank"], self._config.nnodes
        worker = _Worker(rank, f"{hello.fields['host'][:100]}, {address}", channel)
        with self._changed:
            reason = None
            if not 1 <= rank < nnodes:
                reason = f"node_rank is {rank}; allowed: 1 to {nnodes - 1} with nnodes {nnodes}"
            elif hello.fields["versions"] != versions():
                reason = f"it has {hello.fields['versions'][:200]}, host 0 has {versions()}"
            elif self._started or self._closing:
                reason = "the engine has already started"
            elif rank in self._workers:
                reason = f"node_rank {rank} is taken by {self._workers[rank]}"
            else:
                self._workers[rank] = worker
                self._changed.notify_all()
        if reason is not None:
            channel.send("refused", reason=reason)
            raise ClusterError(reason)
        logger.info("%s has joined", worker)
        return worker

    def _follow(self, worker: _Worker) -> None:
        """Receive a worker's messages until it ends; record its loss if the connection fails or a message is
        invalid.
        """
        try:
            worker.channel.follow(lambda message: self._handle(worker, message))
        except (ClusterError, OSError) as error:
            self._lose(worker, str(error))

    def _handle(self, worker: _Worker, message: Message) -> bool:
        """Handle a worker's message, wake the threads that wait for it, and return whether more are expected.

        "failed" records the loss of the worker, "plan" and "ready" are stored, "bye" marks it as ended, "answer" goes
        to the orders. Raises ClusterError for another message.
        """
        if message.op == "failed":
            self._lose(worker, message.fields["reason"])
            return False
        with self._changed:
            if message.op == "plan":
                worker.plan = message
            elif message.op == "ready":
                worker.ready = True
            elif message.op == "bye":
                worker.ended = True
            elif message.op == "answer":
                self.orders.answered(str(worker), message)
            else:
                raise ClusterError(f"it sent {message.op!r}")
            self._changed.notify_all()
        return message.op != "bye"

    def _lose(self, worker: _Worker, reason: str) -> None:
        """Mark a worker as ended and record its loss, unless it had ended before.

        Before the start it is removed and may join again. Afterwards the engine fails: every call raises ClusterError
        with this `reason`, and all workers are sent "failed". Logs the loss. After a first loss, or during shutdown,
        only the mark is set.
        """
        with self._changed:
            first = self._started and not self._closing and self._failure is None and not worker.ended
            worker.ended = True
            if not self._started:
                self._workers.pop(worker.node_rank, None)
                logger.warning("%s has left: %s", worker, reason)
            elif first:
                self._failure = f"{worker} is lost: {reason}"
                logger.error("%s", self._failure)
            self._changed.notify_all()
        if first:
            for other in self._workers.values():
                with contextlib.suppress(OSError):  # it may be gone as well
                    other.channel.send("failed", reason=f"{worker} is lost: {reason}")

    def _relay(self, channel: Channel) -> None:
        """Connect a worker's channel with jax's coordination service in this process, until the worker closes it.

        This thread relays what the worker sends, and another thread what the service sends. Raises ClusterError for
        another message than "bytes", OSError if the service cannot be reached within config.cluster_timeout seconds.
        """
        with socket.create_connection(("127.0.0.1", self._coordinator_port), self._config.cluster_timeout) as service:
            for each in (channel.connection, service):
                each.settimeout(None)
            threading.Thread(target=seal, args=(service, channel), daemon=True).start()
            try:
                unseal(channel, service)
            finally:
                close_connection(service)


def join_jax(port: int, num_processes: int, process_id: int, timeout: int) -> None:
    """Initialise jax.distributed for this process, wait for all processes, and discover all devices.

    Sets jax's options so that the loss of another process does not end this one. num_processes: number of processes of
    the engine. process_id: rank of this process, from 0 on. port: port of this machine, on which process 0 has jax's
    coordination service and the others have a relay to it. timeout: seconds after which jax aborts this process if
    others are missing.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", True)  # jax does not end this process when another one is lost
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        num_processes,
        process_id,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout,
        coordinator_bind_address=f"127.0.0.1:{port}",
        heartbeat_timeout_seconds=_NEVER_SECONDS,
        shutdown_timeout_seconds=int(_END_SECONDS),
    )
    jax.devices()


def seal(source: socket.socket, channel: Channel) -> None:
    """Send the bytes of the socket `source` over a channel, as messages "bytes", until either end is closed."""
    with contextlib.suppress(OSError):
        while part := source.recv(1 << 16):
            channel.send("bytes", [np.frombuffer(part, np.uint8)])


def unseal(channel: Channel, sink: socket.socket) -> None:
    """Write the bytes that `seal` sends at the other end of the channel to the socket `sink`, until either end is
    closed.

    Raises ClusterError for another message.
    """
    with contextlib.suppress(OSError):
        while True:
            sink.sendall(channel.receive_bytes())


def free_listener() -> socket.socket:
    """Return a listening socket on a free port of the loopback interface."""
    return socket.create_server(("127.0.0.1", 0))


def versions() -> str:
    """Return the versions of jaxengine and jax, equal in all processes so that they compile the same programs."""
    return f"jaxengine {__version__} with jax {jax.__version__}"


def _options(config: EngineConfig) -> dict[str, Any]:
    """Return the options of `config` for the workers, as JSON values.

    Left out are the key file and the hub token, of which each process has its own, and the steering vectors, whose
    files only this process reads.
    """
    chosen = {field.name: getattr(config, field.name) for field in fields(config)}
    for name in ("compilation_config", "structured_outputs_config"):
        chosen[name] = vars(chosen[name])
    own = ("cluster_key_file", "hf_token", "steering_vectors")
    return {name: value for name, value in chosen.items() if name not in own}


def _listen(address: str, port: int) -> socket.socket:
    """Return a listening socket at an address and port of this machine. Raises ConfigError if that is not possible."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address, port), family=family, backlog=_MAX_GREETINGS)
    except OSError as error:
        problem = f"host 0 cannot listen on {address}:{port} ({error.strerror})"
        advice = "give an address of this machine as master_addr and a free port as master_port"
        raise ConfigError.because("master_addr:master_port", problem, advice) from None


def _named(ranks: Sequence[int]) -> str:
    """Return the name of one or more node ranks in messages, such as "node ranks 1, 3"."""
    return f"node rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
