"""Storing of responses, and reading them back: documents are made off the event loop, within a bound of memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.media.fetching.picture_end import trimmed_url
from jaxengine.scheduler.base.errors import OverloadedError, RequestError, show_value
from jaxengine.server.http.request.errors import ApiError
from jaxengine.server.stored.documents import Document, Joiner, split
from jaxengine.server.stored.records import Found, Part, Reading, Responses, StoredResponse, Worker

logger = logging.getLogger(__name__)

# Larger values are encoded and decoded on a thread.
_SHORT_BYTES = 64 << 10
# Longer texts are sent to the store only if it lacks them.
_SHORT_TEXT = 16 << 10
# A store that is started again between two calls lacks what it had.
_MOST_CALLS = 4

_P = ParamSpec("_P")
_T = TypeVar("_T")
Json = dict[str, Any]


class Memory:
    """Bounded count of the bytes of stored conversations that requests of this process hold at the moment. most: its
    limit.
    """

    def __init__(self, most: int):
        self._most = most
        self._num_bytes = 0

    def hold(self) -> Held:
        """Return a request's account of held bytes, which starts at 0."""
        return Held(self)

    def change(self, num_bytes: int) -> None:
        """Add a number of bytes, which may be negative. Raises OverloadedError, with nothing added, if there would be
        more than `most`; where none are held yet, any number may be added.
        """
        if num_bytes > 0 and self._num_bytes and self._num_bytes + num_bytes > self._most:
            text = f"requests that are being answered hold {self._num_bytes} bytes of stored conversations"
            raise OverloadedError(f"{text}; allowed: {self._most} (a quarter of api_memory_limit_bytes)")
        self._num_bytes += num_bytes


