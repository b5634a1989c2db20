"""Requests to a pooling model: tokenization of prompts, and the engine's answers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxengine.api.engine_client import EngineClient
from jaxengine.api.scoring import Content, Side, pair_prompt
from jaxengine.media.parts import MediaPart
from jaxengine.requests.media.inputs import READY, UNCUT, verify_whole
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.pooling.outputs import STOP, PoolingOutput, PoolingRequestOutput
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.requests.pooling_texts import has_messages, padded, written
from jaxengine.requests.run_in_thread import with_media
from jaxengine.scheduler.base.errors import RequestError, prompt_length_error
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.prompts import PromptEncoder, read_prompts
from jaxengine.server.base.workers import Workers
from jaxengine.server.http.answer.interleave import interleave
from jaxengine.server.http.pooling.protocol import InputBody, PoolingBody, RerankRequest, ScoreRequest
from jaxengine.server.http.request.errors import abort_error
from jaxengine.server.http.request.protocol import NamedRequest, usage

# Function that loads a prompt's media and returns it with them, as `InputProcessor.make_ready` does.
Later = Callable[[], Awaitable[dict[str, Any]]]
PooledAnswer = PoolingRequestOutput[PoolingOutput]
# About what the media of a single prompt may need: 12 bytes for each of max_media_pixels.
MAX_HELD_BYTES = 1 << 30


class _Room:
    """Memory for the media of the prompts of one request that run at the same time."""

    def __init__(self) -> None:
        self._held = 0
        self._loading = asyncio.Lock()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @contextlib.asynccontextmanager
    async def loaded(self, given: list[int] | Later) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield a prompt for the engine: one of token ids at once; one with media, which `given` loads, as soon as no
        other is being loaded and the prompts that run hold less than MAX_HELD_BYTES. It counts as held until the
        context is left. Raises the errors of `given`.
        """
        if isinstance(given, list):
            yield {"prompt_token_ids": given}
            return
        async with self._loading:  # all at once would exceed the client's share of waiting media
            await self._has_room.wait()
            prompt = await given()
            media = prompt.get(READY)
            size = 0 if media is None else sum(item.num_bytes for item in media.items)
            self._add(size)
        try:
            yield prompt
        finally:
            self._add(-size)

    def _add(self, size: int) -> None:
        """Add a number of bytes, which may be negative, to those that are held."""
        self._held += size
        if self._held < MAX_HELD_BYTES:
            self._has_room.set()
        else:
            self._has_room.clear()


