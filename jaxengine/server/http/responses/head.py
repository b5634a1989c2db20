"""Fields of a response that are not its output: those of its start, and those that are known at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.server.http.responses.protocol import Format, ResponsesRequest
from jaxengine.server.http.responses.tools import ResponseFunction


def response_head(
    body: ResponsesRequest, response_id: str, model: str, store: bool, params: SamplingParams
) -> dict[str, Any]:
    """Return the fields of a response that are known before it is generated: all that OpenAI's type and the Open
    Responses specification require. Some are None until its end: completed_at, error, incomplete_details,
    input_messages and output_messages. store: whether the response is stored. params: the engine's sampling parameters,
    which supply temperature, top_p and penalties.
    """
    plain, choice = {"format": {"type": "text"}}, body.tool_choice or "auto"
    text = {} if body.text is None else body.text.model_dump(exclude={"format"}, exclude_none=True)
    if body.text is not None and body.text.format is not None:
        text["format"] = _shown_format(body.text.format)
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "model": model,
        "background": bool(body.background),
        "error": None,
        "frequency_penalty": params.frequency_penalty,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        # Null as in vLLM: the first two are not taken, and the others are known at the end.
        **dict.fromkeys(("max_tool_calls", "prompt", "input_messages", "output_messages")),
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": params.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": store,
        "temperature": params.temperature,
        "text": {**plain, **text},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [_shown_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _shown_format(asked: Format) -> dict[str, Any]:
    """Return a format of the text as it appears in the response. That of a schema has all of OpenAI's fields; `strict`
    is whether all of the schema is enforced.
    """
    shown = asked.model_dump(exclude_none=True, by_alias=True)
    return {"description": None, "strict": True, **shown} if asked.type == "json_schema" else shown


def _shown_tool(tool: Any) -> dict[str, Any]:
    """Return a ResponseTool as it appears in the response; a function has all of OpenAI's fields."""
    shown = tool.model_dump(exclude_none=True)
    given = dict.fromkeys(("description", "parameters", "strict")) if isinstance(tool, ResponseFunction) else {}
    return {**given, **shown}


def raw_message(text: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """Return an entry of input_messages or output_messages: the prompt, or the output as the model wrote it."""
    return {"type": "raw_message_tokens", "message": text, "tokens": [*token_ids]}
