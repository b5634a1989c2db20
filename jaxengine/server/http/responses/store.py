"""Responses that can be asked for again, in memory and of bounded size; the oldest that are finished make room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxengine.server.http.errors import ApiError
from jaxengine.server.http.sse import encode_json
from scheduler.errors import OverloadedError, show_value

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20


@dataclass
class StoredResponse:
    """One that is kept.

    Attributes:
      owner: what the client that made it showed to be let in; nobody else gets it.
      response: as the client sees it.
      messages: the conversation with its answer; instructions are not part of it.
      input: the items that it was asked with, each with an id.
      task: what works on it in the background, or None.
      num_bytes: its size as the store counts it.
    """

    owner: str
    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    input: Sequence[dict[str, Any]] = ()
    task: asyncio.Task[None] | None = None
    num_bytes: int = 0

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()


class ResponseStore:
    """By id, oldest first."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: dict[str, StoredResponse] = {}
        self._num_bytes = 0

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    def put(self, stored: StoredResponse) -> None:
        """Keeps it, in place of an earlier state of it. Raises OverloadedError when running ones take all the room."""
        response_id = stored.response["id"]
        known = self._stored.get(response_id)
        if known is None and len(self._stored) >= self._max_responses:
            if all(each.is_running for each in self._stored.values()):
                raise OverloadedError(f"{len(self._stored)} responses run in the background already", retry_after=5)
        if known is not None:
            self._num_bytes -= known.num_bytes
        stored.num_bytes = len(encode_json([stored.response, stored.messages, stored.input]))
        self._num_bytes += stored.num_bytes
        self._stored[response_id] = stored
        finished = [name for name, each in self._stored.items() if not each.is_running and name != response_id]
        while finished and (len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes):
            self._drop(finished.pop(0))

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Raises ApiError for one that is not kept, or not this owner's."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise ApiError(404, f"there is no stored response {show_value(response_id)}", param="response_id")
        return stored

    def delete(self, response_id: str) -> None:
        """Forgets one that is kept."""
        self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._stored.pop(response_id).num_bytes
