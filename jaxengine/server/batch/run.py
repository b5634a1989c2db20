"""Requests of a batch, run through the HTTP application without a socket: each is checked, rendered and answered as by
a server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp, Message, Receive

from jaxengine.server.batch.lines import BatchLine, result_line
from jaxengine.server.batch.results import Results


async def run_lines(
    answer: Callable[[BatchLine], Awaitable[tuple[int, Any]]],
    lines: Sequence[BatchLine],
    results: Results,
    concurrency: int,
    check: Callable[[], Awaitable[None]],
    done: Callable[[BatchLine, int, Any], None],
) -> None:
    """Answer `lines`, at most `concurrency` of them at a time, in the order of `BatchLine.order`, which puts prompts
    with the same beginning next to each other. Return when all are answered. A line with a `problem` is not passed to
    `answer`: its result is an error with status 400.

    answer: returns a request's HTTP status and the JSON value of its answer. results: receives each result; a status of
    400 and above is a failure. check: called before a result is stored; raises an error if the engine has failed, so
    that its failure does not become a request's result. done: called after each result was stored, with its line,
    status and answer. Raises the first error of `answer`, `check` or `done`, or OSError if results cannot be written;
    requests in progress are cancelled then, and their lines have no result.
    """
    # Sorting parses every body, on a thread since that may take seconds.
    waiting = await asyncio.to_thread(sorted, lines, key=lambda line: line.order, reverse=True)

    async def work() -> None:
        """Answer waiting lines, store each result and report it to `done`, one after another, until none is left."""
        while waiting:
            line = waiting.pop()
            status, said = await answer(line) if line.problem is None else _refused(line.problem)
            await check()
            results.add(line, result_line(line, status, said), failed=status >= 400)
            done(line, status, said)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(waiting))):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _refused(problem: str) -> tuple[int, Any]:
    """Return 400 and, as JSON value of the answer, OpenAI's error with this message."""
    return 400, {"error": {"message": problem, "type": "BadRequestError", "code": 400}}


async def call(app: ASGIApp, line: BatchLine, state: Mapping[str, Any] = MappingProxyType({})) -> tuple[int, Any]:
    """POST a request to the application; return (HTTP status, JSON value of the answer).

    state: values for the ASGI scope's "state", such as the owner of the request. The request's id is a hash of the
    line's custom_id, so a line that is sent again gets the same adapter of lora_routes. An answer that is not JSON,
    such as embeddings as plain bytes, becomes an error with status 400. Raises the application's exceptions.
    """
    name = hashlib.sha256(line.custom_id.encode()).hexdigest()[:32].encode()
    length = str(len(line.body)).encode()
    headers = (b"content-type", b"application/json"), (b"content-length", length), (b"x-request-id", name)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "raw_path": line.url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*headers],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": dict(state),
    }
    status, chunks = 500, []

    async def send(message: Message) -> None:
        """Record the answer's status and append its body chunk."""
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            chunks.append(message.get("body", b""))

    await app(scope, receive_once(line.body), send)
    try:
        return status, json.loads(b"".join(chunks))
    except ValueError:
        return _refused("the answer is not JSON, and a batch has JSON alone")


def receive_once(body: bytes) -> Receive:
    """Return an ASGI `receive` function that returns the whole body in its first call. Further calls wait until they
    are cancelled, since the client never disconnects.
    """
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        """Return the body in the first call; wait until cancelled in further ones."""
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return receive
