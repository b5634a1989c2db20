"""`jaxengine worker`: a process of an engine that host 0 runs (jaxengine.cluster.host0).

A worker joins, loads its parts of the model, compiles the same programs, and executes what host 0 sends. When host 0
ends or is lost the process exits with the reason, even if its devices are waiting.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from jaxengine.cluster.channel import (
    Channel,
    ClusterError,
    Message,
    connect_channel,
    read_cluster_key,
)
from jaxengine.cluster.host0 import BLAME_SECONDS, LOG_SECONDS, free_listener, join_jax, seal, unseal, versions
from jaxengine.cluster.order_taker import OrderTaker
from jaxengine.config.command_line import given_options
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.peers import Peers
from jaxengine.runner.start.open import load_runner, open_resolved
from jaxengine.scheduler.batches.buckets import Bucket

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
# Limit of queued messages. Host 0 waits for the results of its steps, so it is never far ahead.
_MAX_WAITING = 4096


class Host0(Peers):
    """A worker's connection to host 0. The process exits when the connection is lost."""

    def __init__(self, config: EngineConfig, node_rank: int):
        """Connect to host 0, send "hello", and start to receive its messages in the background.

        config: only its cluster options are used. node_rank: number of this process, 1 to nnodes - 1. Raises
        ConfigError for another number or a key that cannot be read, ClusterError if host 0 has another key or does not
        answer within cluster_timeout seconds. If host 0 refuses this worker later, the process exits.
        """
        if config.nnodes < 2 or not 1 <= node_rank < config.nnodes:
            allowed = f"1 to nnodes - 1, with nnodes of at least 2; nnodes is {config.nnodes}"
            raise ConfigError("node_rank", node_rank, allowed)
        self._config = config
        self._node_rank = node_rank
        self._key = read_cluster_key(config.cluster_key_file)
        self._messages: queue.Queue[Message] = queue.Queue(_MAX_WAITING)
        self._outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._channel = self._join()
        self._channel.send("hello", node_rank=node_rank, host=socket.gethostname(), versions=versions())
        for target in (self._follow, self._await_outputs):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    def agree(self, num_pages: int, programs: str) -> int:
        """Agree with the other processes on a number of pages, and return it.

        Sends host 0 the number of pages that fit here and the text that identifies this process's programs, and waits
        for the answer. Raises ClusterError if host 0's next message is not its plan, OSError if the connection has
        ended; the process exits if host 0 is lost while this waits.
        """
        self._channel.send("plan", num_pages=num_pages, programs=programs)
        return self.expect("plan").fields["num_pages"]

    def await_ready(self) -> None:
        """Tell host 0 that this process has compiled its programs, and return without waiting.

        Raises OSError if the connection has ended.
        """
        self._channel.send("ready")

    def send(self, op: str, arrays: Sequence[np.ndarray] = (), **fields: Any) -> None:
        """Send host 0 a message: operation `op` with its arrays and fields.

        An OSError of a lost connection is ignored.
        """
        with contextlib.suppress(OSError):
            self._channel.send(op, arrays, **fields)

    def next(self) -> Message:
        """Wait for the next message, remove it from the queue, and return it."""
        return self._messages.get()

    def expect(self, op: str) -> Message:
        """Wait for the next message and return it. Raises ClusterError if its operation is not `op`."""
        message = self.next()
        if message.op != op:
            raise ClusterError(f"host 0 sent {message.op!r} instead of {op!r}")
        return message

    def watch(self, output: Any) -> None:
        """Queue a step's output, for another thread to await, and return at once.

        No caller reads the output in this process, but its failure must end the process.
        """
        self._outputs.put(output)

    def fail(self, error: BaseException) -> NoReturn:
        """Wait BLAME_SECONDS, report an error to host 0, log it, and exit the process with status 1."""
        time.sleep(BLAME_SECONDS)  # if a lost process is the cause, its detection ends this process first
        reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            self._channel.send("failed", reason=reason[:4000])
        self.leave(reason)

    def leave(self, reason: str | None = None) -> NoReturn:
        """Exit the process at once, even if a thread is waiting for other processes.

        reason: reason of a failure, which is logged; the status is then 1. None sends "bye" to host 0 and exits with
        status 0; raises OSError if that cannot be sent.
        """
        if reason is None:
            self._channel.send("bye")
        else:
            logger.error("node rank %d ends: %s", self._node_rank, reason)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if reason is None else 1)

    def open_relay(self) -> int:
        """Open a port of this machine that is relayed to jax's coordination service in host 0's process; return the
        port.

        A thread accepts connections until this process ends. This end of a connection stays open, as jax's client would
        exit the process if it ended.
        """
        listener = free_listener()

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=self._relay, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, name="relay", daemon=True).start()
        return listener.getsockname()[1]

    def _relay(self, connection: socket.socket) -> None:
        """Relay a connection of jax's client to host 0 until either end closes.

        This thread relays what the client sends, and another thread what host 0 sends. Exits the process if host 0
        cannot be reached.
        """
        try:
            channel = connect_channel(self._config.master_addr, self._config.master_port, self._key)
            channel.send("coordinator")
        except (ClusterError, OSError) as error:
            self.leave(f"host 0 is lost: {error}")
        for each in (connection, channel.connection):
            each.settimeout(None)
        threading.Thread(target=self._unseal, args=(channel, connection), daemon=True).start()
        seal(connection, channel)
        channel.close()

    def _unseal(self, channel: Channel, connection: socket.socket) -> None:
        """Write the bytes that host 0 sends over the channel to a connection of jax's client, until either end closes.

        Exits the process for any other message.
        """
        try:
            unseal(channel, connection)
        except ClusterError as error:
            self.leave(f"host 0 is lost: {error}")

    def _join(self) -> Channel:
        """Connect to host 0, which may not have started yet, and return the channel.

        Tries again every _RETRY_SECONDS, and logs that now and then. Raises ClusterError after cluster_timeout seconds,
        and at once if host 0 has another key.
        """
        config = self._config
        where = f"{config.master_addr}:{config.master_port}"
        deadline = time.monotonic() + config.cluster_timeout
        said = time.monotonic()
        while True:
            try:
                return connect_channel(config.master_addr, config.master_port, self._key)
            except OSError as error:
                now = time.monotonic()
                if now >= deadline:
                    reason = f"host 0 was not at {where} within {config.cluster_timeout} s: {error}"
                    raise ClusterError(reason) from None
                if now - said >= LOG_SECONDS:
                    logger.info("waiting for host 0 at %s (%s), %.0f s left", where, error, deadline - now)
                    said = now
            time.sleep(_RETRY_SECONDS)

    def _follow(self) -> None:
        """Receive host 0's messages until its message "end"; exit the process if host 0 is lost."""
        try:
            self._channel.follow(self._handle)
        except (ClusterError, OSError) as error:
            self.leave(f"host 0 at {self._config.master_addr}:{self._config.master_port} is lost: {error}")

    def _handle(self, message: Message) -> bool:
        """Queue a message of host 0, or exit the process if it reports a failure or refusal; return whether more are
        expected.
        """
        if message.op in ("failed", "refused"):
            self.leave(f"host 0 says: {message.fields['reason']}")
        self._messages.put(message)
        return message.op != "end"

    def _await_outputs(self) -> None:
        """Wait for the outputs of `watch`, one after another; at the first error report it and exit the process."""
        try:
            while True:
                jax.block_until_ready(self._outputs.get())
        except Exception as error:
            self.fail(error)