class PoolingServer:
    """Objects that all pooling requests of a server share: engine, options, encoder of prompts, and threads that write
    long answers.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig):
        self.engine = engine
        self.config = config
        self._encoder = PromptEncoder(engine.inputs)
        self.writers = Workers(max_waiting=sys.maxsize)  # vectors that are computed are never refused

    async def prompts(self, body: InputBody, params: PoolingParams) -> Sequence[list[int] | Later]:
        """Return the prompts of `input`, by `encode_given`, or one of each conversation in messages.

        Raises RequestError for another form of input, too many prompts, prompts that are too long, conversations that
        cannot be rendered, media that cannot be used, and mm_processor_kwargs without media; OverloadedError.
        """
        inputs, most = self.engine.inputs, self.config.max_prompts
        conversations = body.conversations(most)
        found: Sequence[list[int] | Later]
        if conversations is None:
            longest = inputs.config.max_model_len if body.truncate_prompt_tokens is None else None
            given = read_prompts(body.input, most, inputs, longest, param="input")
            found = await self.encode_given(given, body, params, special=body.add_special_tokens is not False)
        else:
            found = [await self._conversation(each, body) for each in conversations]
        if body.mm_processor_kwargs and not any(map(callable, found)):
            problem = "mm_processor_kwargs is only allowed with messages that have media"
            raise RequestError(problem, param="mm_processor_kwargs")
        return found

    async def _conversation(self, messages: Sequence[dict[str, Any]], body: InputBody) -> list[int] | Later:
        """Return the prompt of a conversation: token ids, truncated if the request has truncate_prompt_tokens, or with
        media a function that loads and preprocesses them and raises the errors of `_ready`.

        Raises RequestError for a conversation that cannot be rendered or is too long, OverloadedError.
        """
        texts, parts = self.engine.inputs.media_reader.collect(messages)
        text, ids = await self._encode_messages(body, texts)
        if not parts:
            return self._cut(ids, body, "messages")

        async def load() -> dict[str, Any]:
            prompt = {"prompt": text, "prompt_token_ids": ids}
            ready = await self._ready(prompt, parts, "messages", body, body.mm_processor_kwargs)
            return {name: value for name, value in ready.items() if name != "prompt"}  # not a text of the caller's

        return load

    async def encode_content(self, content: Content, body: PoolingBody) -> dict[str, Any]:
        """Return the prompt of a query or document with media, which are loaded and preprocessed. Raises the errors of
        `_ready`, and OverloadedError.
        """
        param = content.parts[0].param
        (ids,) = await self._encoder.encode([content.text], param=param)
        return await self._ready({"prompt": content.text, "prompt_token_ids": ids}, content.parts, param, body)

    async def _ready(
        self,
        prompt: Mapping[str, Any],
        parts: Sequence[MediaPart],
        param: str,
        body: PoolingBody,
        options: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return a prompt, of text and token ids, with its media loaded and preprocessed. param, options: its field,
        for errors, and mm_processor_kwargs. Raises the errors of `with_media`, and RequestError for more than
        max_model_len tokens, or more than the truncate_prompt_tokens of `body`.
        """
        inputs = self.engine.inputs
        keep = self._num_kept(body)
        ready = await with_media(inputs, prompt, parts, options)
        count, longest = len(ready["prompt_token_ids"]), inputs.config.max_model_len
        verify_whole(count, keep, body.truncate_prompt_tokens)
        if not 1 <= count <= longest:
            raise prompt_length_error(param, count, longest, longest)
        return ready

    async def _encode_messages(self, body: InputBody, messages: Sequence[dict[str, Any]]) -> tuple[str, list[int]]:
        """Return (the text, the token ids) of a conversation by the chat template. Its media have been collected.

        Raises RequestError for one that cannot be rendered, and for variables of the template that the server does not
        allow; OverloadedError.
        """
        inputs, variables = self.engine.inputs, body.chat_template_kwargs
        self._check_variables(variables)

        def render() -> list[str]:
            """Return the text of the conversation, alone in a list."""
            return [
                inputs.require_tokenizer().apply_chat_template(
                    messages,
                    add_generation_prompt=bool(body.add_generation_prompt),
                    continue_final_message=bool(body.continue_final_message),
                    chat_template=inputs.config.chat_template,
                    chat_template_kwargs={**(self.config.default_chat_template_kwargs or {}), **(variables or {})},
                    placeholder=inputs.media_reader.placeholder,
                )
            ]

        rendered, side = await self._encoder.run(render), None
        if body.truncate_prompt_tokens is not None:
            side = body.truncation_side or inputs.require_pooling().cut_side
        special = bool(body.add_special_tokens)
        (ids,) = await self._encoder.encode(rendered, add_special_tokens=special, param="messages", cut_side=side)
        return rendered[0], ids

    def _check_variables(self, variables: Mapping[str, Any] | None) -> None:
        """Raise RequestError for a request's variables of the chat template that the server does not allow."""
        if variables and not self.config.chat_template_kwargs_allowed:
            raise RequestError("chat_template_kwargs are not allowed by this server", param="chat_template_kwargs")

    async def encode_given(
        self,
        given: Sequence[str | list[int]],
        body: PoolingBody,
        params: PoolingParams,
        *,
        special: bool = True,
        param: str = "input",
    ) -> list[list[int]]:
        """Return the token ids of each of `given`, texts or lists of token ids, truncated if the request has
        truncate_prompt_tokens. The model's prompt that `params` name is prepended to texts.

        special: whether special tokens are added to texts. param: field of `given`, for errors. Raises RequestError,
        also for truncate_prompt_tokens above max_model_len and for a prompt that is too long, and OverloadedError.
        """
        texts = [each for each in given if isinstance(each, str)]
        side = None
        if body.truncate_prompt_tokens is not None:
            side = body.truncation_side or self.engine.inputs.require_pooling().cut_side
        encoded = iter(await self.encode(texts, params, special=special, param=param, cut_side=side) if texts else ())
        return [self._cut(next(encoded) if isinstance(each, str) else each, body, param) for each in given]

    async def shortened(
        self, pairs: Sequence[tuple[Side, Side]], body: ScoreRequest | RerankRequest
    ) -> list[tuple[Side, Side]]:
        """Return the pairs with their texts cut as max_tokens_per_query and max_tokens_per_doc say. A text that is in
        several pairs is cut once. Raises RequestError, also for a limit of a side with media, and OverloadedError.
        """
        sides: list[Sequence[Side]] = list(zip(*pairs, strict=True))
        for number, name in enumerate(("max_tokens_per_query", "max_tokens_per_doc")):
            if not (limit := getattr(body, name)):
                continue
            texts = [each for each in dict.fromkeys(sides[number]) if isinstance(each, str)]
            if len(texts) < len({*sides[number]}):
                problem = f"{name} is only allowed without media: {UNCUT}"
                raise RequestError(problem, param=name, value=limit)
            cut: dict[Side, str] = dict(zip(texts, await self._encoder.beginnings(texts, limit), strict=True))
            sides[number] = [cut[text] for text in sides[number]]
        return list(zip(*sides, strict=True))

    async def encode_pairs(
        self, pairs: Sequence[tuple[Side, Side]], body: ScoreRequest | RerankRequest
    ) -> list[str | list[int]]:
        """Return the prompt of each pair of texts (scoring.pair_prompt): a text, or token ids, which are truncated if
        the request has truncate_prompt_tokens. The prompts are made on a thread.

        Raises RequestError, also for pairs that have more characters altogether than max_request_bytes, since one text
        may be in all of them; OverloadedError if too many requests wait.
        """
        inputs, most = self.engine.inputs, self.config.max_request_bytes
        self._check_variables(body.chat_template_kwargs)
        lengths = [sum(len(each) for each in pair if isinstance(each, str)) for pair in pairs]
        if sum(lengths) > most:
            problem = f"the pairs have {sum(lengths)} characters together; allowed: {most} (max_request_bytes)"
            raise RequestError(problem, param=body.sides[1])
        if body.truncate_prompt_tokens is None:
            self._encoder.verify_length(max(lengths), body.sides[1])

        def made() -> list[str | list[int]]:
            """Return the prompts of all pairs, those of token ids as `_cut` leaves them."""
            prompts = (pair_prompt(inputs, *pair, variables=body.variables) for pair in pairs)
            return [each if isinstance(each, str) else self._cut(each, body, body.sides[1]) for each in prompts]

        return await self._encoder.run(made)

    async def encode(
        self,
        texts: Sequence[str],
        params: PoolingParams,
        *,
        special: bool = True,
        param: str = "input",
        cut_side: str | None = None,
    ) -> list[list[int]]:
        """Return the token ids of each text, with the model's prompt that `params` name prepended, or as a message.

        special: whether special tokens are added. param: field of the texts, for errors. cut_side: "left" or "right" if
        the caller truncates token ids on that side; None encodes whole texts. Raises RequestError, also for whole texts
        that cannot fit into max_model_len, and OverloadedError.
        """
        inputs = self.engine.inputs
        model, tokenizer = inputs.require_pooling(), inputs.require_tokenizer()
        write = partial(written, tokenizer, model, params.prefix(model), texts, inputs.config.chat_template)
        whole, adds = await self._encoder.run(write) if has_messages(model) else write()
        special = special and adds
        found = await self._encoder.encode(whole, add_special_tokens=special, param=param, cut_side=cut_side)
        return [padded(tokenizer, model, each) for each in found]

    async def answers(
        self,
        prompts: Sequence[list[int] | Later],
        params: PoolingParams,
        body: NamedRequest,
        name: str,
        options: RequestOptions,
    ) -> list[PooledAnswer]:
        """Run the prompts, each of token ids or a function that loads it, and return the engine's output for each, in
        order, at most max_num_seqs at a time. A prompt is loaded when its turn comes, and while those that run hold
        less than MAX_HELD_BYTES of media.

        name: the request's id in the engine; with several prompts, number i runs under NAME-i. body: has the
        cache_salt. Several prompts of token ids are all validated before any of them runs. Raises the errors of
        EngineClient.pool and of the functions, and ApiError (504, 409 or 500) if a prompt has no result, after ending
        the others.
        """
        inputs, room, salt = self.engine.inputs, _Room(), {"cache_salt": body.cache_salt}
        for given in prompts if len(prompts) > 1 else ():
            if isinstance(given, list):
                inputs.prepare({"prompt_token_ids": given, **salt}, params, options=options)

        async def run(index: int) -> AsyncGenerator[PooledAnswer, None]:
            """Yield the output of prompt number `index`, whose media are loaded once `room` has room for them. Raises
            the errors of loading and of EngineClient.pool.
            """
            given = prompts[index]
            async with room.loaded(given) as prompt:
                whole: Any = {**prompt, **salt}
                stream = self.engine.pool(whole, params, name if len(prompts) == 1 else f"{name}-{index}", options)
                async with contextlib.aclosing(stream):  # pyright: ignore[reportArgumentType]
                    async for output in stream:
                        yield output

        found: dict[int, PooledAnswer] = {}
        async with contextlib.aclosing(interleave(run, len(prompts), inputs.config.max_num_seqs)) as outputs:
            async for index, output in outputs:
                if output.finish_reason != STOP:
                    raise abort_error(output.finish_reason, output.stop_reason)
                found[index] = output
        return [found[index] for index in range(len(prompts))]

    def _num_kept(self, body: PoolingBody) -> int | None:
        """Return the number of a prompt's tokens that the request keeps; None for all. Raises RequestError for a
        truncate_prompt_tokens above max_model_len.
        """
        return PoolingParams(truncate_prompt_tokens=body.truncate_prompt_tokens).num_kept(
            self.engine.inputs.config.max_model_len
        )

    def _cut(self, token_ids: list[int], body: PoolingBody, param: str) -> list[int]:
        """Return a prompt's token ids truncated to truncate_prompt_tokens (-1: max_model_len) of the request, on its
        truncation_side; unchanged without the former. Raises RequestError for a number above max_model_len and, with
        the field `param`, if there are then no tokens or more than max_model_len.
        """
        keep, longest = self._num_kept(body), self.engine.inputs.config.max_model_len
        if keep is not None:
            token_ids = self.engine.inputs.require_pooling().cut(token_ids, keep, body.truncation_side)
        if not 1 <= len(token_ids) <= longest:
            raise prompt_length_error(param, len(token_ids), longest, longest)
        return token_ids


def counts(answers: Sequence[PoolingRequestOutput[Any]]) -> dict[str, Any]:
    """Return OpenAI's usage object with the token counts of all answers together."""
    cached = sum(answer.num_cached_tokens for answer in answers)
    return usage(sum(len(answer.prompt_token_ids) for answer in answers), 0, cached)
