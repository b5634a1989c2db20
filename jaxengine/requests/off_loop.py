"""What of preparing a request would take an event loop too long: pictures, and tokens of a long text."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.media.parts import MediaPart
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.media_inputs import DATA, OPTIONS, has_media
from jaxengine.requests.prepared import Prompt
from scheduler.errors import RequestError

_LONG_TEXT = 8192  # characters


async def made_ready(inputs: InputProcessor, prompt: Prompt) -> Prompt:
    """The prompt so that `inputs.prepare` is quick; what that takes is done on a thread. Raises RequestError."""
    if has_media(prompt):
        return await asyncio.to_thread(inputs.make_ready, prompt)
    if isinstance(prompt, str) and len(prompt) >= _LONG_TEXT and inputs.tokenizer is not None:
        return {"prompt": prompt, "prompt_token_ids": await asyncio.to_thread(inputs.tokenizer.encode, prompt)}
    return prompt


async def with_media(
    inputs: InputProcessor,
    prompt: Mapping[str, Any],
    parts: Sequence[MediaPart],
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A prompt of token ids with the pictures and videos of its messages, and as many tokens as they make.

    parts: those that `inputs.media_reader.collect` has found. options: mm_processor_kwargs, which a model of text alone
    refuses. Raises RequestError, and OverloadedError where too many wait for theirs.
    """
    if not parts and (not options or inputs.media is not None):
        return {**prompt}
    loaded = {**prompt, OPTIONS: options}
    if parts:
        loaded[DATA] = await inputs.media_reader.loader.load(parts)
    try:
        ready: Any = await made_ready(inputs, loaded)
    except RequestError as error:
        if error.param == OPTIONS:
            raise
        # Whatever a processor calls it, here it came with the messages.
        raise RequestError(str(error), param=parts[0].param, value=error.value) from None
    return ready
