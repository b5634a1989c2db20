"""/v1/batches: files of requests that are answered within a day, while the engine has slots to spare."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Query, Request
from pydantic import Field, model_validator

from jaxengine.api.engine_client import EngineClient
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.batch.lines import URLS
from jaxengine.server.batch.store import BatchStore, Record, check_lifetime
from jaxengine.server.http.answer.answers import ABSENT, Answer, answers
from jaxengine.server.http.lists import Listed, page, there
from jaxengine.server.http.request.fields import TextsByName, at_most
from jaxengine.server.http.request.limits import JsonRoute
from jaxengine.server.http.request.protocol import ClosedModel, RequestModel

# The only completion window of OpenAI's API, and its length in seconds.
WINDOW, WINDOW_SECONDS = "24h", 86400
_MAX_PAIRS, _MAX_NAME, _MAX_VALUE = 16, 64, 512


class ExpiresAfter(ClosedModel):
    """Time of expiry: `seconds` after the creation."""

    anchor: Literal["created_at"]
    seconds: int


class CreateBatch(RequestModel):
    """Request for a batch.

    Attributes:
      input_file_id: the file of requests, at most 128 characters.
      endpoint: route of all requests, one of URLS.
      completion_window: "24h" alone.
      metadata: at most 16 texts of at most 512 characters by names of at most 64, which the batch repeats.
      output_expires_after: lifetime of its output and error files (`check_lifetime`); None for the server's retention.
    """

    input_file_id: Annotated[str, Field(max_length=128)]
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[TextsByName, at_most(_MAX_PAIRS)] | None = None
    output_expires_after: ExpiresAfter | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Return this request after checking it. Raises RequestError for an endpoint that is not in URLS, for metadata
        that are too long, and for a lifetime that is not allowed.
        """
        if self.endpoint not in URLS:
            problem = f"endpoint is {show_value(self.endpoint)}; allowed: {', '.join(URLS)}"
            raise RequestError(problem, param="endpoint")
        for name, value in (self.metadata or {}).items():
            if len(name) > _MAX_NAME or len(value) > _MAX_VALUE:
                problem = f"metadata has {show_value(name)}: {show_value(value)}"
                allowed = f"names of {_MAX_NAME} characters and values of {_MAX_VALUE}"
                raise RequestError(f"{problem}; allowed: {allowed}", param="metadata")
        if self.output_expires_after is not None:
            check_lifetime(self.output_expires_after.seconds, "output_expires_after")
        return self


class LineProblem(Answer):
    code: str
    line: int | None
    message: str
    param: str | None


class Problems(Answer):
    object: Literal["list"]
    data: list[LineProblem]


class Counts(Answer):
    total: int
    completed: int
    failed: int


class Batch(Answer):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: Problems | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: dict[str, str] | None
    output_expires_after: dict[str, Any] = ABSENT


class BatchList(Listed):
    data: list[Batch]


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes of batches (/v1/batches: create, list, retrieve, cancel); a router without routes unless
    enable_batch_api is set. Raises ConfigError if batch_storage_dir cannot be used.
    """
    routes = APIRouter(tags=["batches"], route_class=JsonRoute)
    if not config.enable_batch_api:
        return routes
    store = BatchStore.of(config)

    @routes.post("/v1/batches")
    @answers(Batch)
    async def create_batch(request: Request, body: CreateBatch) -> Record:
        """Let the requests of a file be answered within 24 hours; return the new batch. Raises ApiError (404) for a
        file that the client does not have, RequestError for one of another purpose, OverloadedError for too many
        batches.
        """
        owner, file_id = request.state.owner, body.input_file_id
        found = there(await asyncio.to_thread(store.file, owner, file_id), "file", file_id)
        if found["purpose"] != "batch":
            problem = f"input_file_id is a file of purpose {found['purpose']!r}; allowed: 'batch'"
            raise RequestError(problem, param="input_file_id")
        return await asyncio.to_thread(store.create, owner, _new_batch(body))

    @routes.get("/v1/batches")
    @answers(BatchList)
    async def list_batches(
        request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> dict[str, Any]:
        """List the client's batches, the newest first: at most `limit`, those that follow the one with id `after`, or
        the first for None. Raises RequestError for an unknown `after`.
        """
        return await asyncio.to_thread(lambda: page(store.batches(request.state.owner), after, limit))

    @routes.get("/v1/batches/{batch_id}")
    @answers(Batch)
    async def retrieve_batch(request: Request, batch_id: str) -> Record:
        """Return a batch of the client's. Raises ApiError (404) for another id."""
        return there(await asyncio.to_thread(store.batch, request.state.owner, batch_id), "batch", batch_id)

    @routes.post("/v1/batches/{batch_id}/cancel")
    @answers(Batch)
    async def cancel_batch(request: Request, batch_id: str) -> Record:
        """End a batch soon, and return it; what is answered by then is in its output file. Raises ApiError (404) for an
        unknown id, RequestError for a batch that has ended or is finalizing.
        """

        def edit(record: Record) -> None:
            """Set a record's status to "cancelling", in place; one that has this status already is unchanged. Raises
            RequestError for a batch that has ended or is finalizing.
            """
            if record["status"] in ("validating", "in_progress"):
                record.update(status="cancelling", cancelling_at=int(time.time()))
            elif record["status"] != "cancelling":
                problem = f"the batch is {record['status']}; only one that is being worked on can be cancelled"
                raise RequestError(problem, param="batch_id")

        return there(await asyncio.to_thread(store.change, request.state.owner, batch_id, edit), "batch", batch_id)

    return routes


def _new_batch(body: CreateBatch) -> Record:
    """Return the record of a new batch, without an id: created now, with status "validating", expiring in 24 hours."""
    now = int(time.time())
    expires_after = body.output_expires_after
    return {
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "in_progress_at": None,
        "expires_at": now + WINDOW_SECONDS,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
        **({} if expires_after is None else {"output_expires_after": expires_after.model_dump()}),
    }
