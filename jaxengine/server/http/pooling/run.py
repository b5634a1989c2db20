"""A request to a pooling model under way: its prompts as token ids, and what the engine answers.

What all endpoints of pooling models share. Knows nothing of how an answer looks on the wire.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.options import RequestOptions
from jaxengine.requests.pooling_outputs import STOP, PoolingOutput, PoolingRequestOutput
from jaxengine.requests.pooling_params import PoolingParams
from jaxengine.server.http.errors import ApiError
from jaxengine.server.http.interleave import interleave
from jaxengine.server.http.pooling.protocol import InputBody, PoolingBody
from jaxengine.server.http.protocol import usage
from jaxengine.server.options import ServerConfig
from jaxengine.server.prompts import PromptEncoder, read_prompts
from scheduler.errors import RequestError

Answer = PoolingRequestOutput[PoolingOutput]


class PoolingServer:
    """What all requests share."""

    def __init__(self, engine: EngineClient, config: ServerConfig):
        self.engine = engine
        self.config = config
        self._encoder = PromptEncoder(engine.inputs)

    async def encode_input(self, body: InputBody, params: PoolingParams) -> list[list[int]]:
        """Token ids of each prompt of `input`. Raises RequestError."""
        inputs = self.engine.inputs
        longest = inputs.config.max_model_len if body.truncate_prompt_tokens is None else None
        given = read_prompts(
            body.input, self.config.max_prompts, inputs.model_config.vocab_size, longest, param="input"
        )
        texts = [each for each in given if isinstance(each, str)]
        special = body.add_special_tokens is not False
        encoded = iter(await self.encode(texts, params, special=special) if texts else ())
        return [self._cut(next(encoded) if isinstance(each, str) else each, body) for each in given]

    async def encode_texts(self, texts: Sequence[str], body: PoolingBody, params: PoolingParams) -> list[list[int]]:
        """Token ids of each text, cut as the request says. Raises RequestError."""
        return [self._cut(token_ids, body) for token_ids in await self.encode(texts, params)]

    async def encode(
        self, texts: Sequence[str], params: PoolingParams, *, special: bool = True, param: str = "input"
    ) -> list[list[int]]:
        """Token ids of each text, with the prompt of the model before it that the parameters name."""
        prefix = params.prefix(self.engine.inputs.require_pooling())
        whole = [prefix + text for text in texts]
        return await self._encoder.encode(whole, add_special_tokens=special, param=param)

    async def answers(
        self, prompts: Sequence[list[int]], params: PoolingParams, body: PoolingBody, name: str, options: RequestOptions
    ) -> list[Answer]:
        """What the engine says of each prompt, in their order. name: the request's in the engine.

        All are checked before any of them runs, and not more run at once than the engine has places for. Raises
        RequestError; ApiError where one has no answer.
        """
        inputs = self.engine.inputs
        wanted: list[Any] = [{"prompt_token_ids": ids, "cache_salt": body.cache_salt} for ids in prompts]
        if len(wanted) > 1:
            for prompt in wanted:
                inputs.prepare(prompt, params, options=options)

        def start(index: int) -> AsyncIterator[Answer]:
            return self.engine.pool(wanted[index], params, name if len(wanted) == 1 else f"{name}-{index}", options)

        found: dict[int, Answer] = {}
        async with contextlib.aclosing(interleave(start, len(wanted), inputs.config.max_num_seqs)) as outputs:
            async for index, output in outputs:
                if output.finish_reason != STOP:
                    raise _failure(output)
                found[index] = output
        return [found[index] for index in range(len(wanted))]

    def _cut(self, token_ids: list[int], body: PoolingBody) -> list[int]:
        keep, longest = body.truncate_prompt_tokens, self.engine.inputs.config.max_model_len
        if keep is None:
            return token_ids
        if keep > longest:
            text = f"truncate_prompt_tokens is {keep}; allowed are -1, and 1 to {longest} (max_model_len)"
            raise RequestError(text, param="truncate_prompt_tokens", value=keep)
        keep = longest if keep == -1 else keep
        return token_ids[:keep] if body.truncation_side == "right" else token_ids[-keep:]


def counts(answers: Sequence[Answer]) -> dict[str, Any]:
    """OpenAI's counts of tokens."""
    cached = sum(answer.num_cached_tokens for answer in answers)
    return usage(sum(len(answer.prompt_token_ids) for answer in answers), 0, cached)


def _failure(output: Answer) -> ApiError:
    if output.stop_reason == "timeout":
        return ApiError(504, "the request took longer than its timeout")
    if output.finish_reason == "abort":
        return ApiError(409, "the request was aborted")
    return ApiError(500, f"the request has no answer: {output.stop_reason}")
