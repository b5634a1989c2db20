"""Slow parts of request preparation, run in a thread, off the event loop: media, and tokenization of long texts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.media.parts import MediaPart
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.media.inputs import DATA, OPTIONS, PROMPT_EMBEDS, has_media
from jaxengine.requests.params.prepared import Prompt
from jaxengine.scheduler.base.errors import RequestError

_LONG_TEXT = 8192  # characters


async def make_ready(inputs: InputProcessor, prompt: Prompt) -> Prompt:
    """Preprocess a prompt's media or embeddings, or tokenize a long text, in a thread; return the prompt for a fast
    `inputs.prepare`. Other prompts are returned unchanged. Raises RequestError for media or embeddings that cannot be
    used.
    """
    if has_media(prompt) or (isinstance(prompt, Mapping) and prompt.get(PROMPT_EMBEDS) is not None):
        return await inputs.media_reader.loader.process(inputs.make_ready, prompt)
    if isinstance(prompt, str) and len(prompt) >= _LONG_TEXT and inputs.tokenizer is not None:
        return {"prompt": prompt, "prompt_token_ids": await asyncio.to_thread(inputs.tokenizer.encode, prompt)}
    return prompt


async def with_media(
    inputs: InputProcessor,
    prompt: Mapping[str, Any],
    parts: Sequence[MediaPart],
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Load and preprocess the media of a chat prompt of token ids; return the prompt with them and their placeholders.
    Without media, returns a copy of the prompt.

    parts: result of `inputs.media_reader.collect`. options: mm_processor_kwargs, which a text model refuses. Raises
    RequestError, which names the field of the messages that the first part came from, or the options; and
    OverloadedError if too many parts are waiting.
    """
    if not parts and (not options or inputs.media is not None):
        return {**prompt}
    loaded = {**prompt, OPTIONS: options}
    if parts:
        loaded[DATA] = await inputs.media_reader.loader.load(parts)
    try:
        ready: Any = await make_ready(inputs, loaded)
    except RequestError as error:
        if error.param == OPTIONS:
            raise
        # The media came with the messages, whatever field the processor names.
        raise RequestError(str(error), param=parts[0].param, value=error.value) from None
    return ready
