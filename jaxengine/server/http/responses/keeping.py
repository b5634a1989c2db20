"""Storage of responses, and reading them back. Documents are encoded and decoded off the event loop, within a bound of
memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.media.fetching.picture_end import trimmed_url
from jaxengine.scheduler.base.errors import OverloadedError, RequestError
from jaxengine.server.http.answer.sse import encode_json
from jaxengine.server.http.lists import page, there
from jaxengine.server.http.responses.following import numbered
from jaxengine.server.http.responses.output import Said
from jaxengine.server.stored.documents import Document, Joiner, split
from jaxengine.server.stored.records import Found, Part, Reading, Responses, StoredResponse, Worker

logger = logging.getLogger(__name__)

# Larger values are encoded and decoded on a thread.
_SHORT_BYTES = 64 << 10
# Longer texts are sent to the store only if it lacks them.
_SHORT_TEXT = 16 << 10
# Attempts to store a response, as a store that is restarted between two calls has lost its content.
_MOST_CALLS = 4

_P = ParamSpec("_P")
_T = TypeVar("_T")
Json = dict[str, Any]


class Memory:
    """Bounded count of the bytes of stored conversations that requests of this process hold at the moment.

    most: limit in bytes.
    """

    def __init__(self, most: int):
        self._most = most
        self._num_bytes = 0

    def hold(self) -> Held:
        """Return a new account of held bytes for one request, which starts at 0."""
        return Held(self)

    def change(self, num_bytes: int) -> None:
        """Add a number of bytes, which may be negative, to the count. Raises OverloadedError, without adding anything,
        if the count would exceed `most`; if no bytes are held yet, any number may be added.
        """
        if num_bytes > 0 and self._num_bytes and self._num_bytes + num_bytes > self._most:
            text = f"requests that are being answered hold {self._num_bytes} bytes of stored conversations"
            raise OverloadedError(f"{text}; allowed: {self._most} (a quarter of api_memory_limit_bytes)")
        self._num_bytes += num_bytes


class Held:
    """Bytes that one request has taken from a Memory; given back by `release`, or when this object is deleted."""

    def __init__(self, memory: Memory):
        self._memory = memory
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Add bytes to the request's account and to the memory's count. Raises OverloadedError, without adding
        anything, if the memory has no room for them.
        """
        self._memory.change(num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        """Give back all bytes that were taken. Further calls have no effect."""
        self._memory.change(-self._num_bytes)
        self._num_bytes = 0

    __del__ = release


async def off_loop(size: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run `work` and return its result or raise its exception: on a thread if `size`, the number of bytes that it
    handles, exceeds _SHORT_BYTES, else directly.
    """
    return work(*args, **kwargs) if size <= _SHORT_BYTES else await asyncio.to_thread(work, *args, **kwargs)


def weight(value: Any) -> int:
    """Return the approximate size of a JSON value in bytes: the characters of its texts and names, and 8 for each other
    plain value. Counting stops above _SHORT_BYTES.
    """
    total, left = 0, [value]
    while left and total <= _SHORT_BYTES:
        match left.pop():
            case str() as text:
                total += len(text)
            case dict() as mapping:
                left += [*mapping, *mapping.values()]
            case list() | tuple() as entries:
                left += entries
            case _:
                total += 8
    return total


async def read_back(
    store: Responses, response_id: str, owner: str, part: Part, held: Held, use: Callable[[list[Any]], _T]
) -> tuple[Found, _T]:
    """Return a stored response and the result of `use`, which is called with the values of the documents in a part of
    it, oldest first; on a thread if the part is large.

    owner: the client, who sees only its own responses. held: takes the part's bytes. Raises ApiError (404) if there is
    no such response, OverloadedError if `held` has no room, and the errors of `use`.
    """
    found = there(await store.find(response_id, owner), "response", response_id)
    size = found.num_bytes[part]
    held.take(size)
    reading = there(await store.read(response_id, owner, part), "response", response_id)

    def restored(reading: Reading) -> _T:
        joiner = Joiner(reading.texts)
        return use([joiner.join(document) for document in reading.documents])

    return found, await off_loop(size, restored, reading)


def joined(lists: list[Any]) -> list[dict[str, Any]]:
    """Return one list with the items of all lists, in order."""
    return [message for messages in lists for message in messages]


def input_items(lists: list[Any], limit: int, after: str | None, newest_first: bool) -> bytes:
    """Return a page of a response's input items as JSON: at most `limit` items after the one with id `after`; None
    begins with the first item.

    lists: lists of items, oldest first. newest_first: whether the page, and the order to which `after` refers, is
    reversed. Raises RequestError if no item has the id `after`.
    """
    items = joined(lists)
    if newest_first:
        items.reverse()
    return encode_json(page(iter(items), after, limit))


def only(values: list[Any]) -> bytes:
    """Return the JSON of the only value in the list. Raises ValueError unless there is exactly one."""
    (value,) = values
    return encode_json(value)


@dataclass
class Asked:
    """Documents that a request adds to a stored conversation.

    Attributes:
      question: the request's messages.
      input: the request's input items.
      texts: long texts of both documents, by digest.
    """

    question: Document
    input: Document
    texts: dict[bytes, bytes]

    @classmethod
    async def of(cls, question: Sequence[Json], items: Sequence[Json]) -> Asked:
        """Return both documents, encoded on a thread if `items` are large. question: the request's messages. items: its
        input items.

        The data URL of an image is stored without any bytes after the image's end (`trimmed_url`).
        """
        return await off_loop(weight(items), cls._of, question, items)

    @classmethod
    def _of(cls, question: Sequence[Json], items: Sequence[Json]) -> Asked:
        """Return both documents, encoded on the calling thread, with images trimmed."""
        texts, pictures = dict[bytes, bytes](), _Pictures()
        question = [pictures.only(message, ("content",)) for message in question]
        items = [pictures.only(item, ("content", "output")) for item in items]
        return cls(split(question, texts), split(items, texts), texts)

    def after(self, earlier: Sequence[Json]) -> Asked:
        """Return a copy whose question is preceded by these earlier messages."""
        texts = dict(self.texts)
        question = [*earlier, *Joiner(texts).join(self.question)]
        return Asked(split(question, texts), self.input, texts)

    @property
    def num_bytes(self) -> int:
        """Size of both documents and their long texts, in bytes."""
        return sum(map(len, self.texts.values())) + len(self.question.data) + len(self.input.data)


class _Pictures:
    """Trimmer of the data URLs of images in items and messages (`trimmed_url`); each string object is trimmed once."""

    def __init__(self):
        # Each entry refers to the text itself, so that no other object can get its id().
        self._trimmed: dict[int, tuple[str, str]] = {}

    def only(self, item: Json, keys: Sequence[str]) -> Json:
        """Return a copy of an item or message in which the images of the lists of parts under `keys` are trimmed."""
        return {name: self._parts(value) if name in keys else value for name, value in item.items()}

    def _parts(self, parts: Any) -> Any:
        """Return a list of parts with their images trimmed; a value that is not a list unchanged."""
        return [self._part(part) for part in parts] if isinstance(parts, list) else parts

    def _part(self, part: Any) -> Any:
        """Return a copy of a part with its image trimmed; a part without an image unchanged."""
        if not isinstance(part, dict) or part.get("type") != "input_image":
            return part
        url = part.get("image_url")
        return {**part, "image_url": self._url(url)} if isinstance(url, str) else part

    def _url(self, url: str) -> str:
        """Return an image's URL, trimmed. The result is cached by string object."""
        if id(url) not in self._trimmed:
            self._trimmed[id(url)] = url, trimmed_url(url)
        return self._trimmed[id(url)][1]


class Making(Protocol):
    """Attributes of a response being generated that its storage needs."""

    id: str
    earlier: Sequence[Json]

    def answer(self) -> Json:
        """Return the answer so far as a chat message."""
        ...


@dataclass
class Keeper:
    """Writer of successive states of one response to the store.

    Attributes:
      store: the store of responses.
      owner: the client, identified by its key.
      worker: object that generates the response, which the store asks to cancel it.
      asked: documents that the response adds to the conversation of `previous`.
      previous: id of the stored response that it continues; None if it continues none.
      background: whether it is generated in the background, so that it may be cancelled.
      is_streamed: whether its events are stored too, so that its stream may be followed.
    """

    store: Responses
    owner: str
    worker: Worker
    asked: Asked
    previous: str | None
    background: bool = False
    is_streamed: bool = False

    async def put(self, making: Making, shown: Json, *, is_running: bool, said: Sequence[Said] = ()) -> None:
        """Store a state of the response `making`, replacing the state before. shown: the response as the client sees
        it. is_running: whether it is still being generated. said: its last events.

        Texts that the store lacks are sent in a second call. If the store was restarted, the whole conversation is sent
        as one that continues none, and `asked` and `previous` change accordingly. Raises EngineDeadError, and
        OverloadedError for a response that the store cannot take or if it was restarted several times.
        """
        for _ in range(_MOST_CALLS):
            answer = [making.answer()]
            stored, texts = await off_loop(
                weight(shown) + weight(answer), self._stored, making.id, shown, answer, is_running
            )
            stored.events = numbered(said) if self.is_streamed else []
            sent = {digest: text for digest, text in texts.items() if len(text) <= _SHORT_TEXT}
            needs = await self.store.put(stored, self.worker, sent)
            if needs is not None and not needs.history:
                sent |= {digest: texts[digest] for digest in needs.digests}
                needs = await self.store.put(stored, self.worker, sent)
            if needs is None:
                return
            if needs.history:
                self.asked = await off_loop(weight(making.earlier), self.asked.after, making.earlier)
                self.previous = None
        raise OverloadedError("the store of responses was started again several times")

    async def keep(self, making: Making, shown: Json, *, is_running: bool = False, said: Sequence[Said] = ()) -> None:
        """Store a state of the response like `put`, but log a failure instead of raising it."""
        try:
            await self.put(making, shown, is_running=is_running, said=said)
        except (EngineDeadError, OverloadedError) as error:
            logger.warning("response %s is not kept: %s", making.id, error)

    async def tell(self, making: Making, said: Sequence[Said]) -> None:
        """Store events of a response that is streamed, in addition to earlier ones; log a failure, as `keep`."""
        if self.is_streamed and said:
            try:
                await self.store.append_events(making.id, self.owner, numbered(said))
            except EngineDeadError as error:
                logger.warning("events of response %s are not kept: %s", making.id, error)

    def _stored(
        self, response_id: str, shown: Json, answer: list[Json], is_running: bool
    ) -> tuple[StoredResponse, dict[bytes, bytes]]:
        """Return a state of the response in the form that the store takes, and its long texts by digest. shown: the
        response as the client sees it. answer: a list with the answer as a chat message.
        """
        asked, texts = self.asked, dict(self.asked.texts)
        stored = StoredResponse(
            response_id,
            self.owner,
            split(shown, texts),
            asked.question,
            split(answer, texts),
            asked.input,
            self.previous,
            self.background,
            is_running,
            self.is_streamed,
        )
        return stored, texts


def check_size(num_bytes: int, most: int, *, continued: bool) -> None:
    """Raise RequestError for a conversation of more than `most` bytes, which is too large to be stored.

    continued: whether it continues a stored response; the error then names previous_response_id instead of input.
    """
    if num_bytes > most:
        param = "previous_response_id" if continued else "input"
        text = f"the conversation of {param} has {num_bytes} bytes; a stored one may have {most}"
        advice = "begin a new conversation, or ask with store: false"
        raise RequestError(f"{text} (max_stored_conversation_bytes of the server); {advice}", param=param)
