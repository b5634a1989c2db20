"""Connection of an API process to the engine's process; it is replaced whenever the engine restarts.

Each connection begins with Hello and has a socket of its own, so that no message for a dead engine reaches the next
one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import msgspec
import zmq

from jaxengine.server.link import messages
from jaxengine.server.link.messages import FromEngine, Hello, ToEngine

logger = logging.getLogger(__name__)

_RECONNECT_MS = 50
# Messages that are handled before the event loop runs other tasks.
_BURST = 4


class EngineLink:
    """Connection that exchanges messages with an engine, on the event loop on which it is created."""

    def __init__(self, address: str, index: int, received: Callable[[FromEngine], None], lost: Callable[[], None]):
        """Start to connect and return at once; messages sent before there is a connection are queued. Needs a running
        event loop.

        Args:
          address: ZeroMQ address of the engine's socket.
          index: number of this API process.
          received: called with each decoded message of the engine.
          lost: called when a connection has ended, also because of a message that cannot be decoded; the next
            connection is being opened then.
        """
        self._address = address
        self._index = index
        self._received = received
        self._lost = lost
        self._context = zmq.Context()
        self._loop = asyncio.get_running_loop()
        self._open()

    def send(self, message: ToEngine) -> None:
        """Encode and send a message, or queue it until there is a connection. Never blocks."""
        self.send_encoded(messages.encode(message))

    def send_encoded(self, message: bytes) -> None:
        """Send a message encoded by `messages.encode`, or queue it until there is a connection. Never blocks."""
        self._socket.send(message, zmq.NOBLOCK)
        # ZeroMQ's file descriptor is edge-triggered, and sending may have consumed the edge ...
        self._loop.call_soon(self._read, self._socket)

    def reopen(self) -> None:
        """Drop this connection with its queued messages, open another one, and call `lost`, as if the engine had closed
        the connection.
        """
        self._close()
        self._open()
        self._lost()

    def close(self) -> None:
        """Close the connection permanently and drop its queued messages; `lost` is not called."""
        self._close()
        self._context.destroy(linger=0)

    def _open(self) -> None:
        """Create a socket and a monitor of its connection, start to connect, and queue Hello."""
        self._socket = self._context.socket(zmq.DEALER)
        identity = f"{self._index}-{os.urandom(8).hex()}".encode()
        for option, value in (
            (zmq.ROUTING_ID, identity),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RCVHWM, 0),
            (zmq.SNDHWM, 0),
            (zmq.LINGER, 0),
        ):
            self._socket.set(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._loop.add_reader(self._socket.fileno(), self._read, self._socket)
        self._loop.add_reader(self._monitor.fileno(), self._disconnected, self._monitor)
        self._socket.connect(self._address)
        self.send(Hello(self._index))
        # ... and it signals only after a read that found nothing.
        self._loop.call_soon(self._disconnected, self._monitor)

    def _close(self) -> None:
        """Close the socket and its monitor, and drop queued messages."""
        for socket in (self._socket, self._monitor):
            self._loop.remove_reader(socket.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _read(self, socket: zmq.Socket) -> None:
        """Pass up to _BURST received messages on to `received`; continue in a later iteration of the event loop if
        there may be more.

        A message that cannot be decoded is logged, and the connection is reopened. socket: does nothing if it is not
        the current one.
        """
        for _ in range(_BURST):
            if socket is not self._socket or socket.closed:
                return
            try:
                payload = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = messages.decode_from_engine(payload)
            except msgspec.MsgspecError as error:
                logger.error("a message of the engine cannot be read: %s", error)
                self.reopen()
                return
            self._received(message)
        self._loop.call_soon(self._read, socket)

    def _disconnected(self, monitor: zmq.Socket) -> None:
        """Reopen the connection if its monitor reports that it has ended; called by the event loop. monitor: does
        nothing if it is not the current one.
        """
        if monitor is self._monitor and monitor.poll(0):
            self.reopen()
