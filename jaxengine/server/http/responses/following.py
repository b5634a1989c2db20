"""Streams of responses that are generated in the background, from their stored events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.server.http.answer.sse import typed_event
from jaxengine.server.http.responses.output import Said
from jaxengine.server.stored.events import NumberedEvent
from jaxengine.server.stored.records import Responses


def numbered(said: Sequence[Said]) -> list[NumberedEvent]:
    """Return stream events with their numbers, encoded, as they are stored."""
    return [(each["sequence_number"], typed_event(each)) for each in said]


async def followed(store: Responses, response_id: str, owner: str, number: int) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed response with numbers above `number`, encoded, to its end. Events that the store
    has lost with its process are left out. Raises EngineDeadError if the store is down or no longer has the response,
    and if the response ended without a last event because its process did.
    """
    is_whole = False
    while (told := await store.events_after(response_id, owner, number)) is not None:
        if told.events:
            number = told.events[-1][0]
            yield b"".join(data for _, data in told.events)
        if told.is_last:
            is_whole = not told.is_cut
            break
    if not is_whole:
        raise EngineDeadError("the process that worked on the response has ended")