class Held:
    """Bytes of Memory that one request has taken; given back by `release`, or else when this is deleted."""

    def __init__(self, memory: Memory):
        self._memory = memory
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Add bytes to the request's account. Raises OverloadedError, with nothing added, as Memory.change."""
        self._memory.change(num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        """Give back all that was taken."""
        self._memory.change(-self._num_bytes)
        self._num_bytes = 0

    __del__ = release


async def off_loop(size: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run `work` and return its result, or raise its exception, on a thread if it handles more than a few bytes. size:
    bytes that it handles.
    """
    return work(*args, **kwargs) if size <= _SHORT_BYTES else await asyncio.to_thread(work, *args, **kwargs)


def weight(value: Any) -> int:
    """Return about how many bytes a JSON value has: characters of its texts and names, and 8 for each other plain
    value; for a large one some number above _SHORT_BYTES.
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


def there(found: _T | None, response_id: str, param: str = "response_id") -> _T:
    """Return `found`; raise ApiError (404) for None, a response that is not stored or belongs to another client.

    param: the field that names it.
    """
    if found is None:
        raise ApiError(404, f"there is no stored response {show_value(response_id)}", param=param)
    return found


async def read_back(
    store: Responses, response_id: str, owner: str, part: Part, held: Held, use: Callable[[list[Any]], _T]
) -> tuple[Found, _T]:
    """Return a stored response and the result of `use` over the list of the values of a part's documents, oldest
    first; on a thread if it is large.

    owner: name of the client, who sees only responses of its own. held: takes the part's bytes. Raises ApiError (404)
    if there is no such response, OverloadedError if `held` has no room, and what `use` raises.
    """
    found = there(await store.find(response_id, owner), response_id)
    size = found.num_bytes[part]
    held.take(size)
    reading = there(await store.read(response_id, owner, part), response_id)

    def restored(reading: Reading) -> _T:
        """Return the result of `use` over the documents' values."""
        joiner = Joiner(reading.texts)
        return use([joiner.join(document) for document in reading.documents])

    return found, await off_loop(size, restored, reading)


@dataclass
class Asked:
    """Documents that a request adds to a stored conversation.

    Attributes:
      question: the request's messages.
      input: its input items.
      texts: long texts of both documents, by digest.
    """

    question: Document
    input: Document
    texts: dict[bytes, bytes]

    @classmethod
    async def of(cls, question: Sequence[Json], items: Sequence[Json]) -> Asked:
        """Make both documents, on a thread if `items` are large. question: the request's messages; items: its input
        items.

        The data URL of an image is stored without what follows the image's end (`trimmed_url`).
        """
        return await off_loop(weight(items), cls._of, question, items)

    @classmethod
    def _of(cls, question: Sequence[Json], items: Sequence[Json]) -> Asked:
        """Make both documents on the calling thread, as `of`."""
        texts, pictures = dict[bytes, bytes](), _Pictures()
        question = [pictures.only(message, ("content",)) for message in question]
        items = [pictures.only(item, ("content", "output")) for item in items]
        return cls(split(question, texts), split(items, texts), texts)

    def after(self, earlier: Sequence[Json]) -> Asked:
        """Return a copy whose question begins with these earlier messages."""
        texts = dict(self.texts)
        question = [*earlier, *Joiner(texts).join(self.question)]
        return Asked(split(question, texts), self.input, texts)

    @property
    def num_bytes(self) -> int:
        """Return the memory of both documents, in bytes."""
        return sum(map(len, self.texts.values())) + len(self.question.data) + len(self.input.data)


class _Pictures:
    """Trimming of the data URLs of images in items and messages (`trimmed_url`), once for each string object."""

    def __init__(self):
        # The text itself is kept along, so that its id stays its own.
        self._trimmed: dict[int, tuple[str, str]] = {}

    def only(self, item: Json, keys: Sequence[str]) -> Json:
        """Return an item or message with the images of its parts, which are lists under `keys`, trimmed."""
        return {name: self._parts(value) if name in keys else value for name, value in item.items()}

    def _parts(self, parts: Any) -> Any:
        """Return a list of parts with their images trimmed; other values unchanged."""
        return [self._part(part) for part in parts] if isinstance(parts, list) else parts

    def _part(self, part: Any) -> Any:
        """Return a part with its image trimmed; a part without one unchanged."""
        if not isinstance(part, dict) or part.get("type") != "input_image":
            return part
        url = part.get("image_url")
        return {**part, "image_url": self._url(url)} if isinstance(url, str) else part

    def _url(self, url: str) -> str:
        """Return an image's address, trimmed; the same string is trimmed once."""
        if id(url) not in self._trimmed:
            self._trimmed[id(url)] = url, trimmed_url(url)
        return self._trimmed[id(url)][1]


class Making(Protocol):
    """Response that is being generated, as far as storing needs it."""

    id: str
    earlier: Sequence[Json]

    def answer(self) -> Json:
        """Return the answer so far as a chat message."""
        ...


@dataclass
class Keeper:
    """Storing of successive states of one response.

    Attributes:
      store: where it is stored.
      owner: name of the client, by its key.
      worker: generates the response, for the store's order to cancel.
      asked: messages that it adds to the conversation of `previous`.
      previous: id of the stored response that it continues; None for none.
      background: generated in the background, so that it may be cancelled.
    """

    store: Responses
    owner: str
    worker: Worker
    asked: Asked
    previous: str | None
    background: bool = False

    async def put(self, making: Making, shown: Json, *, is_running: bool) -> None:
        """Store a state of the response `making`, in place of the one before. shown: the response as the client sees
        it; is_running: whether it is still being generated.

        If the store was restarted, the whole conversation is sent anew, as one that continues none: `asked` and
        `previous` change. Raises EngineDeadError, and OverloadedError for a response that the store cannot take.
        """
        for _ in range(_MOST_CALLS):
            answer = [making.answer()]
            stored, texts = await off_loop(
                weight(shown) + weight(answer), self._stored, making.id, shown, answer, is_running
            )
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

    async def keep(self, making: Making, shown: Json, *, is_running: bool = False) -> None:
        """Store a state of the response, as `put` does, but only log a failure: a stored response might be evicted at
        once anyway.
        """
        try:
            await self.put(making, shown, is_running=is_running)
        except (EngineDeadError, OverloadedError) as error:
            logger.warning("response %s is not kept: %s", making.id, error)

    def _stored(
        self, response_id: str, shown: Json, answer: list[Json], is_running: bool
    ) -> tuple[StoredResponse, dict[bytes, bytes]]:
        """Return a state of the response for the store, and its long texts by digest. shown: the response as the client
        sees it; answer: a list with the answer as a chat message.
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
        )
        return stored, texts


def check_size(num_bytes: int, most: int, *, continued: bool) -> None:
    """Raise RequestError for a conversation of more than `most` bytes, which is too large to be stored.

    continued: whether it continues a stored response, whose field the error then names.
    """
    if num_bytes > most:
        param = "previous_response_id" if continued else "input"
        text = f"the conversation of {param} has {num_bytes} bytes; a stored one may have {most}"
        advice = "begin a new conversation, or ask with store: false"
        raise RequestError(f"{text} (max_stored_conversation_bytes of the server); {advice}", param=param)
