"""The message that submits requests to the engine, with arrays as raw bytes."""

from __future__ import annotations

import msgspec
import numpy as np

from jaxengine.requests.params.prepared import PreparedRequest
from jaxengine.scheduler.base.media import Media
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.server.link.media_messages import MediaMessage, array_bytes


class Member(msgspec.Struct, array_like=True):
    """One of the n sequences of a request, in a Submit.

    Attributes:
      handle: number by which the API process identifies it.
      request_id, seed: the fields of scheduler.Request.
    """

    handle: int
    request_id: str
    seed: int


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """Message that submits a validated request. Fields that are not listed have the meaning of those of
    scheduler.Request.

    Attributes:
      number: counts the Submits of an API process, from 1.
      members: the request's n sequences.
      prompt_token_ids: i32, as bytes.
      lora: name of the adapter, or None.
      media: images and videos, or None.
    """

    number: int
    members: list[Member]
    prompt_token_ids: bytes
    params: TokenParams
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    priority: int
    arrival_time: float
    deadline: float
    cache_salt: str | None
    lora: str | None
    client: str
    per_step: bool
    text_ends: bool
    media: MediaMessage | None = None
    session: str = ""


def submit(number: int, prepared: PreparedRequest, media: MediaMessage | None) -> Submit:
    """Return the Submit of a prepared request. The handles are the tags of its sequences.

    number: the Submit's number. media: the request's encoded images; None for a request without images.
    """
    first = prepared.requests[0]
    return Submit(
        number=number,
        members=[Member(request.tag, request.request_id, request.seed) for request in prepared.requests],
        prompt_token_ids=array_bytes(first.prompt_token_ids, np.int32),
        params=first.params,
        max_tokens=first.max_tokens,
        eos_token_ids=first.eos_token_ids,
        stop_token_ids=first.stop_token_ids,
        priority=first.priority,
        arrival_time=first.arrival_time,
        deadline=first.deadline,
        cache_salt=first.cache_salt,
        lora=first.lora,
        client=first.client,
        per_step=first.per_step,
        text_ends=first.text_ends,
        media=media,
        session=first.session,
    )


def requests_of(message: Submit, client: int, media: Media | None) -> list[Request]:
    """Return the scheduler's requests for a Submit, one for each member.

    client: number of the API process's connection, which becomes part of their tags. media: the decoded images, or
    None. All requests share the media and the prompt, a read-only i32 view of the message.
    """
    params, prompt = message.params, np.frombuffer(message.prompt_token_ids, np.int32)
    names = ("max_tokens", "eos_token_ids", "stop_token_ids", "priority", "arrival_time", "deadline", "cache_salt")
    shared = {name: getattr(message, name) for name in (*names, "lora", "session", "client", "per_step", "text_ends")}
    return [
        Request(each.request_id, prompt, params, seed=each.seed, tag=client << 32 | each.handle, media=media, **shared)
        for each in message.members
    ]
