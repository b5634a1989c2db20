"""An engine that says what a test has written for it, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.output.outputs import CompletionOutput, Logprob, RequestOutput
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from tests.jaxengine.server.asgi_client import Recorder


class ScriptedEngine(Recorder):
    """Every token has a log-probability of -0.5.

    texts: of a request's outputs, by index; the last one again where there are more outputs.
    """

    def __init__(self, engine: Any, *texts: str, chat_template: str | None = None):
        super().__init__(engine)
        self._texts = texts
        if chat_template is not None:
            inputs = engine.inputs
            config = dataclasses.replace(inputs.config, chat_template=chat_template)
            self.inputs = InputProcessor(config, inputs.model_config, inputs.tokenizer, inputs.generation_defaults)

    async def stream(self, prompt, sampling_params=None, request_id=None, options=None):
        options = options or RequestOptions()
        self.calls.append((prompt, sampling_params, request_id, options.priority, options.timeout))
        self.clients.append(options.client)
        self.arrivals.append(options.arrival)
        self.sessions.append(options.session)
        assert sampling_params is not None
        texts = [self._texts[min(index, len(self._texts) - 1)] for index in range(sampling_params.n)]
        outputs = [self._completion(index, text, sampling_params) for index, text in enumerate(texts)]
        if sampling_params.output_kind is RequestOutputKind.FINAL_ONLY:
            yield self._output(prompt, request_id, outputs, True)
            return
        for whole in outputs:
            pieces = self._pieces(whole.text, whole.token_ids)
            for number, piece in enumerate(pieces):
                last = number == len(pieces) - 1
                output = dataclasses.replace(
                    whole,
                    text=piece,
                    token_ids=whole.token_ids[number : number + 1],
                    logprobs=None if whole.logprobs is None else whole.logprobs[number : number + 1],
                    finish_reason="stop" if last else None,
                )
                yield self._output(prompt, request_id, [output], last and whole is outputs[-1])

    def _completion(self, index: int, text: str, params: SamplingParams) -> CompletionOutput:
        tokenizer = self.inputs.tokenizer
        ids = tokenizer.encode(text)
        logprobs = None
        if params.logprobs is not None:
            logprobs = [{number: Logprob(-0.5, 1, tokenizer.decode([number]))} for number in ids]
        return CompletionOutput(index, text, ids, logprobs=logprobs, finish_reason="stop")

    def _pieces(self, text: str, ids: Sequence[int]) -> list[str]:
        ends = [len(self.inputs.tokenizer.decode(ids[:count])) for count in range(1, len(ids))]
        cuts = [0, *(min(end, len(text)) for end in ends), len(text)]
        return [text[begin:end] for begin, end in zip(cuts, cuts[1:], strict=False)]

    @staticmethod
    def _output(prompt: Any, request_id: str | None, outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
        ids = prompt["prompt_token_ids"]
        return RequestOutput(request_id or "", prompt.get("prompt"), ids, outputs, finished, num_cached_tokens=0)
