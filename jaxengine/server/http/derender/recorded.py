"""Engine over outputs that are known: token ids that another server has generated, with their texts made here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxengine.api.engine_client import EngineClient, EngineWrapper
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.output.detokenizer import IncrementalDetokenizer
from jaxengine.requests.output.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.server.base.workers import Workers
from jaxengine.server.http.derender.protocol import GivenPiece

# Number of a prompt's last ids that affect the text after it.
_TAIL = 8


@dataclass
class Recording:
    """Outputs of one request.

    Attributes:
      pieces: choices as they arrived: complete ones in one piece, or parts of one in several.
      prompt_ids: the prompt's token ids, as far as they are known.
      kv_transfer_params: those of the answer.
    """

    pieces: Sequence[Sequence[GivenPiece]]
    prompt_ids: list[int] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None


class RecordedEngine(EngineWrapper):
    """Engine that yields the recorded outputs of a request, one for each piece, and generates nothing.

    engine: the engine with the tokenizer. recordings: by the request's id. workers: threads that make the texts.
    """

    def __init__(self, engine: EngineClient, recordings: Mapping[str, Recording], workers: Workers):
        super().__init__(engine)
        self._recordings = recordings
        self._workers = workers

    async def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the recorded outputs of request `request_id`, with texts as `sampling_params` specify them. Each has
        only what is new in its piece. Raises RequestError for log-probabilities that do not belong to the tokens,
        OverloadedError if too many calls wait for a thread.
        """
        recording, params = self._recordings[request_id or ""], sampling_params or SamplingParams()
        for output in await self._workers.run(_outputs, recording, params, self.inputs, request_id or ""):
            yield output


def _outputs(recording: Recording, params: SamplingParams, inputs: InputProcessor, name: str) -> list[RequestOutput]:
    """Return the outputs of a recording, one for each piece. name: id of the request. Raises RequestError for
    log-probabilities that do not belong to the tokens.
    """
    texts: dict[int, _Text] = {}
    found = []
    for piece in recording.pieces:
        outputs = []
        for choice in piece:
            if choice.index not in texts:
                texts[choice.index] = _Text(choice, params, inputs, recording.prompt_ids)
            outputs.append(texts[choice.index].output(choice))
        found.append(
            RequestOutput(
                request_id=name,
                prompt=None,
                prompt_token_ids=recording.prompt_ids,
                outputs=outputs,
                finished=all(each.finish_reason is not None for each in outputs),
                kv_transfer_params=recording.kv_transfer_params,
            )
        )
    return found


class _Text:
    """Text of one choice, which grows with each of its pieces.

    The text ends before the stop token that ended the choice, and at a stop string. Complete choices that ended
    otherwise are not searched for stop strings.
    """

    def __init__(self, first: GivenPiece, params: SamplingParams, inputs: InputProcessor, prompt_ids: Sequence[int]):
        """Begin with no text. It ends at the stop string that is the stop_reason of `first` or, unless that ended
        otherwise, at one of params.stop. first: the first piece. prompt_ids: token ids of the prompt, as far as they
        are known. Raises RequestError without a tokenizer.
        """
        self._params, self._tokenizer = params, inputs.require_tokenizer()
        eos = () if params.ignore_eos else inputs.eos_token_ids()
        self._stop_ids = frozenset((*eos, *params.stop_token_ids))
        ended, reason = first.finish_reason, first.stop_reason
        stops = dict.fromkeys(params.stop if ended in (None, "stop") and not isinstance(reason, int) else ())
        if isinstance(reason, str) and reason and ended == "stop":
            stops = {reason: None}
        self._num_tokens = 0
        self._detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            stop=tuple(stops),
            stop_after=params.stop_after,  # pyright: ignore[reportArgumentType]  # a dict was converted
            include_stop_str_in_output=params.include_stop_str_in_output,
            prompt_tail_ids=prompt_ids[-_TAIL:],
        )

    def output(self, piece: GivenPiece) -> CompletionOutput:
        """Return the next piece as an output with its new text. Stop strings are not looked for in the first min_tokens
        tokens; one that is found becomes the stop_reason of an output that ended with "stop" and has none. Raises
        RequestError for log-probabilities that do not belong to its tokens.
        """
        ids = list(piece.token_ids or ())
        shown = ids[:-1] if self._ends_hidden(piece) else ids
        num_unchecked = max(0, self._params.min_tokens - self._num_tokens)
        self._num_tokens += len(ids)
        self._detokenizer.append(shown[:num_unchecked], check_stop=False)
        met = self._detokenizer.append(shown[num_unchecked:])
        if piece.finish_reason is not None:
            met = self._detokenizer.finish()
        positions = piece.positions("choices")
        return CompletionOutput(
            index=piece.index,
            text=self._detokenizer.delta(),
            token_ids=ids,
            logprobs=None if positions is None else [self._named(each) for each in positions],
            finish_reason=piece.finish_reason,
            stop_reason=met if piece.stop_reason is None and piece.finish_reason == "stop" else piece.stop_reason,
        )

    def _ends_hidden(self, piece: GivenPiece) -> bool:
        """Whether the last token of a piece is left out of the text, because it is the stop token that ended the output
        and include_stop_str_in_output is False.
        """
        ended = piece.finish_reason == "stop" and not isinstance(piece.stop_reason, str) and bool(piece.token_ids)
        if not ended or self._params.include_stop_str_in_output or not piece.token_ids:
            return False
        last = piece.token_ids[-1]
        return last in self._stop_ids if piece.stop_reason is None else last == piece.stop_reason

    def _named(self, position: PositionLogprobs) -> PositionLogprobs:
        """Return the log-probabilities of a position with the tokens' texts."""
        decode = self._tokenizer.decode
        return {
            token_id: replace(entry, decoded_token=decode([token_id], skip_special_tokens=False))
            for token_id, entry in position.items()
        }
