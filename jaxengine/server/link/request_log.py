"""Log lines of requests, for the option enable_log_requests. A prompt is logged only up to max_log_len characters."""

from __future__ import annotations

import logging

from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.prepared import PreparedRequest

logger = logging.getLogger(__name__)

# Longest text of a request's parameters: stop strings, biases and schemas may be large, and are the client's.
_MAX_PARAMS = 1000


def log_request(prepared: PreparedRequest, options: RequestOptions, max_log_len: int | None) -> None:
    """Log, in one line, a request that is about to be submitted: its id, prompt length, parameters and adapter. The
    last two are cut to 1000 characters each.

    max_log_len: number of characters of the prompt, and of its token ids, to log; None or 0 for neither.
    """
    ids = prepared.requests[0].prompt_token_ids
    line = f"request {prepared.request_id}: {len(ids)} prompt tokens, {_cut(repr(prepared.params), _MAX_PARAMS)}"
    if options.lora is not None:
        line += f", adapter {_cut(repr(options.lora), _MAX_PARAMS)}"
    if max_log_len:
        text = None if prepared.prompt is None else prepared.prompt[: max_log_len + 1]
        line += f", prompt {_cut(text, max_log_len)!r}, prompt_token_ids {ids[:max_log_len].tolist()}"
    logger.info("%s", line)


def _cut(text: str | None, length: int) -> str | None:
    """Return a text, cut to its first `length` characters and "..." if it is longer; None for None."""
    return text if text is None or len(text) <= length else text[:length] + "..."
