"""Error responses, in OpenAI's format or, for Anthropic's and Cohere's endpoints, in theirs, with one status for each
kind of error.

Internals of the server are not disclosed. All responses other than success are made here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from jaxengine.api.engine_client import EngineDeadError, EngineDrainingError
from jaxengine.scheduler.base.errors import OverloadedError, RequestError, UnknownAdapterError, show_value
from jaxengine.server.http.request.not_built import about_missing
from jaxengine.server.observe.scrub import scrub

logger = logging.getLogger(__name__)

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
# Anthropic's values of `type`.
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_BRANCHES = {"str", "int", "float", "bool", "none"}
# Field of the engine -> another name under which an HTTP request may give it.
_OTHER_NAMES = {
    "extra_args": "vllm_xargs",
    "params": "path",
    "structured_outputs": "response_format",
    "version": "weight_version",
}


class ApiError(HTTPException):
    """Exception that is answered with a response other than success.

    Attributes:
      status_code: HTTP status.
      detail: message for the caller.
      headers: further headers of the response, or None.
      param: the invalid field, as the caller spells it; None if no field is at fault.
      kept: part of the message that quotes the caller; paths are not removed from it.
    """

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        kept: str = "",
    ):
        super().__init__(status_code, message, headers)
        self.param = param
        self.kept = kept


def abort_error(finish_reason: str | None, stop_reason: Any) -> ApiError:
    """Return (not raise) the error of a request that has no complete answer: 504 for a timeout, 409 for another abort,
    otherwise 500. finish_reason, stop_reason: the reasons of its output.
    """
    if stop_reason == "timeout":
        return ApiError(504, "the request took longer than its timeout")
    if finish_reason == "abort":
        return ApiError(409, "the request was aborted")
    return ApiError(500, f"the request has no answer: {stop_reason}")


def as_api_error(error: Exception, given: Collection[str] = ()) -> ApiError:
    """Return the ApiError with which an exception is answered, by its class. An ApiError is returned unchanged.

    OverloadedError becomes 429, EngineDeadError 503 and the OSError of a full disk 507, all with Retry-After: 5 s, 60 s
    for the disk, and the OverloadedError's own time, rounded up to whole seconds, at least 1; UnknownAdapterError
    becomes 404, RequestError and RequestValidationError 400; another HTTPException keeps its status.
    EngineDrainingError, a subclass of EngineDeadError, also keeps its message and gets "Connection: close". An
    unexpected class becomes a 500 without details, and the caller should log it. given: names of the fields in the
    request's body; if one of them is another name of the invalid field, the error uses it.
    """
    match error:
        case ApiError():
            return error
        case OverloadedError():
            retry_after = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            return ApiError(429, str(error), param=error.param, headers=retry_after)
        case UnknownAdapterError():
            return ApiError(404, str(error), param=error.param, kept=show_value(error.value))
        case RequestError():
            param = None if error.param is None else _as_given(error.param, given)
            return ApiError(400, _as_given(str(error), given), param=param, kept=show_value(error.value))
        case RequestValidationError():
            return _invalid(error, given)
        case EngineDrainingError():
            return ApiError(503, str(error), headers={"Retry-After": "5", "Connection": "close"})
        case EngineDeadError():
            return ApiError(503, "the engine cannot answer at the moment", headers={"Retry-After": "5"})
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ApiError(507, "the server has no room left on a disk", headers={"Retry-After": "60"})
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    return ApiError(500, "internal error of the server")


def as_request_error(error: ValidationError) -> RequestError:
    """Return the RequestError for the first problem of a validation outside of a route: the one that a validator
    raised, or a new one that names the invalid field.
    """
    problem = error.errors()[0]
    raised = problem.get("ctx", {}).get("error")
    if isinstance(raised, RequestError):
        return raised
    name = str(problem["loc"][0]) if problem["loc"] else "body"
    said = problem["msg"].removeprefix("Value error, ")
    text = f"{name} is not valid: {said[:1].lower()}{said[1:]}, got {show_value(problem.get('input'))}"
    return RequestError(text, param=name)


def renamed(error: RequestError, name: str) -> RequestError:
    """Return a copy of the error with its field replaced by `name`, also at the beginning of the message."""
    message = str(error)
    if error.param and message.startswith(error.param):
        message = name + message[len(error.param) :]
    return RequestError(message, param=name, value=error.value)


@contextlib.contextmanager
def renaming(rename: Callable[[RequestError], RequestError]) -> Iterator[None]:
    """Context manager that raises `rename(error)` in place of a RequestError of its block."""
    try:
        yield
    except RequestError as error:
        raise rename(error) from None


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON body of an error in OpenAI's format, with vLLM's values of `type` and the HTTP status as `code`.
    Paths and other internals are removed from the message.
    """
    fallback = "BadRequestError" if error.status_code < 500 else "InternalServerError"
    body = {
        "message": scrub(error.detail, error.kept),
        "type": _TYPES.get(error.status_code, fallback),
        "param": error.param,
        "code": error.status_code,
    }
    return {"error": body}


