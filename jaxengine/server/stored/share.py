"""Stored responses of one owner, with one copy of each long text, and links from each turn of a conversation to the
turn before it.

A turn outlives its response while a later response continues it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jaxengine.server.stored.documents import Document
from jaxengine.server.stored.records import Needs, StoredResponse

# Counted for each response and each turn in addition to its documents: what Python needs for them.
RECORD_BYTES = 512


@dataclass(eq=False)
class Turn:
    """One question and its answer, with a link to the turn before.

    Attributes:
      messages: JSON lists of chat messages, in order.
      earlier: the turn before; None for the first one.
      num_bytes: size of the conversation up to this turn, with every occurrence of a long text and RECORD_BYTES for
        each turn.
      num_links: number of responses of this turn and of later turns that continue it.
    """

    messages: tuple[Document, ...]
    earlier: Turn | None
    num_bytes: int
    num_links: int = 0

    def chain(self) -> list[Turn]:
        """Return the turns of the conversation up to this one, oldest first."""
        turn: Turn | None = self
        turns: list[Turn] = []
        while turn is not None:
            turns.append(turn)
            turn = turn.earlier
        return turns[::-1]


@dataclass(eq=False)
class Kept:
    """Stored response and its turn. The documents stored.question and stored.answer are counted with the turn."""

    stored: StoredResponse
    turn: Turn

    @property
    def documents(self) -> tuple[Document, ...]:
        """Documents of the response that are not in its turn."""
        return self.stored.response, self.stored.input


class Share:
    """Stored responses of one owner.

    Attributes:
      responses: stored responses by id, oldest first.
      num_bytes: memory in bytes: all documents, each long text once, and RECORD_BYTES for each response and turn.
    """

    def __init__(self):
        self.responses: dict[str, Kept] = {}
        self.num_bytes = 0
        self._texts: dict[bytes, bytes] = {}
        self._uses: dict[bytes, int] = {}

    def missing(self, stored: StoredResponse, texts: Mapping[bytes, bytes]) -> Needs | None:
        """Return what is missing to put a response: long texts that are neither stored nor in `texts`, and the
        conversation if the response that it continues is gone. A response that is stored already as one that continues
        the same one does not need the conversation. Returns None if nothing is missing. texts: long texts that come
        with it, by digest.
        """
        known = self.responses.get(stored.id)
        continues = known is not None and known.stored.previous == stored.previous
        history = stored.previous is not None and not continues and stored.previous not in self.responses
        digests = {digest for document in stored.documents for digest in document.digests}
        wanted = tuple(digest for digest in digests if digest not in self._texts and digest not in texts)
        return Needs(wanted, history) if wanted or history else None

    def conversation_bytes(self, stored: StoredResponse) -> int:
        """Return the size in bytes of a response's conversation, earlier turns included, counted like
        Turn.num_bytes.
        """
        earlier = self._earlier(stored)
        own = RECORD_BYTES + stored.question.num_bytes + stored.answer.num_bytes
        return own + (0 if earlier is None else earlier.num_bytes)

    def added_bytes(self, stored: StoredResponse, texts: Mapping[bytes, bytes]) -> int:
        """Return how many bytes of the share a new response would occupy: its documents and records, its long texts,
        and the earlier turns of its conversation. Long texts and turns that are stored already are included. Nothing
        may be `missing`.
        """
        digests = {digest for document in stored.documents for digest in document.digests}
        long = sum(len(self._texts.get(each) or texts[each]) for each in digests)
        earlier = self._earlier(stored)
        return 2 * RECORD_BYTES + stored.num_own_bytes + long + (0 if earlier is None else earlier.num_bytes)

    def put(self, stored: StoredResponse, texts: Mapping[bytes, bytes]) -> None:
        """Store a response in place of its earlier state, if any, and update num_bytes. Evicts nothing. Nothing may be
        `missing`. texts: long texts that come with it, by digest.
        """
        turn = Turn((stored.question, stored.answer), self._earlier(stored), self.conversation_bytes(stored))
        before = self.responses.get(stored.id)
        kept = self.responses[stored.id] = Kept(stored, turn)
        self.num_bytes += 2 * RECORD_BYTES
        self._take((*kept.documents, *turn.messages), texts)
        turn.num_links = 1
        if turn.earlier is not None:
            turn.earlier.num_links += 1
        if before is not None:
            self._forget(before)

    def replace_response(self, response_id: str, response: Document) -> None:
        """Replace the document that the client sees, in place, and update num_bytes. The new document must have the
        same long texts. Raises KeyError for an unknown id.
        """
        stored = self.responses[response_id].stored
        self.num_bytes += len(response.data) - len(stored.response.data)
        stored.response = response

    def drop(self, response_id: str) -> None:
        """Remove a response, with those of its turn and earlier turns that no other response continues, and update
        num_bytes. Raises KeyError for an unknown id.
        """
        self._forget(self.responses.pop(response_id))

    def texts_of(self, documents: Iterable[Document]) -> dict[bytes, bytes]:
        """Return the long texts of documents, as UTF-8, by digest. Raises KeyError for a text that is not stored."""
        return {digest: self._texts[digest] for document in documents for digest in document.digests}

    def finished(self, *, but: str | None) -> Iterator[str]:
        """Return an iterator over the ids of finished responses, which may be evicted, oldest first. but: id of a
        response to leave out, or None.
        """
        return (name for name, kept in self.responses.items() if not kept.stored.is_running and name != but)

    def _earlier(self, stored: StoredResponse) -> Turn | None:
        """Return the turn that a response continues, None if it continues none. A response that is stored already keeps
        the earlier turn that it has. Nothing may be `missing`.
        """
        if stored.previous is None:
            return None
        known = self.responses.get(stored.id)
        if known is not None and known.stored.previous == stored.previous:
            return known.turn.earlier  # which may outlive its response
        return self.responses[stored.previous].turn

    def _take(self, documents: Iterable[Document], texts: Mapping[bytes, bytes]) -> None:
        """Add documents to num_bytes and to the use counts of their long texts. A long text is stored and counted in
        num_bytes when it is first used. texts: long texts that come with the response, by digest.
        """
        for document in documents:
            self.num_bytes += len(document.data)
            for digest in document.digests:
                if digest not in self._texts:
                    self._texts[digest] = texts[digest]
                    self.num_bytes += len(texts[digest])
                self._uses[digest] = self._uses.get(digest, 0) + 1

    def _release(self, documents: Iterable[Document]) -> None:
        """Subtract documents from num_bytes and from the use counts of their long texts, and remove long texts that are
        no longer used.
        """
        for document in documents:
            self.num_bytes -= len(document.data)
            for digest in document.digests:
                self._uses[digest] -= 1
                if not self._uses[digest]:
                    del self._uses[digest]
                    self.num_bytes -= len(self._texts.pop(digest))

    def _forget(self, kept: Kept) -> None:
        """Release a response's documents, and those of its turn and earlier turns that no other response continues, and
        update num_bytes.
        """
        self.num_bytes -= RECORD_BYTES
        self._release(kept.documents)
        turn: Turn | None = kept.turn
        while turn is not None:  # not recursive: a conversation has as many turns as it has
            turn.num_links -= 1
            if turn.num_links:
                return
            self._release(turn.messages)
            self.num_bytes -= RECORD_BYTES
            turn = turn.earlier
