"""Transcripts of models whose tokens attend to a sound and that give no times (Cohere Transcribe, Moonshine): those of
the sound's pieces, one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from fastapi import Response

from jaxengine.requests.media.transcripts import media_of, piece_processor, read_whole
from jaxengine.requests.params.sampling_params import RequestOutputKind
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.http.audio.transcript import Transcript
from jaxengine.server.http.request.form import FILE


class PiecewiseTranscript(Transcript):
    """Transcript of a model without timestamps. Texts of pieces are stripped and joined by the model's separator; empty
    ones are left out.
    """

    async def begin(self, data: bytes) -> None:
        """Read the sound of a file and cut it, on threads. Raises RequestError for translations, formats with times, an
        unknown language, a prompt and a file that cannot be used; OverloadedError if too many calls wait.
        """
        media = self.engine.inputs.media
        processor = piece_processor(media)
        assert media is not None and processor is not None
        self.check_untimed(processor.languages)
        if (self.body.prompt or "").strip():
            raise RequestError("prompt: this model continues no earlier text", param="prompt")
        self._ids, self._separator = processor.prompt(self.body.language), processor.separator(self.body.language)
        self._sound = await read_whole(media, data, FILE)
        self._pieces = await media.reader.loader.process(processor.pieces, self._sound.samples)

    def _prompt(self, samples: np.ndarray) -> dict[str, Any]:
        """Return the prompt that EngineClient.stream takes for one piece: token ids and the sound f32[N]."""
        return {"prompt_token_ids": self._ids, **media_of(samples)}

    async def whole(self) -> Response:
        """Transcribe all pieces and return the complete response. Raises the errors of `outputs`."""
        text = "".join([piece async for piece in self.pieces()])
        return self.plain(text, self._sound.seconds)

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Yield the text as it is generated, and update the token counts. White space is held back until text follows
        it; around a piece of the sound the language's separator replaces it. Raises the errors of `outputs`.
        """
        params = self.body.params(self.engine.inputs, output_kind=RequestOutputKind.DELTA, detokenize=True)
        has_text = False
        for samples in self._pieces:
            self.input_tokens += len(self._ids)
            held, begun = "", False
            async with contextlib.aclosing(self.outputs(self._prompt(samples), params)) as outputs:
                async for output in outputs:
                    self.count(output)
                    held += output.outputs[0].text
                    ready = held.rstrip()
                    if not ready:
                        continue
                    if not begun:
                        yield (self._separator if has_text else "") + ready.lstrip()
                        begun = has_text = True
                    else:
                        yield ready
                    held = held[len(ready) :]
