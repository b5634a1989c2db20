"""Transcripts of models whose prompt contains the whole sound and a request to transcribe it, such as Qwen3-ASR."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import Response

from jaxengine.requests.media.inputs import DATA
from jaxengine.requests.media.transcripts import read_whole, transcriber
from jaxengine.requests.params.sampling_params import RequestOutputKind
from jaxengine.scheduler.base.media import AUDIO
from jaxengine.server.http.audio.transcript import Transcript
from jaxengine.server.http.request.form import FILE


class AskedTranscript(Transcript):
    """Transcript of a model without timestamps. The model writes the text, after its language if the request gives
    none.

    variables: variables of the chat template, or None. others: arguments of Transcript.
    """

    def __init__(self, variables: Mapping[str, Any] | None, *others: Any):
        super().__init__(*others)
        self._variables = variables

    async def begin(self, data: bytes) -> None:
        """Read the sound of a file and render the prompt, both on threads, for `pieces`. Raises RequestError for
        translations, formats with times, an unknown language and a file that cannot be used; OverloadedError if too
        many calls wait.
        """
        media = self.engine.inputs.media
        processor = transcriber(media)
        assert media is not None and processor is not None
        self.check_untimed(processor.languages)
        messages = processor.transcription(self.body.language, (self.body.prompt or "").strip())
        self._mark = processor.text_mark
        self._sound = await read_whole(media, data, FILE)
        self._ids = await media.reader.loader.process(self._encoded, messages, media.reader.placeholder)

    def _encoded(self, messages: list[dict[str, Any]], placeholder: Any) -> list[int]:
        """Return the token ids of a conversation, rendered by the model's chat template without further special tokens.
        If the last message is the assistant's, the model continues it; otherwise a generation prompt is added.

        placeholder: the argument of that name of Tokenizer.apply_chat_template. Raises RequestError for messages that
        the template refuses, OverloadedError if too many templates are being rendered.
        """
        begun = messages[-1]["role"] == "assistant"
        text = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=not begun,
            continue_final_message=begun,
            chat_template=self.engine.inputs.config.chat_template,
            chat_template_kwargs=self._variables,
            placeholder=placeholder,
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _prompt(self) -> dict[str, Any]:
        """Return the prompt that EngineClient.stream takes: token ids and the sound."""
        return {"prompt_token_ids": self._ids, DATA: {AUDIO: self._sound}}

    async def whole(self) -> Response:
        output = await self.last(self._prompt(), self.body.params(self.engine.inputs, detokenize=True))
        return self.plain(self._text(output.outputs[0].text)[0].strip(), self._sound.seconds)

    def _text(self, answer: str) -> tuple[str, bool]:
        """Return the text of an answer so far, and whether it has begun.

        The text follows a mark that the model writes after the language. Before that mark, the result is the whole
        answer and False; for a model without a mark it is the whole answer and True.
        """
        if self._mark is None:
            return answer, True
        head, mark, text = answer.partition(self._mark)
        return (text, True) if mark else (head, False)

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Run the request and yield the text in pieces as it is generated, without the language that the model writes
        first. Updates the token counts. Raises the errors of `outputs`.
        """
        held, is_text = "", self.body.language is not None
        params = self.body.params(self.engine.inputs, output_kind=RequestOutputKind.DELTA, detokenize=True)
        async with contextlib.aclosing(self.outputs(self._prompt(), params)) as outputs:
            async for output in outputs:
                self.input_tokens = len(output.prompt_token_ids)
                self.count(output)
                held += output.outputs[0].text
                text, has_begun = self._text(held)
                if is_text or has_begun or output.finished:
                    yield text
                    held, is_text = "", True
