"""Conversion of an engine's outputs to messages of inference.proto."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxengine.requests.output.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from jaxengine.server.base.captured import captured_file
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.grpc.convert import Wanted

FINISH_REASONS = {
    "stop": pb.FinishInfo.STOP,
    "length": pb.FinishInfo.LENGTH,
    "abort": pb.FinishInfo.ABORTED,
    "error": pb.FinishInfo.ERROR,
    "repetition": pb.FinishInfo.REPETITION,
}


class AnswerWriter:
    """Writer of the answer to one request, complete or in chunks."""

    def __init__(self, request_id: str, model: str, wanted: Wanted):
        self._request_id, self._model = request_id, model
        self._wanted = wanted
        self._num_tokens: dict[int, int] = {}
        self._last_token: dict[int, int] = {}
        self._prompt_sent = False

    def response(self, output: RequestOutput) -> pb.GenerateResponse:
        """Return the complete answer of a finished request. output: its only output, of kind FINAL_ONLY. Call it once
        for each request.
        """
        return pb.GenerateResponse(
            prompt_info=self.prompt_info(output),
            outputs=[self._sequence(completion) for completion in output.outputs],
            usage=self.usage(output),
            request_id=self._request_id,
            model=self._model,
        )

    def chunks(self, output: RequestOutput) -> Iterator[pb.GenerateChunk]:
        """Yield a chunk for each sequence of an output of kind DELTA, with the sequence's new part. Outputs must be
        given in order.

        The first chunk of sequence 0 also has the prompt's information, and the request's last chunk has the usage.
        """
        for position, completion in enumerate(output.outputs, 1):
            sequence = self._sequence(completion)
            chunk = pb.GenerateChunk(outputs=sequence, request_id=self._request_id, model=self._model)
            # The prompt is scored in the steps of sequence 0, until its first token.
            if completion.index == 0 and not self._prompt_sent:
                chunk.prompt_info.CopyFrom(self.prompt_info(output))
                self._prompt_sent = True
            if output.finished and position == len(output.outputs):
                chunk.usage.CopyFrom(self.usage(output))
            yield chunk

    def prompt_info(self, output: RequestOutput) -> pb.PromptInfo:
        """Return the prompt's number of tokens, and its token ids and log-probabilities if they were requested.

        Log-probabilities are left out unless the output has those of all tokens; the first token's log-probability and
        rank are 0.
        """
        info = pb.PromptInfo(num_prompt_tokens=len(output.prompt_token_ids))
        if self._wanted.prompt_token_ids:
            info.token_ids.extend(output.prompt_token_ids)
        scores = output.prompt_logprobs or []
        # A request that was aborted early has only some of them, which are dropped.
        if all(position is not None for position in scores[1:]):
            _write_scores(info, scores, self._wanted.prompt_logprobs, self._wanted.prompt_candidates)
        return info

    def usage(self, output: RequestOutput) -> pb.Usage:
        """Return the number of tokens of the prompt, of its cached part, and of all outputs that have been written so
        far.
        """
        return pb.Usage(
            num_prompt_tokens=len(output.prompt_token_ids),
            num_output_tokens=sum(self._num_tokens.values()),
            num_cached_tokens=output.num_cached_tokens,
        )

    def _sequence(self, completion: CompletionOutput) -> pb.SequenceOutput:
        """Return the message of one of a request's n outputs, or of its new part: text, token ids and scores if they
        were requested, captured activations, sampling masks, and the reason of its end if it has ended. Adds its tokens
        to the counts, so call it once for each part.
        """
        index, new = completion.index, completion.token_ids
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(new)
        if new:
            self._last_token[index] = new[-1]
        message = pb.SequenceOutput(index=index, num_tokens=len(new), captured=captured_file(completion))
        if self._wanted.text:
            message.text = completion.text
        if self._wanted.token_ids:
            message.token_ids.extend(new)
        _write_scores(message, completion.logprobs or (), self._wanted.logprobs, self._wanted.candidates)
        if completion.sampling_mask is not None:
            message.sampling_mask.extend(pb.TokenIds(ids=ids) for ids in completion.sampling_mask.token_ids)
        if completion.finish_reason is not None:
            message.finish_info.CopyFrom(self._finish_info(completion))
        return message

    def _finish_info(self, completion: CompletionOutput) -> pb.FinishInfo:
        """Return why an output has ended, and its number of tokens. After "stop" it also has the stop string or stop
        token or, if stop_reason is None (eos), the last token.

        Raises KeyError for a reason that is not in FINISH_REASONS.
        """
        info = pb.FinishInfo(
            num_output_tokens=self._num_tokens[completion.index],
            finish_reason=FINISH_REASONS[completion.finish_reason or ""],
        )
        if info.finish_reason != pb.FinishInfo.STOP:
            return info
        if isinstance(completion.stop_reason, str):
            info.stop_string = completion.stop_reason
        elif completion.stop_reason is not None:
            info.stop_token_id = completion.stop_reason
        elif completion.index in self._last_token:
            info.eos_token_id = self._last_token[completion.index]
        return info


def _write_scores(
    message: pb.PromptInfo | pb.SequenceOutput,
    positions: Iterable[PositionLogprobs | None],
    logprobs: bool,
    candidates: bool,
) -> None:
    """Append one entry for each position to a message: log-probability and rank of its token if `logprobs`, and its
    other tokens if `candidates`. A position of None counts as log-probability 0 without other tokens; a missing rank is
    written as 0.
    """
    for position in positions:
        # The chosen token comes first.
        (_, chosen), *others = (position or {None: Logprob(0.0)}).items()
        if logprobs:
            message.logprobs.append(chosen.logprob)
            message.ranks.append(chosen.rank or 0)
        if candidates:
            added = message.candidate_tokens.add()
            for token_id, other in others:
                added.tokens.add(id=token_id, logprob=other.logprob, rank=other.rank or 0)
