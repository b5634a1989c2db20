"""Writing of an output as JSON values, on a thread if that takes a long time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from jaxengine.requests.output.outputs import RequestOutput

T = TypeVar("T")

# Their log-probabilities take some ten milliseconds to write.
_MANY_POSITIONS = 1000


async def written(output: RequestOutput, write: Callable[[], T]) -> T:
    """Return `write()`, which writes an engine's output. It runs on a thread, so that other clients need not wait, if
    prompt and completions have log-probabilities at more than _MANY_POSITIONS positions together. Raises its errors.
    """
    number = len(output.prompt_logprobs or ()) + sum(len(each.logprobs or ()) for each in output.outputs)
    return await asyncio.to_thread(write) if number > _MANY_POSITIONS else write()
