"""Conversion of exceptions to gRPC statuses.

An invalid request names its field in a google.rpc.BadRequest; an overloaded server gives `retry-after-ms`. Internal
errors are not disclosed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import NoReturn

import grpc
import grpc.aio
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from jaxengine.api.engine_client import EngineDeadError, EngineDrainingError
from jaxengine.scheduler.base.errors import OverloadedError, RequestError, UnknownAdapterError, show_value
from jaxengine.server.observe.scrub import scrub

logger = logging.getLogger(__name__)

# A message is sent three times in headers, percent- or base64-encoded; clients accept 8 KiB of headers.
MAX_MESSAGE = 800

Status = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]


class CallError(Exception):
    """Exception that ends a call with a given status. code: the status code."""

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code


async def end_call(
    context: grpc.aio.ServicerContext,
    code: grpc.StatusCode,
    details: str,
    metadata: tuple[tuple[str, str | bytes], ...] = (),
) -> NoReturn:
    """End a call with a status, by raising AbortError; or CancelledError, as grpc then expects, if the caller has left
    and the status cannot be sent.
    """
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def status_of(error: Exception, field: str | None) -> Status:
    """Return (code, message, trailing metadata) for an exception.

    A CallError has its own code. OverloadedError is RESOURCE_EXHAUSTED with retry-after-ms, rounded up,
    UnknownAdapterError NOT_FOUND, any other RequestError INVALID_ARGUMENT with a BadRequest if `field` is given. Their
    messages pass `public`. EngineDeadError and EngineDrainingError are UNAVAILABLE with a fixed message. Any other
    exception is logged, and is INTERNAL without details. field: proto field that a RequestError concerns, or None.
    """
    if isinstance(error, CallError):
        return error.code, public(str(error)), ()
    if isinstance(error, OverloadedError):
        milliseconds = math.ceil(1000 * error.retry_after)
        return grpc.StatusCode.RESOURCE_EXHAUSTED, public(str(error)), (("retry-after-ms", str(milliseconds)),)
    if isinstance(error, UnknownAdapterError):
        return grpc.StatusCode.NOT_FOUND, public(str(error), show_value(error.value)), ()
    if isinstance(error, RequestError):
        return _bad_request(public(str(error), show_value(error.value)), field)
    if isinstance(error, EngineDrainingError):
        return grpc.StatusCode.UNAVAILABLE, "the server is shutting down", ()
    if isinstance(error, EngineDeadError):
        return grpc.StatusCode.UNAVAILABLE, "the engine has failed or is being restarted", ()
    logger.error("a call has failed", exc_info=error)
    return grpc.StatusCode.INTERNAL, "internal error", ()


def public(text: str, kept: str = "") -> str:
    """Return a message in a form that may leave the server: scrubbed, in ASCII with backslash escapes, and cut to
    MAX_MESSAGE characters and "...".

    kept: text that `scrub` must not change.
    """
    text = scrub(text, kept).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."


def _bad_request(message: str, field: str | None) -> Status:
    """Return the status INVALID_ARGUMENT. If `field` is not None, its message begins with the field's name and its
    details have a BadRequest with the field.
    """
    if field is not None and not message.startswith(field):
        message = f"{field}: {message}"
    status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message=message)
    if field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    converted = rpc_status.to_status(status)
    return converted.code, converted.details, tuple(converted.trailing_metadata)
