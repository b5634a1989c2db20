"""The stored responses of one owner: their long texts once each, and links from a conversation to its earlier turns.

A turn outlives its response while a later response continues it, so that deleting a response ends no conversation.
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
    """A stored response and its turn. stored.question and stored.answer are in the turn."""

    stored: StoredResponse
    turn: Turn

    @property
    def documents(self) -> tuple[Document, ...]:
        """Documents of the response that are not in its turn."""
        return self.stored.response, self.stored.input


class Share:
    """Stored responses of one owner.

    Attributes:
      responses: by id, oldest first.
      num_bytes: memory of all of it: documents, long texts once each, RECORD_BYTES for each response and turn.
    """

    def __init__(self):
        self.responses: dict[str, Kept] = {}
        self.num_bytes = 0
        self._texts: dict[bytes, bytes] = {}
        self._uses: dict[bytes, int] = {}

    def missing(self, stored: StoredResponse, texts: Mapping[bytes, bytes]) -> Needs | None:
        """Return what is missing to put a response; None if nothing is. texts: the long texts that come along, by
        digest."""
        known = self.responses.get(stored.id)
        continues = known is not None and known.stored.previous == stored.previous
        history = stored.previous is not None and not continues and stored.previous not in self.responses
        digests = {digest for document in stored.documents for digest in document.digests}
        wanted = tuple(digest for digest in digests if digest not in self._texts and digest not in texts)
        return Needs(wanted, history) if wanted or history else None

    def conversation_bytes(self, stored: StoredResponse) -> int:
        """Return the size in bytes of a response's conversation, as Turn.num_bytes counts it."""
        earlier = self._earlier(stored)
        own = RECORD_BYTES + stored.question.num_bytes + stored.answer.num_bytes
        return own + (0 if earlier is None else earlier.num_bytes)

    def added_bytes(self, stored: StoredResponse, texts: Mapping[bytes, bytes]) -> int:
        """Return how many bytes of the share a new response would occupy, including those that are there already.

        These are its long texts, and its conversation's earlier turns, which cannot be evicted while it is there.
        Nothing may be `missing`.
        """
        digests = {digest for document in stored.documents for digest in document.digests}
        long = sum(len(self._texts.get(each) or texts[each]) for each in digests)
        earlier = self._earlier(stored)
        return 2 * RECORD_BYTES + stored.num_own_bytes + long + (0 if earlier is None else earlier.num_bytes)

    def put(self, stored: StoredResponse, texts: Mapping[bytes, bytes]) -> None:
        """Store a response in place of its earlier state, if any. Nothing may be `missing`; evicts nothing.

        texts: as for `missing`.
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
        """Replace the document that the client sees by one with the same long texts, in place. Raises KeyError for an
        unknown id.
        """
        stored = self.responses[response_id].stored
        self.num_bytes += len(response.data) - len(stored.response.data)
        stored.response = response

    def drop(self, response_id: str) -> None:
        """Remove a response, and its turn and earlier ones as far as no other response continues them. Raises KeyError
        for an unknown id.
        """
        self._forget(self.responses.pop(response_id))

    def texts_of(self, documents: Iterable[Document]) -> dict[bytes, bytes]:
        """Return the long texts of documents, UTF-8, by digest. Raises KeyError for one that is not stored."""
        return {digest: self._texts[digest] for document in documents for digest in document.digests}

    def finished(self, *, but: str | None) -> Iterator[str]:
        """Yield the ids of responses that may be evicted, oldest first; but: the id of one that may not, if any."""
        return (name for name, kept in self.responses.items() if not kept.stored.is_running and name != but)

    def _earlier(self, stored: StoredResponse) -> Turn | None:
        """Return the turn that a response continues; None for none. Nothing may be `missing`."""
        if stored.previous is None:
            return None
        known = self.responses.get(stored.id)
        if known is not None and known.stored.previous == stored.previous:
            return known.turn.earlier  # which may outlive its response
        return self.responses[stored.previous].turn

    def _take(self, documents: Iterable[Document], texts: Mapping[bytes, bytes]) -> None:
        """Count documents in num_bytes, and their long texts, which are kept and counted once however many documents
        have them. texts: as for `missing`.
        """
        for document in documents:
            self.num_bytes += len(document.data)
            for digest in document.digests:
                if digest not in self._texts:
                    self._texts[digest] = texts[digest]
                    self.num_bytes += len(texts[digest])
                self._uses[digest] = self._uses.get(digest, 0) + 1

    def _release(self, documents: Iterable[Document]) -> None:
        """Stop counting documents; drop long texts that no other document has."""
        for document in documents:
            self.num_bytes -= len(document.data)
            for digest in document.digests:
                self._uses[digest] -= 1
                if not self._uses[digest]:
                    del self._uses[digest]
                    self.num_bytes -= len(self._texts.pop(digest))

    def _forget(self, kept: Kept) -> None:
        """Release a response, and its turns as far as no other response continues them."""
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
