"""Engine's process: one engine with token ids in and out, which serves the API processes over a ZeroMQ socket.

Between two steps it handles their messages; after a step it sends each of them one message. API processes handle text
and HTTP.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import gc
import logging
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
import zmq

from jaxengine.api.core import EngineCore
from jaxengine.cluster.channel import ClusterError
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.inputs.encoder import KEY_REPLICATED
from jaxengine.engine.output import EngineOutput
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.params.errors import ModelFileError
from jaxengine.scheduler.base.errors import OverloadedError, RequestError, UnknownAdapterError
from jaxengine.scheduler.base.request import FinishReason, Request
from jaxengine.server.adapters.lora import load_adapters
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.link import messages, submit_messages
from jaxengine.server.link.media_messages import MissingMediaError
from jaxengine.server.link.media_receiver import MediaReceiver
from jaxengine.server.link.messages import Call, EndsDelivered, Failure, Finish, Hello, Load, Reply, Update, Welcome
from jaxengine.server.link.open_inputs import packed_source
from jaxengine.server.link.queue_limits import QueueLimits, RetryEstimate
from jaxengine.server.link.submit_messages import Submit
from jaxengine.server.processes.child import Child, alive_seconds

logger = logging.getLogger(__name__)

# Unread updates after which an API process counts as lost.
_MAX_UNREAD = 10_000
# Flags of a message's parts, identity and payload. Plain integers, since combining flags takes longer than sending.
_FIRST, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)


@dataclass(eq=False)
class _Client:
    """Connection of an API process.

    Attributes:
      identity: ZeroMQ's identity of the connection.
      index: number of the process. number: number of the connection, counted from 1.
      media: reads its images.
      requests: its requests whose end is not counted yet, by handle.
      received: number of the last Submit that was read.
      last_state: (received, load, media resets) that was last sent to it; None to send them again.
      num_updates: number of updates that were sent to it.
      refused, replies: answers to Submits and Calls that were not sent yet.
    """

    identity: bytes
    index: int
    number: int
    media: MediaReceiver
    requests: dict[int, Request] = field(default_factory=dict)
    received: int = 0
    last_state: tuple[int, Load, int] | None = None
    num_updates: int = 0
    refused: list[Reply] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)


class EngineServer:
    """Server of the engine for the API processes, until the supervisor's order to stop."""

    def __init__(self, core: EngineCore, address: str, config: ServerConfig, tell: Callable[[str], None]):
        """Listen at `address`, a ZeroMQ address. Raises zmq.ZMQError if that is impossible, and TypeError for a
        plugin's model whose configuration cannot be sent to API processes.

        tell: called with "served" once, when the first request has ended, and repeatedly with "alive" from the stepping
        thread.
        """
        self.core = core
        self._tell = tell
        self._served = self._draining = False
        self._alive_seconds = alive_seconds(config.engine_hang_timeout)
        self._alive_at = 0.0
        scheduler = core.engine.scheduler
        num_slots = scheduler.config.max_num_seqs * scheduler.config.num_ranks
        self._limits = QueueLimits.of(num_slots, config.max_num_queued_reqs, config.max_num_queued_tokens)
        self._retry = RetryEstimate()
        self._load = Load()
        self._clients: dict[bytes, _Client] = {}
        self._by_number: dict[int, _Client] = {}
        self._num_clients = 0
        self._num_api_processes = config.api_server_count
        self._source = packed_source(core.source)
        self._media_kind = core.config.mm_cache_kind(config.api_server_count)
        self._num_media_resets = 0
        self._aborted: list[Request] = []
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._awake, self._wake = os.pipe()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in ((zmq.ROUTER_MANDATORY, 1), (zmq.SNDHWM, _MAX_UNREAD), (zmq.RCVHWM, 0), (zmq.LINGER, 0)):
            self._socket.setsockopt(option, value)
        self._socket.bind(address)
        # The base class's send, without the overhead of zmq.Socket's.
        self._send_part = super(zmq.Socket, self._socket).send
        self._news = [(self._socket, int(zmq.POLLIN))]
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._awake, zmq.POLLIN)

    def order(self, order: dict[str, Any]) -> None:
        """Queue an order of the supervisor for the loop, a JSON object whose "order" is "stop", or "gone" with the
        "index" of an API process. Thread-safe.

        "explain" and "drain" are handled at once; after "drain", lost API processes are not logged as errors.
        """
        if order["order"] == "explain":
            self._explain()
            return
        if order["order"] == "drain":
            self._draining = True
            return
        self._orders.put(order)
        os.write(self._wake, b"\0")

    def run(self) -> None:
        """Serve until the order to stop. Raises the engine's error if it fails. Does not shut down the engine."""
        while self._receive():
            output = self.core.advance() if self.core.has_unfinished else EngineOutput()
            if self._aborted:
                output.finished = [*self._aborted, *output.finished]
                self._aborted = []
            self._send(output)

    def _receive(self) -> bool:
        """Handle all orders and messages that have arrived; if nothing is running, wait up to about a second for one.
        Return False on the order to stop, else True.

        Regularly reports "alive", and lets `_send` send the load to all API processes even if it is unchanged. A
        message that cannot be decoded is logged and dropped.
        """
        now = time.monotonic()
        if now >= self._alive_at:
            self._alive_at = now + self._alive_seconds
            self._tell("alive")
            for client in self._clients.values():
                client.last_state = None  # sends the load again, which shows that the engine is running
        if not self.core.has_unfinished:
            self._poller.poll(math.ceil(min(self._alive_seconds, self.core.rest()) * 1e3))
        while not self._orders.empty():
            os.read(self._awake, 1)
            order = self._orders.get()
            if order["order"] == "stop":
                return False
            self._drop_index(order["index"])
        # This runs in every step, mostly without a message, and polling is cheaper than recv's exception.
        while zmq.zmq_poll(self._news, 0):
            identity, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                self._handle(identity, messages.decode_to_engine(payload))
            except msgspec.MsgspecError as error:
                logger.error("a message of an API process cannot be read: %s", error)
        return True

    def _handle(self, identity: bytes, message: messages.ToEngine) -> None:
        """Carry out a message of an API process. A message of an unknown connection is dropped, unless it is Hello. The
        reply to a Call goes into the next update.
        """
        client = self._clients.get(identity)
        if isinstance(message, Hello):
            self._welcome(identity, message)
        elif client is None:
            logger.debug("a message of an API process that is gone")
        elif isinstance(message, Submit):
            self._submit(client, message)
        elif isinstance(message, Finish):
            self._finish(client, message)
        elif isinstance(message, EndsDelivered):
            for handle in message.handles:
                if (request := client.requests.get(handle)) is not None:
                    self._settle(request)
        else:
            client.replies.append(self._call(message))

    def _welcome(self, identity: bytes, message: Hello) -> None:
        """Record a new connection and send Welcome; a connection that cannot be sent to is dropped again. Earlier
        connections of the same process are dropped first, and their requests aborted.
        """
        self._drop_index(message.index)
        self._num_clients += 1
        max_bytes = self.core.config.mm_processor_cache_bytes if self._media_kind == KEY_REPLICATED else 0
        media = MediaReceiver(max_bytes, self.core.engine.extensions.media_stats())
        client = _Client(identity, message.index, self._num_clients, media)
        self._clients[identity] = self._by_number[client.number] = client
        about = dataclasses.asdict(self.core.config), self._source, self._limits.num_slots
        welcome = Welcome(*about, self._current_load(), self._media_kind, self._num_media_resets)
        self._deliver(client, welcome)

    def _submit(self, client: _Client, message: Submit) -> None:
        """Queue a request in the engine. If it is refused, because of limits, invalid values, missing pixels or a bug,
        which is logged, the refusal goes into the next update; nothing is raised. One because of limits is counted in
        request_stats.num_rejections.

        The message's pixels are read and cached in every case.
        """
        client.received = message.number
        try:
            # Read before the request can be refused, as the sender assumes that its pixels are cached.
            media = None if message.media is None else client.media.read(message.media)
            num_requests, load = len(message.members), self._current_load()
            self._limits.check(load, num_requests, num_requests * len(message.prompt_token_ids) // 4)
            scheduler = self.core.engine.scheduler
            if scheduler.is_fair:
                self._limits.check_client(load, scheduler.num_waiting_of(message.client), num_requests)
            requests = submit_messages.requests_of(message, client.number, media)
            self.core.engine.queue(requests)
        except RequestError as error:
            self.core.engine.request_stats.num_rejections += isinstance(error, OverloadedError)
            client.refused.append(Reply(message.number, _failure(error)))
            return
        except MissingMediaError as error:
            client.refused.append(Reply(message.number, Failure(messages.MISSING_MEDIA, str(error))))
            return
        except Exception as error:  # a bug, which must not fail the other requests
            logger.exception("a request could not be queued")
            client.refused.append(Reply(message.number, Failure("internal", f"the request failed: {error}")))
            return
        for member, request in zip(message.members, requests, strict=True):
            client.requests[member.handle] = request

    def _finish(self, client: _Client, message: Finish) -> None:
        """End requests by order of an API process. Unknown handles are skipped.

        Ends other than aborts, and requests that the engine has ended already, are counted at once, with the numbers of
        tokens in the message. Aborts are confirmed by the next update.
        """
        reason = FinishReason(message.reason)
        for index, handle in enumerate(message.handles):
            request = client.requests.get(handle)
            if request is None:
                continue
            if reason is FinishReason.ABORT and request not in self.core.engine.uncounted:
                self.core.engine.finish(request, reason)
                self._aborted.append(request)
            else:
                self.core.engine.finish(request, reason)
                self._settle(request, reason, message.num_tokens[index] if message.num_tokens else None)

    def _call(self, message: Call) -> Reply:
        """Call a utility of the engine, or of this class for the image cache, and return the reply. Any error, also
        that of a result which cannot be encoded, becomes a failure in the reply; all but RequestErrors are logged.
        """
        try:
            # Not an attribute, which would create a reference cycle with the sockets, whose end zmq waits for.
            own = {"reset_mm_cache": self._reset_mm_cache, "mm_cache": self._mm_cache}
            call = own.get(message.name) or functools.partial(self.core.utility, message.name)
            # Encoded here, so that a result that cannot be encoded fails this call and not the process.
            return Reply(message.number, result=msgspec.Raw(messages.encode(call(*message.arguments))))
        except RequestError as error:
            return Reply(message.number, _failure(error))
        except Exception as error:  # the operator's mistake or a bug; it must not fail the requests
            logger.exception("%s failed", message.name)
            return Reply(message.number, Failure("internal", f"{message.name} failed: {error}"))

    def _reset_mm_cache(self) -> bool:
        """Clear the caches of images in this process, and make API processes clear theirs with the next update. Return
        the result of EngineCore's utility "reset_mm_cache".
        """
        self._num_media_resets += 1
        for client in self._clients.values():
            client.media.clear()
        return self.core.utility("reset_mm_cache")

    def _mm_cache(self) -> dict[str, Any]:
        """Return where images are cached, the configuration's mm_cache_placement for this server's number of API
        processes, and `engine_bytes`, the size of the caches in this process. Replaces EngineCore's utility "mm_cache".
        """
        placement = self.core.config.mm_cache_placement(self._num_api_processes)
        return {**placement, "engine_bytes": sum(client.media.num_bytes for client in self._clients.values())}

    def _send(self, output: EngineOutput) -> None:
        """Send each API process its results of a step, refusals, replies and the load, unless all of that is as before.
        A process that cannot be sent to is dropped.

        Counts the ends of requests, and reports "served" after the first.
        """
        updates = messages.updates_of(output, list(self._by_number))
        if output.finished:
            self._retry.ended(len(output.finished))
            if not self._served:
                self._served = True
                self._tell("served")
            for request in output.finished:
                if request not in self.core.engine.uncounted or messages.owner_of(request)[0] not in self._by_number:
                    self._settle(request)
        for request, _ in output.refused:
            self._forget(request)
        load = self._current_load()
        for client in list(self._clients.values()):
            state, update = (client.received, load, self._num_media_resets), updates.get(client.number)
            if update is None:
                if client.last_state == state and not client.replies:
                    continue
                update = Update(0, 0, load)
            client.last_state = state
            client.num_updates += 1
            update.num_media_resets = self._num_media_resets
            update.number, update.received, update.load = client.num_updates, client.received, load
            if client.refused:
                update.refused, client.refused = client.refused, []
            if client.replies:
                update.replies, client.replies = client.replies, []
            self._deliver(client, update)

    def _deliver(self, client: _Client, message: Welcome | Update) -> None:
        """Send a message to an API process. If that is impossible, because the process may have died, log it and drop
        the connection.
        """
        try:
            self._send_part(client.identity, _FIRST)
            self._send_part(messages.encode(message), _LAST)
        except zmq.ZMQError as error:
            level = logging.DEBUG if self._draining else logging.ERROR
            logger.log(level, "API process %d is lost: %s", client.index, error)
            self._drop(client)

    def _current_load(self) -> Load:
        """Return the engine's load; the same object as before if no number has changed."""
        scheduler = self.core.engine.scheduler
        counts = scheduler.num_running, scheduler.num_waiting, scheduler.num_waiting_tokens
        if counts != (self._load.num_running, self._load.num_waiting, self._load.num_waiting_tokens):
            self._load = Load(*counts, self._retry.seconds(scheduler.num_waiting))
        return self._load

    def _settle(self, request: Request, reason: FinishReason | None = None, num_tokens: int | None = None) -> None:
        """Count the end of a request in the engine's statistics, and forget the request. The caller knows the end
        already.

        reason, num_tokens: how it ended for the caller, and after how many tokens; None for the engine's own values.
        """
        self.core.engine.record_finish(request, reason, num_tokens)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Remove a request from the requests of its API process, if that is connected."""
        number, handle = messages.owner_of(request)
        if number in self._by_number:
            self._by_number[number].requests.pop(handle, None)

    def _explain(self) -> None:
        """Log why the loop has not reported for too long: the steps that are on the device, and, to stderr, the stacks
        of all threads. Runs on another thread than the loop.
        """
        for step in self.core.engine.timeline.in_flight():
            what, age = f"{step.bucket}, {step.num_rows} rows", time.monotonic() - step.dispatched
            logger.error("step %d (%s) was dispatched %.1f s ago", step.number, what, age)
        loop = sys._current_frames().get(threading.main_thread().ident or 0)
        traceback.print_stack(loop)  # the first thread; dump_traceback prints only the hundred that started last
        faulthandler.dump_traceback(all_threads=True)

    def _drop_index(self, index: int) -> None:
        """Drop all connections of the API process with this number, and abort their requests."""
        for client in [client for client in self._clients.values() if client.index == index]:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        """Forget the connection of an API process that is gone, and its cached images. Its requests are aborted and
        counted as aborted.
        """
        for request in list(client.requests.values()):
            self.core.engine.finish(request, FinishReason.ABORT)
            self._settle(request)
        client.media.clear()
        del self._clients[client.identity], self._by_number[client.number]


def _failure(error: RequestError) -> Failure:
    """Return an error in the form of a message, of the kind "overloaded", "unknown adapter" or else "request"."""
    if isinstance(error, OverloadedError):
        return Failure("overloaded", str(error), retry_after=error.retry_after)
    kind = "unknown adapter" if isinstance(error, UnknownAdapterError) else "request"
    return Failure(kind, str(error), error.param)


@jax.transfer_guard("allow")
def main(child: Child) -> None:
    """Load the engine and its adapters, serve, and end the process; never returns.

    The exit status is 2 for an unusable option or model, whose error is printed as a command's is; 1 if the engine
    fails later, which is logged; 0 after the order to stop.
    """
    child.end_with_parent()
    try:
        core = EngineCore(EngineConfig(**child.job["engine"]))
        load_adapters(core, ServerConfig(**child.job["server"]))
    except (ConfigError, ModelConfigError, ModelFileError, ClusterError, OSError) as error:
        print(f"jaxengine: error: {error}", file=sys.stderr)
        child.leave(2)
    core.metrics.server.num_restarts = child.job["num_restarts"]
    server = EngineServer(core, child.job["engine_address"], ServerConfig(**child.job["server"]), child.tell)
    child.follow(server.order)
    # Present objects are permanent; scanning them in each collection would stop the engine for some 80 ms.
    gc.collect()
    gc.freeze()
    child.tell("ready")
    try:
        server.run()
    except Exception as error:
        logger.exception("the engine has failed")
        cause = error.__cause__ or error
        core.shutdown(f"{type(cause).__name__}: {cause}")
        child.leave(1)
    core.shutdown()
    child.leave(0)
