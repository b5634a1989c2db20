"""Calls an ASGI application message by message, as a socket does: clients that leave or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx

from jaxengine.requests.params.options import RequestOptions


def http_client(app: Any, key: str | None = None) -> httpx.AsyncClient:
    """A client that waits for whole answers; what the application raises is an error of the test."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test", headers=headers)


class Answer:
    """A whole answer to `post`."""

    def __init__(self, response: httpx.Response):
        self.status = response.status_code
        self.headers = response.headers
        self.body = response.content

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert self.status >= 400, self.body
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == self.status
        return error

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON of a stream's events; its end is checked."""
        assert self.headers["content-type"].startswith("text/event-stream"), self.body
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


async def post(app: Any, path: str, **fields: Any) -> Answer:
    async with http_client(app) as client:
        return Answer(await client.post(path, json=fields))


class Connection:
    """A POST under way.

    Attributes:
      chunks: what came, one item for each `send` of the application.
      reads: cleared: the client does not read, and the application's `send` waits.
      status: None until the headers came.
    """

    def __init__(self, app: Any, path: str, *bodies: bytes, headers: dict[str, str] | None = None):
        self.chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        self.status: int | None = None
        self.num_bodies_taken = 0
        self._bodies = list(bodies)
        self._gone = asyncio.Event()
        names = {"content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in names.items()],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        self._task = asyncio.create_task(app(scope, self._receive, self._send))

    @classmethod
    def of_json(cls, app: Any, path: str, **fields: Any) -> Connection:
        return cls(app, path, json.dumps(fields).encode())

    async def leave(self) -> None:
        """Closes the connection and waits until the application has noticed."""
        self._gone.set()
        await self.ended()

    async def ended(self) -> None:
        await asyncio.wait_for(self._task, 60)

    async def cancel(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _receive(self) -> dict[str, Any]:
        if self._bodies:
            self.num_bodies_taken += 1
            body = self._bodies.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._bodies)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        await self.reads.wait()
        if message.get("body"):
            await self.chunks.put(message["body"])


async def idle(engine: Any) -> None:
    """Waits until nothing runs and every page is back."""
    scheduler = engine.core.engine.scheduler
    for _ in range(1000):
        if scheduler.num_free_pages == scheduler.num_pages and not engine.core.has_unfinished:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("pages were not given back")


class Recorder:
    """An engine that notes what it is asked for and has another one do it.

    Attributes:
      calls: (prompt, params, request_id, priority, timeout) of every `generate`.
      clients, arrivals, sessions: its client, when it came, and its conversation.
      aborted: ids.
      fail_after: outputs after which `generate` raises `failure`; None for never.
    """

    def __init__(self, engine: Any):
        self._engine = engine
        self.inputs = engine.inputs
        self.errored = False
        self.calls: list[tuple[Any, Any, str, int, float | None]] = []
        self.clients: list[str | None] = []
        self.arrivals: list[float] = []
        self.sessions: list[str | None] = []
        self.aborted: list[str] = []
        self.fail_after: int | None = None
        self.failure: Exception = RuntimeError("nothing yet")

    async def stream(self, prompt, sampling_params=None, request_id=None, options=None):
        options = options or RequestOptions()
        self.calls.append((prompt, sampling_params, request_id, options.priority, options.timeout))
        self.clients.append(options.client)
        self.arrivals.append(options.arrival)
        self.sessions.append(options.session)
        outputs = self._engine.stream(prompt, sampling_params, request_id, options)
        async with contextlib.aclosing(outputs):
            count = 0
            while count != self.fail_after:
                try:
                    output = await anext(outputs)
                except StopAsyncIteration:
                    return
                count += 1
                yield output
        raise self.failure

    async def abort(self, request_id):
        self.aborted.append(request_id)
        await self._engine.abort(request_id)

    async def check_health(self):
        if self.errored:
            raise self.failure

    async def utility(self, name, *arguments):
        return await self._engine.utility(name, *arguments)
