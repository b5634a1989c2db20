"""Choices of a completion: text, finish reasons, and logprobs in the format of OpenAI's older endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxengine.requests.output.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.server.base.captured import captured_fields
from jaxengine.server.http.answer.sampling_mass import NO_SAMPLING, sampling_fields
from jaxengine.server.http.answer.weight_spans import SpanWriter
from jaxengine.server.http.completions.offsets import OutputOffsets, prompt_offsets
from jaxengine.server.http.request.json_logprobs import json_logprob, json_position
from jaxengine.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxengine.server.http.completions.protocol import CompletionRequest


class ChoiceWriter:
    """Writer of the choices of one request or, in a stream, of their new parts."""

    def __init__(
        self, body: CompletionRequest, params: SamplingParams, tokenizer: Tokenizer | None, as_token_ids: bool
    ):
        """Store the settings. params: sampling parameters with which the text is detokenized. as_token_ids: whether
        tokens are written as token_id:N, as they always are without a tokenizer.
        """
        self._body = body
        self._params = params
        self._as_token_ids = as_token_ids
        self._tokenizer = tokenizer
        self._n = body.n or 1
        self._offsets: dict[int, OutputOffsets] = {}
        self._spans = SpanWriter()

    def choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """Return the JSON of the choice for `completion`, one of output.outputs, or in a stream of its new part. Call
        it for each part in order: the first part has the prompt if the request echoes it.

        prompt_index: index of the prompt. The n answers to prompt p have indices p * n to p * n + n - 1.
        """
        body = self._body
        index = prompt_index * self._n + completion.index
        begins = index not in self._offsets
        prompt, prompt_ids = self._prompt_text(output) if begins and body.echo else "", output.prompt_token_ids
        if begins:
            self._offsets[index] = OutputOffsets(self._tokenizer, self._params, prompt_ids, len(prompt))
        text, token_ids, logprobs = prompt + completion.text, completion.token_ids, completion.logprobs
        offsets = [] if logprobs is None else self._offsets[index].of(token_ids)
        if begins and body.echo:
            token_ids = [*prompt_ids, *token_ids]
            if logprobs is not None:
                logprobs = [*(output.prompt_logprobs or ()), *logprobs]
                offsets = [*prompt_offsets(self._tokenizer, prompt, prompt_ids), *offsets]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else self._legacy_logprobs(token_ids, logprobs, offsets),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [json_position(each) for each in output.prompt_logprobs or ()]
        shown = bool(body.return_token_ids)
        choice["token_ids"] = completion.token_ids if shown else None
        choice["prompt_token_ids"] = output.prompt_token_ids if shown and begins else None
        choice |= sampling_fields(completion) | captured_fields(completion)
        return choice | (self._spans.of(index, completion) if body.return_weight_versions else {})

    @staticmethod
    def says_something(choice: dict[str, Any]) -> bool:
        """Whether a chunk's choice has text, a finish reason, scores, token ids or activations. It has none of them
        while a partial character or the beginning of a stop string is held back.
        """
        names = ("text", "finish_reason", "logprobs", "token_ids", "captured", *NO_SAMPLING)
        return any(choice.get(name) for name in names)

    def _prompt_text(self, output: RequestOutput) -> str:
        """Return the prompt's text, decoded from its token ids, special tokens included, if the output does not have
        it; "" if it cannot be decoded for lack of a tokenizer.
        """
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        # Including special tokens, as in the offsets of logprobs.
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _legacy_logprobs(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None], offsets: list[int]
    ) -> dict[str, Any]:
        """Return log-probabilities in the format of OpenAI's completions: lists text_offset, token_logprobs, tokens and
        top_logprobs.

        positions: log-probabilities of each token, None for a token without them, whose entries in token_logprobs and
        top_logprobs are then None. offsets: offset of each token in the text, in characters.
        """
        tokens, values, tops = [], [], []
        for token_id, position in zip(token_ids, positions, strict=True):
            tokens.append(self._name(token_id, position))
            values.append(None if position is None else json_logprob(position[token_id].logprob))
            tops.append(None if position is None else self._tops(position))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}

    def _tops(self, position: PositionLogprobs) -> dict[str, float]:
        """Return the log-probabilities (`json_logprob`) of a position by the token's `_name`. Of several tokens with
        one name, the highest counts.
        """
        best: dict[str, float] = {}
        for token_id in position:
            name, value = self._name(token_id, position), json_logprob(position[token_id].logprob)
            # Several tokens may be parts of characters and have the same text; the likeliest one counts.
            if value > best.get(name, float("-inf")):
                best[name] = value
        return best

    def _name(self, token_id: int, position: PositionLogprobs | None) -> str:
        """Return a token's text, that in `position` if it has one, or token_id:N if that is requested or there is no
        tokenizer.
        """
        if not self._as_token_ids and self._tokenizer is not None:
            text = None if position is None else position[token_id].decoded_token
            return self._tokenizer.decode([token_id], skip_special_tokens=False) if text is None else text
        return f"token_id:{token_id}"
