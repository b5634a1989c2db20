"""/v1/files: the input and the results of batches, in OpenAI's formats. A file is written to disk as it arrives."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse

from jaxengine.api.engine_client import EngineClient
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.batch.store import BatchStore, Record, TooLargeError, Upload, check_lifetime
from jaxengine.server.http.answer.answers import Answer, answers
from jaxengine.server.http.lists import Listed, page, there
from jaxengine.server.http.request.arrival import Uploads
from jaxengine.server.http.request.errors import ApiError
from jaxengine.server.http.request.form import FILE, Form, read_form

BATCH = "batch"
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", ANCHOR, SECONDS)
_MAX_NAME = 255
# Bytes that an upload collects before it writes them.
_BLOCK_BYTES = 1 << 20
_FORM = {
    "type": "object",
    "required": [FILE, "purpose"],
    "properties": {
        FILE: {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": [BATCH]},
        ANCHOR: {"type": "string", "enum": ["created_at"]},
        SECONDS: {"type": "integer"},
    },
}
_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


class FileObject(Answer):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(Listed):
    data: list[FileObject]


class FileDeleted(Answer):
    id: str
    object: Literal["file"]
    deleted: bool


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes of files (/v1/files: create, list, retrieve, read, delete); a router without routes unless
    enable_batch_api is set. Raises ConfigError if batch_storage_dir cannot be used.
    """
    routes = APIRouter(tags=["batches"])
    if not config.enable_batch_api:
        return routes
    store = BatchStore.of(config)
    uploads = Uploads()

    @routes.post("/v1/files", openapi_extra=_BODY)
    @answers(FileObject)
    async def create_file(request: Request) -> Record:
        """Store a file of requests for a batch, one JSON object a line, and return its record; lines are not checked.
        Raises ApiError (413) for a file that is too large, OverloadedError for too many uploads or files, OSError for
        one that the disk does not take, and the errors of `_receive`.
        """
        try:
            with uploads.one_of(request.state.owner):
                return await _receive(store, request)
        except TooLargeError as error:
            raise ApiError(413, str(error), param=error.param, headers={"Connection": "close"}) from None

    _add_reads(routes, store)

    @routes.delete("/v1/files/{file_id}")
    @answers(FileDeleted)
    async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
        """Remove a file, and return OpenAI's object for a deleted one. Raises RequestError for the input of a batch
        that has not ended, ApiError (404) for a file that the client does not have.
        """
        deleted = await asyncio.to_thread(store.delete_file, request.state.owner, file_id)
        there(deleted or None, "file", file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    return routes


def _add_reads(routes: APIRouter, store: BatchStore) -> None:
    """Add to `routes` those that list the files of `store`, return a file's record, and return its content."""

    @routes.get("/v1/files")
    @answers(FileList)
    async def list_files(
        request: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10000)] = 1000,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """List the client's files, the newest first unless `order` is "asc": at most `limit`, only those of `purpose`
        if it is given, and those that follow the file with id `after`. Raises RequestError for an unknown `after`.
        """

        def listed() -> dict[str, Any]:
            found = [each for each in store.files(request.state.owner) if purpose in (None, each["purpose"])]
            return page(iter(found if order == "desc" else found[::-1]), after, limit)

        return await asyncio.to_thread(listed)

    @routes.get("/v1/files/{file_id}")
    @answers(FileObject)
    async def retrieve_file(request: Request, file_id: str) -> Record:
        """Return the record of a file. Raises ApiError (404) for one that the client does not have."""
        return there(await asyncio.to_thread(store.file, request.state.owner, file_id), "file", file_id)

    @routes.get("/v1/files/{file_id}/content", response_class=Response)
    async def retrieve_content(request: Request, file_id: str) -> Response:
        """Return the content of a file. Raises ApiError (404) for one that the client does not have."""
        owner = request.state.owner
        there(await asyncio.to_thread(store.file, owner, file_id), "file", file_id)
        return FileResponse(store.content(owner, file_id), media_type="application/octet-stream")


async def _receive(store: BatchStore, request: Request) -> Record:
    """Read a form from the request's body, store its file as it arrives, and return the file's record. After an error
    nothing is stored.

    Raises RequestError for a form with invalid or missing fields, ApiError for one that is damaged, TooLargeError,
    OverloadedError if the client may store no more, OSError.
    """
    upload: Upload = await asyncio.to_thread(store.upload, request.state.owner)
    block = bytearray()

    async def write(piece: bytes) -> None:
        """Append a piece of the file to the block and, once that has _BLOCK_BYTES, write the block on a thread. Raises
        TooLargeError, OSError.
        """
        block.extend(piece)
        if len(block) >= _BLOCK_BYTES:
            await asyncio.to_thread(upload.write, bytes(block))
            block.clear()

    try:
        form = await read_form(request, write)
        name, lifetime = _check(form, request)
        await asyncio.to_thread(upload.write, bytes(block))
        return await asyncio.to_thread(upload.keep, name, BATCH, lifetime)
    finally:
        await asyncio.to_thread(upload.discard)


def _check(form: Form, request: Request) -> tuple[str, int | None]:
    """Return the file's name, "file" if it is empty, and the seconds after which the file expires, None for the
    server's default. Stores the names of unknown fields in the request's state.

    Raises RequestError without a file, for another purpose than BATCH, for a name of more than 255 characters or with
    one that is not printable, for an expiry without both fields or of other values, and for a field that occurs twice.
    """
    if form.filename is None:
        raise RequestError("file is missing: the requests, one JSON object a line", param=FILE)
    name = form.filename or "file"
    if len(name) > _MAX_NAME or not name.isprintable():
        problem = f"file has the name {show_value(name)}; allowed: {_MAX_NAME} printable characters"
        raise RequestError(problem, param=FILE)
    purpose, anchor, seconds = (form.once(field) for field in _FIELDS)
    if purpose != BATCH:
        raise RequestError(f"purpose is {show_value(purpose)}; allowed: {BATCH!r}", param="purpose")
    if anchor not in (None, "created_at") or (anchor is None) != (seconds is None):
        problem = f"{ANCHOR} is {show_value(anchor)}; allowed: 'created_at', together with {SECONDS}"
        raise RequestError(problem, param="expires_after")
    if seconds is not None and not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise RequestError(f"{SECONDS} is {show_value(seconds)}; it must be a number", param="expires_after")
    request.state.unknown_fields = [field for field in form.fields if field not in _FIELDS]
    return name, None if seconds is None else check_lifetime(int(seconds), SECONDS)
