"""Arguments and results of a store: responses, what is missing to store one, and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from jaxengine.server.stored.documents import Document
from jaxengine.server.stored.events import NumberedEvent, Told

Part = Literal["response", "input", "conversation"]


class StoredResponse(msgspec.Struct):
    """Response to store.

    Attributes:
      id: id, unique among the responses of its owner.
      owner: hash of its client's key; no other client can retrieve it.
      previous: id of the stored response whose conversation it continues; None for a new conversation.
      response: the response as the client sees it.
      input: its input items, each with an id.
      question: list of the request's chat messages, without the earlier conversation and without instructions.
      answer: list of the answer's chat messages.
      background: whether it is generated in the background, and may be cancelled.
      is_running: whether it is still being generated.
      is_streamed: whether its events are stored, so that its stream may be followed.
      events: events to store in addition to earlier ones, the last ones if the response no longer runs.
    """

    id: str
    owner: str
    response: Document
    question: Document = Document()
    answer: Document = Document()
    input: Document = Document()
    previous: str | None = None
    background: bool = False
    is_running: bool = False
    is_streamed: bool = False
    events: list[NumberedEvent] = msgspec.field(default_factory=list)

    @property
    def documents(self) -> tuple[Document, ...]:
        """All four documents of the response: response, input, question, answer."""
        return self.response, self.input, self.question, self.answer

    @property
    def num_own_bytes(self) -> int:
        """Size of the encoded documents in bytes, without their long texts."""
        return sum(len(document.data) for document in self.documents)


class Found(msgspec.Struct, array_like=True):
    """Stored response.

    Attributes:
      background, is_running, is_streamed: see StoredResponse.
      num_bytes: sizes of the parts that `read` returns, with all long texts.
    """

    background: bool
    is_running: bool
    num_bytes: dict[Part, int]
    is_streamed: bool = False


class Reading(msgspec.Struct, array_like=True):
    """Part of a stored response: its documents in order, and their long texts by digest."""

    documents: list[Document]
    texts: dict[bytes, bytes]


class Needs(msgspec.Struct, array_like=True):
    """Data that a store lacks to take a response.

    Attributes:
      digests: digests of the long texts that must be sent with it.
      history: whether the response that it continues is gone, so that the whole conversation must be sent as the
        question.
    """

    digests: tuple[bytes, ...] = ()
    history: bool = False


class Worker(Protocol):
    """Interface of a process that generates responses, for the store."""

    def cancel(self, response_id: str, owner: str) -> None:
        """Order the worker to end its work on a response soon. The worker then puts the response's final state into the
        store.
        """
        ...


class Responses(Protocol):
    """Interface of a store of responses, local or remote. Methods return None for a missing response and also for one
    of another owner. All methods raise EngineDeadError if the store is down.
    """

    async def put(
        self, stored: StoredResponse, worker: Worker, texts: dict[bytes, bytes] | None = None
    ) -> Needs | None:
        """Store a response, replacing its earlier state, and return None. If something is missing to store it, change
        nothing and return what is missing.

        worker: the process that generates the response; `stop` orders it to cancel. Not used for a finished response.
        texts: long texts, UTF-8, by digest, at least those that the store lacks; None stands for {}. Raises
        OverloadedError for a response that is too large, or if running ones take all the room.
        """
        ...

    async def find(self, response_id: str, owner: str) -> Found | None:
        """Return a stored response's state and sizes; None for an unknown one."""
        ...

    async def read(self, response_id: str, owner: str, part: Part) -> Reading | None:
        """Return a part of a stored response: "response", what the client sees; "input", the input items; or
        "conversation", the messages up to and including this response. Returns None for an unknown one.
        """
        ...

    async def append_events(self, response_id: str, owner: str, events: list[NumberedEvent]) -> None:
        """Store further events of a response that is running and streamed. Does nothing for another one."""
        ...

    async def events_after(self, response_id: str, owner: str, number: int) -> Told | None:
        """Return events of a streamed response with numbers above `number`, and wait until there are some or the
        response has ended. Returns None for an unknown one, and for one that is not streamed.
        """
        ...

    async def stop(self, response_id: str, owner: str) -> Found | None:
        """Order the worker of a response that is running to cancel it, wait until its final state is stored, and return
        its state and sizes. A finished response is returned at once. Returns None for an unknown one.
        """
        ...

    async def delete(self, response_id: str, owner: str) -> Found | None:
        """Stop a response, wait until it no longer runs, and remove it. Returns its state and sizes before removal,
        None for an unknown one.
        """
        ...


@dataclass(frozen=True)
class StoreBounds:
    """Bounds of a store.

    Attributes:
      responses, num_bytes: largest number of responses, and of bytes, of all owners together.
      client_responses, client_bytes: the same for one owner.
      conversation_bytes: largest number of bytes of one response's conversation.
    """

    responses: int
    num_bytes: int
    client_responses: int
    client_bytes: int
    conversation_bytes: int
