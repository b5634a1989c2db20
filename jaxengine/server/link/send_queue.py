"""Queue of an API process's Submits that the engine has not read yet."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass

from jaxengine.requests.params.prepared import PreparedRequest
from jaxengine.server.link import messages, submit_messages
from jaxengine.server.link.media_senders import MediaSender
from jaxengine.server.link.messages import Load


@dataclass(frozen=True)
class Pending:
    """Submit that the engine is not known to have read.

    Attributes:
      number: the Submit's number.
      prepared: the request, which may have to be sent again.
    """

    number: int
    prepared: PreparedRequest

    @property
    def num_requests(self) -> int:
        """Number of the request's n sequences."""
        return len(self.prepared.requests)

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens, summed over the n sequences."""
        return sum(request.num_prompt_tokens for request in self.prepared.requests)


class SendQueue:
    """Queue of unread Submits in the order of their numbers.

    Attributes:
      media: writes the media parts of the messages.
    """

    def __init__(self):
        self.media = MediaSender()
        self._num_submitted = 0
        self._pending: collections.deque[Pending] = collections.deque()

    def message(self, prepared: PreparedRequest, *, whole: bool = False) -> bytes:
        """Append a request to the queue, and return its encoded Submit, which must be sent at once. whole: include the
        pixels of all images.

        Raises the errors of `media.message`, such as RuntimeError for pixels that were dropped. Nothing is appended
        then, and `media` is reset, so that nothing counts as cached.
        """
        number, media = self._num_submitted + 1, prepared.requests[0].media
        try:
            pictures = None if media is None else self.media.message(number, media, whole=whole)
            message = messages.encode(submit_messages.submit(number, prepared, pictures))
        except Exception:
            self.media.reset()  # it may have recorded pixels as sent that were not
            raise
        self._num_submitted = number
        self._pending.append(Pending(number, prepared))
        return message

    def read(self, received: int) -> Iterator[Pending]:
        """Remove and yield, during the iteration, the Submits up to and including number `received`, which the engine
        has read. `media` is notified when the iteration begins.
        """
        self.media.has_read(received)
        while self._pending and self._pending[0].number <= received:
            yield self._pending.popleft()

    def lost(self) -> None:
        """Drop all Submits after the connection was lost, and notify `media`."""
        self._pending.clear()
        self.media.lost()

    def load_with(self, load: Load, num_slots: int) -> Load:
        """Return the load that the engine would have after reading the queued Submits: `load`, which it last sent, plus
        their requests and tokens.

        num_slots: number of requests that the engine runs at once; further ones count as waiting.
        """
        if not self._pending:
            return load
        num_new = sum(pending.num_requests for pending in self._pending)
        num_running = min(num_slots, load.num_running + num_new)
        num_waiting = load.num_waiting + num_new - (num_running - load.num_running)
        num_tokens = load.num_waiting_tokens + sum(pending.num_tokens for pending in self._pending)
        return Load(num_running, num_waiting, num_tokens, load.retry_after)
