"""Choices of a completion: text, finish reasons, and logprobs in the form of OpenAI's older endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxengine.requests.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jaxengine.server.http.protocol import json_logprob, json_position
from jaxengine.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxengine.server.http.completions.protocol import CompletionRequest


class ChoiceWriter:
    """Writes the choices of one request; in a stream, the new parts."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer | None, as_token_ids: bool):
        """as_token_ids: tokens are written as token_id:N."""
        self._body = body
        self._as_token_ids = as_token_ids
        self._tokenizer = tokenizer
        self._n = body.n or 1
        self._text_lengths: dict[int, int] = {}

    def choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """JSON of a choice. The n answers of prompt p have indices p * n to p * n + n - 1."""
        body = self._body
        index = prompt_index * self._n + completion.index
        begins = index not in self._text_lengths
        text, token_ids, logprobs = completion.text, completion.token_ids, completion.logprobs
        if begins and body.echo:
            text = self._prompt_text(output) + text
            token_ids = [*output.prompt_token_ids, *token_ids]
            if logprobs is not None:
                logprobs = [*(output.prompt_logprobs or ()), *logprobs]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if logprobs is None else self._legacy_logprobs(index, token_ids, logprobs),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        self._text_lengths.setdefault(index, 0)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [json_position(each) for each in output.prompt_logprobs or ()]
        shown = bool(body.return_token_ids)
        choice["token_ids"] = completion.token_ids if shown else None
        choice["prompt_token_ids"] = output.prompt_token_ids if shown and begins else None
        return choice

    @staticmethod
    def says_something(choice: dict[str, Any]) -> bool:
        """Whether a chunk has content: half a character or the beginning of a stop string is held back."""
        return bool(choice["text"] or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids"))

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        # Including special tokens, as in the offsets of logprobs.
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _legacy_logprobs(
        self, index: int, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> dict[str, Any]:
        offset = self._text_lengths.get(index, 0)
        tokens, values, tops, offsets = [], [], [], []
        for token_id, position in zip(token_ids, positions, strict=True):
            token = self._name(token_id, position)
            tokens.append(token)
            offsets.append(offset)
            offset += len(token)
            values.append(None if position is None else json_logprob(position[token_id].logprob))
            tops.append(None if position is None else self._tops(position))
        self._text_lengths[index] = offset
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}

    def _tops(self, position: PositionLogprobs) -> dict[str, float]:
        best: dict[str, float] = {}
        for token_id in position:
            name, value = self._name(token_id, position), json_logprob(position[token_id].logprob)
            # Several tokens may be parts of characters with the same text; the likeliest one is kept.
            if value > best.get(name, float("-inf")):
                best[name] = value
        return best

    def _name(self, token_id: int, position: PositionLogprobs | None) -> str:
        if not self._as_token_ids and self._tokenizer is not None:
            text = None if position is None else position[token_id].decoded_token
            return self._tokenizer.decode([token_id], skip_special_tokens=False) if text is None else text
        return f"token_id:{token_id}"