def messages_error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON body of an error in Anthropic's format; its `type` follows from the HTTP status. Paths and other
    internals are removed from the message.
    """
    fallback = "invalid_request_error" if error.status_code < 500 else "api_error"
    kind = _MESSAGES_TYPES.get(error.status_code, fallback)
    return {"type": "error", "error": {"type": kind, "message": scrub(error.detail, error.kept)}}


def cohere_error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON body of an error in Cohere's format. Paths and other internals are removed from the message."""
    return {"message": scrub(error.detail, error.kept)}


# Beginning of paths of endpoints that are not OpenAI's -> body of an error in their format.
_BODIES = {"/v1/messages": messages_error_body, "/cohere/": cohere_error_body}


def error_response(error: ApiError) -> Response:
    """Return the response for an error. Its body has the format of the API to which the requested path belongs."""
    return _ErrorResponse(error)


class _ErrorResponse(Response):
    """Response whose body's format depends on the request's path."""

    def __init__(self, error: ApiError):
        self._error = error
        super().__init__(self._body(error_body), error.status_code, dict(error.headers or {}), "application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, in the format of _BODIES for paths that begin so."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        for beginning, shape in _BODIES.items():
            if path.startswith(beginning):
                self.body = self._body(shape)
                self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)

    def _body(self, shape: Callable[[ApiError], dict[str, Any]]) -> bytes:
        """Return the JSON of `shape(error)`, in ASCII."""
        # ASCII only: a message may quote half a surrogate pair, which has no UTF-8 encoding.
        return json.dumps(shape(self._error)).encode()


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Install handlers for the expected exceptions of `app`: HTTPException, RequestValidationError, RequestError and
    EngineDeadError, with their subclasses. Others are left to the outermost middleware.

    routes: all routes of the application. The list may be extended later. The header Allow of a response 405 has the
    methods of all routes with its path.
    """

    async def answer(request: Request, error: Exception) -> Response:
        """Return the response to an exception, as `as_api_error` says.

        A path without a route gets 404. If `about_missing` knows the path, the message says what to use instead, also
        where the path is the value of a parameter of a route for another method. Other wrong methods get 405 and the
        header Allow with the methods of all routes of the path.
        """
        known = as_api_error(error, getattr(request.state, "given_fields", ()))
        # Raised by the framework and not by a route: there is no route for the path, or none with this method.
        if type(error) is HTTPException and error.status_code in (404, 405):
            path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
            problem = about_missing(path, has_route=error.status_code == 405)
            if problem is None and known.status_code == 404:
                problem = f"there is no route {show_value(path)}{'; /docs lists all' if app.openapi_url else ''}"
            if problem is not None:
                return error_response(ApiError(404, problem, kept=problem))
        if known.status_code == 405:
            # The framework lists only the first route's methods.
            matching = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
            methods = {method for route in matching for method in getattr(route, "methods", None) or ()}
            allowed = ", ".join(sorted(methods))
            known = ApiError(405, f"the method is not allowed here; allowed: {allowed}", headers={"Allow": allowed})
        return error_response(known)

    for kind in (HTTPException, RequestValidationError, RequestError, EngineDeadError):
        app.add_exception_handler(kind, answer)


def _invalid(error: RequestValidationError, given: Collection[str]) -> ApiError:
    """Return the error (400) for the first invalid field, with all alternatives that would be allowed there. If a
    validator raised a RequestError, return the error for that.
    """
    problems = error.errors()
    raised = problems[0].get("ctx", {}).get("error")
    if isinstance(raised, RequestError):
        return as_api_error(raised, given)
    place = problems[0]["loc"][1:]
    if not place or not isinstance(place[0], str):
        return ApiError(400, f"the body of the request is not what was expected: {problems[0]['msg']}")
    name = place[0]
    about = [problem for problem in problems if problem["loc"][1:2] == (name,)]
    wants = " or ".join(dict.fromkeys(_want(problem) for problem in about))
    if problems[0]["type"] == "missing" and len(place) == 1:
        return ApiError(400, f"{name} is missing", param=name)
    shown = show_value(problems[0].get("input"))
    return ApiError(400, f"{name} is not valid: {wants}, got {shown}", param=name, kept=shown)


def _want(problem: dict[str, Any]) -> str:
    """Return pydantic's message about a field, beginning in lower case, preceded by the path of keys and positions
    within the field, without the branches of unions.

    problem: an entry of ValidationError.errors().
    """
    # Pydantic includes branches of a union in the location; only keys and positions are shown.
    inside = [str(step) for step in problem["loc"][2:] if step not in _BRANCHES and not str(step).endswith("]")]
    where = f"{'.'.join(inside)[:100]}: " if inside else ""
    said = problem["msg"].removeprefix("Value error, ")
    return where + said[:1].lower() + said[1:]


def _as_given(text: str, given: Collection[str]) -> str:
    """Return `text`, a field's name or a message that begins with it, with the other name by which the request gave the
    field; unchanged if it gave none.
    """
    for name, other in _OTHER_NAMES.items():
        if text.startswith(name) and name not in given and other in given:
            return other + text[len(name) :]
    return text
