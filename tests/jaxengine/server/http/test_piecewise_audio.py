"""/v1/audio/transcriptions of models that transcribe pieces of a sound without times (Cohere Transcribe, Moonshine)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest

from jaxengine.api.async_llm import AsyncLLM
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.http.audio.piecewise import PiecewiseTranscript
from jaxengine.server.http.audio.protocol import TranscriptionRequest
from tests.fixtures import attended_checkpoints as attended
from tests.fixtures.whisper_checkpoints import sound
from tests.jaxengine.engine.test_attended_sounds import goldens
from tests.jaxengine.engine.test_sounds import OPTIONS
from tests.jaxengine.server.openai_client import openai_client


def wav_of_floats(samples: np.ndarray) -> bytes:
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, 1, attended.RATE, 4 * attended.RATE, 4, 32)
    body = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_texts_of_pieces_are_joined_and_white_space_waits_for_text():
    class Told(PiecewiseTranscript):
        async def outputs(self, prompt: dict[str, Any], params: Any):
            number = int(prompt["multi_modal_data"]["audio"].samples[0])
            try:
                for piece in told[number]:
                    yield SimpleNamespace(outputs=[SimpleNamespace(text=piece, token_ids=[1], finish_reason=None)])
                if told[number]:
                    yield SimpleNamespace(outputs=[SimpleNamespace(text="", token_ids=[], finish_reason=ends[number])])
            finally:
                closed.append(number)

    told = [["", " a", " ", "", "b", " "], [" ", ""], ["\n", "c ", "\n", " d\n"], []]
    # A piece that was cut short is reported, though the last one is not.
    ends, closed = ["stop", "length", "stop"], list[int]()
    for separator in (" ", ""):
        transcript: Any = Told.__new__(Told)
        transcript.engine = SimpleNamespace(inputs=SimpleNamespace(generation_defaults={}))
        transcript.body, transcript.input_tokens, transcript.output_tokens = TranscriptionRequest(), 0, 0
        transcript._name, transcript.task, transcript._finish_reason = "a", "transcribe", None
        transcript._ids, transcript._separator = [7, 8], separator
        transcript._pieces = [np.full(1, index, np.float32) for index in range(len(told))]

        async def events(transcript: Any = transcript) -> list[dict[str, Any]]:
            # A stream that its client leaves ends its request at once.
            async with contextlib.aclosing(transcript.events("m")) as early:
                await anext(early)
            assert closed == [0]
            transcript.input_tokens = transcript.output_tokens = 0
            return [json.loads(event.removeprefix(b"data: ")) async for event in transcript.events("m")]

        closed.clear()
        *deltas, done = asyncio.run(events())
        assert [each["delta"] for each in deltas] == ["a", " b", f"{separator}c", " \n d"]
        assert [each["choices"][0]["finish_reason"] for each in (*deltas, done)] == [None] * 4 + ["length"]
        assert (transcript.input_tokens, transcript.output_tokens) == (8, 12) and closed == [0, 0, 1, 2, 3]


@pytest.mark.thorough("two more engines")
@pytest.mark.parametrize("name", ["cohere_asr_sound", "moonshine_sound"])
def test_transcriptions(name, tmp_path, executables_dir):
    folder = attended.whole_checkpoint(name, tmp_path)
    engine = AsyncLLM(str(folder), **OPTIONS, max_audio_seconds=60, compile_cache_dir=executables_dir)
    app = create_app(engine, ServerConfig(served_model_name=("it",)))
    limited = {"max_completion_tokens": str(24)}

    def ask(samples: np.ndarray, kind: str = "transcriptions", **fields: Any) -> Any:
        async def run() -> Any:
            client = openai_client(app)
            file = ("sound.wav", wav_of_floats(samples))
            return await getattr(client.audio, kind).create(model="it", file=file, extra_body=limited, **fields)

        return asyncio.run(run())

    def text_of(tokens: Any) -> str:
        ids = [int(token) for token in tokens]
        return attended.tokenizer().decode(ids[: ids.index(attended.EOS)] if attended.EOS in ids else ids).strip()

    try:
        found = goldens(name)
        for case in attended.SOUNDS:
            assert ask(attended.sound_of(case)).text == text_of(found[f"{case}_tokens"])
        if "long_tokens" in found:
            texts = [text_of(tokens) for tokens in found["long_tokens"]]
            assert ask(sound(*attended.LONG), language="ja").text == "".join(texts)
        assert ask(np.zeros(1, np.float32), response_format="text").endswith("\n")
        for fields, message in (
            ({"language": "xx"}, "language is 'xx'; allowed: (de, en, ja|none, as this model takes no language)"),
            ({"prompt": "a"}, "prompt: this model continues no earlier text"),
            ({"response_format": "srt"}, "this model gives no times; allowed: json and text"),
            ({"kind": "translations"}, "translates nothing"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(attended.sound_of("a"), **fields)
    finally:
        engine.shutdown()