@jax.transfer_guard("allow")
def run(args: argparse.Namespace) -> int:
    """Join the engine of host 0, serve until host 0 ends, and exit the process: with status 0 if it ended the engine,
    else 1.

    args: cluster options and node_rank. Never returns. Raises ConfigError or ClusterError if it cannot join; later
    errors are logged, reported to host 0, and end the process.
    """
    host0 = Host0(EngineConfig.from_options(**given_options(args, EngineConfig)), args.node_rank)
    try:
        config = EngineConfig.from_options(**host0.expect("start").fields["options"])
        join_jax(host0.open_relay(), config.nnodes, args.node_rank, config.cluster_timeout)
        runner = load_runner(*open_resolved(config), peers=host0)
        output = serve(host0, runner)
        jax.block_until_ready(output)
    except Exception as error:
        logger.exception("the worker has failed")
        host0.fail(error)
    host0.leave()


def serve(host0: Host0, runner: ModelRunner) -> Any:
    """Execute the steps, changes of state, orders and readings of the expert load that host 0 sends, until its message
    "end"; return the last step's output.

    runner: this process's part of the engine. Returns None if no forward pass was executed, or the last one was not
    sampled. Raises ClusterError for an operation or a shape that this engine does not have, and for an epilogue without
    a forward pass that still awaits it.
    """
    buckets, pending, orders = set(runner.buckets), None, OrderTaker(runner, host0.send)
    while (message := host0.next()).op != "end":
        if message.op == "forward":
            bucket = Bucket(**message.fields)
            if bucket not in buckets:
                raise ClusterError(f"host 0 sent a step of the shape {bucket}, which is none of this engine's")
            pending = runner.forward(bucket, *message.arrays)
        elif message.op in runner.epilogues:
            if pending is None or pending.is_sampled:
                raise ClusterError(f"host 0 sent {message.op!r} without a forward pass before it")
            output = runner.run_epilogue(message.op, pending)
            if runner.epilogues[message.op].ends:
                pending.sampled = output
                host0.watch(output)
        elif message.op == "change":
            runner.change_state(message.fields["name"], *message.arrays)
        elif message.op == "order":
            orders.take(message)
        elif message.op == "expert load":
            runner.extension("experts").load()
        else:
            raise ClusterError(f"host 0 sent {message.op!r} while serving")
    return None if pending is None else pending.sampled
