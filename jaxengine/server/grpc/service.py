"""Handlers around a servicer's methods: parsing, errors to statuses, and tracking of open calls."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from jaxengine.api.engine_client import EngineDrainingError
from jaxengine.scheduler.base.errors import OverloadedError, RequestError
from jaxengine.server.adapters.lora_routes import ROUTE_KEY, route_key
from jaxengine.server.grpc.convert import field_of, refuse_unknown_fields
from jaxengine.server.grpc.limits import SHORT_BYTES, refuse_many_fields
from jaxengine.server.grpc.status import CallError, end_call, status_of
from jaxengine.server.observe.spans import caller_trace

logger = logging.getLogger(__name__)

Method = Callable[..., Awaitable[Any]]


Requests = AsyncIterator[Any]
# Arrival of the current call, in seconds of time.monotonic, before its message is received and parsed.
ARRIVAL: ContextVar[float] = ContextVar("arrival")


class OpenCalls:
    """Counter of open calls, which refuses new ones while draining and beyond `most`.

    Args:
      log: whether to write a log line for each call.
      most: largest number of open calls.
      read_timeout: see the attribute.

    Attributes:
      read_timeout: seconds within which a call's message must arrive.
    """

    def __init__(self, *, log: bool, most: int, read_timeout: float):
        self.read_timeout = read_timeout
        self._log = log
        self._most = most
        self._count = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """Return the number of open calls."""
        return self._count

    def enter(self, name: str, context: Any) -> None:
        """Count a call until its status has been sent, even if it is refused here; then log it with its status and
        duration, if logging is on. name: name of its method, for the log.

        Raises EngineDrainingError while draining, OverloadedError if more than `most` calls are open.
        """
        started = time.monotonic()

        def leave(_: Any) -> None:
            """Decrease the count of calls and log the call. grpc calls this when the status has been sent."""
            self._count -= 1
            if not self._count:
                self._idle.set()
            if self._log:
                code = context.code() or grpc.StatusCode.OK
                logger.info("%s %s %s %.1f ms", context.peer(), name, code.name, 1000 * (time.monotonic() - started))

        self._count += 1
        self._idle.clear()
        context.add_done_callback(leave)
        if self._draining:
            raise EngineDrainingError("the server is shutting down")
        if self._count > self._most:
            raise OverloadedError(f"{self._most} calls are open already")

    async def drain(self, grace: float) -> None:
        """Refuse new calls from now on, and wait at most `grace` seconds until the open ones have ended. Does not end
        calls itself; if some are left, logs their number.
        """
        self._draining = True
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            logger.info("%d gRPC calls are ended after %g s of grace", self._count, grace)


def handlers(servicer: Any, service: ServiceDescriptor, calls: OpenCalls) -> grpc.GenericRpcHandler:
    """Return handlers that serve each method of `service` by the servicer's coroutine method of the same name.

    That method takes (request, context) or, if the client streams, (first request, async iterator of the others,
    context). Each call is counted in `calls`. An exception ends the call with the status from status.status_of, and so
    does a message that does not arrive within calls.read_timeout or cannot be parsed.
    """
    made = {}
    for method in service.methods:
        # A stream of requests, so that waiting for the message can time out.
        make = (
            grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.stream_unary_rpc_method_handler
        )
        request_type, response_type = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
        guarded = _guarded(method.name, getattr(servicer, method.name), request_type, calls, method.client_streaming)
        made[method.name] = make(guarded, response_serializer=response_type.SerializeToString)
    return grpc.method_handlers_generic_handler(service.full_name, made)


def _guarded(name: str, method: Method, request_type: type[Message], calls: OpenCalls, streams: bool) -> Any:
    """Return the handler of one method. It counts the call, parses its messages, sets ARRIVAL, ROUTE_KEY and the
    caller's trace context, calls `method`, and ends the call with a status for any exception.

    name: name of the method, for the log. request_type: type of the messages. streams: whether the client sends several
    messages.
    """

    async def call(requests: Requests, context: grpc.aio.ServicerContext) -> Any:
        """Handle one call: set ARRIVAL and ROUTE_KEY, parse its first message, and return the method's result within
        the caller's trace. End it with a status by raising grpc's AbortError if anything raises an exception.
        """
        ARRIVAL.set(time.monotonic())
        request = request_type()
        try:
            calls.enter(name, context)
            data = await first_message(requests, context, calls.read_timeout)
            await _parse(request, data)
            # Without binary values; of several with one name the last counts.
            given = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
            request_id = given.get("x-request-id") or secrets.token_hex(8)
            ROUTE_KEY.set(route_key(given.get("x-session-id", ""), request_id))
            with caller_trace(given):
                if streams:
                    return await method(request, _rest(requests, request_type, calls.read_timeout), context)
                return await method(request, context)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError:  # from a write: the caller has left
            raise asyncio.CancelledError from None
        except Exception as error:
            field = field_of(request, error.param) if isinstance(error, RequestError) else None
            code, details, metadata = status_of(error, field)
        await end_call(context, code, details, metadata)

    return call


async def first_message(requests: Requests, context: grpc.aio.ServicerContext, timeout: float) -> Any:
    """Return the first message of a call.

    Ends the call, by raising grpc.aio.AbortError, if none arrives within `timeout` seconds (DEADLINE_EXCEEDED) or if
    the call has none (INVALID_ARGUMENT).
    """
    try:
        async with asyncio.timeout(timeout):
            return await anext(requests)
    except TimeoutError:
        details = f"the call's message did not arrive within {timeout:g} s"
        return await end_call(context, grpc.StatusCode.DEADLINE_EXCEEDED, details)
    except StopAsyncIteration:
        return await end_call(context, grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")


async def _rest(requests: Requests, request_type: type[Message], timeout: float) -> AsyncIterator[Any]:
    """Yield the messages of a call after its first one, parsed. Raises CallError (DEADLINE_EXCEEDED) if one takes
    longer than `timeout` seconds, RequestError for one that cannot be parsed.
    """
    while True:
        try:
            async with asyncio.timeout(timeout):
                data = await anext(requests)
        except TimeoutError:
            details = f"the call's next message did not arrive within {timeout:g} s"
            raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, details) from None
        except StopAsyncIteration:
            return
        request = request_type()
        await _parse(request, data)
        yield request


async def _parse(request: Message, data: bytes) -> None:
    """Parse a message into `request`, in place. Raises RequestError for bytes that are not such a message, for more
    than MAX_FIELDS fields, which are counted on a thread, and for unknown fields.
    """
    if len(data) > SHORT_BYTES:
        await asyncio.to_thread(refuse_many_fields, data, request.DESCRIPTOR)
    try:
        request.ParseFromString(data)
    except DecodeError:
        name = request.DESCRIPTOR.full_name
        raise RequestError(f"the message is not a {name}, or holds text that is not UTF-8") from None
    refuse_unknown_fields(request)
