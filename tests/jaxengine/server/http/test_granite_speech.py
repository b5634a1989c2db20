"""Granite Speech over HTTP: transcripts, and the adapter with which prompts with sounds run, and no others."""

from __future__ import annotations

import asyncio

import numpy as np
import openai
import pytest

from jaxengine.api.async_llm import AsyncLLM
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.fixtures import sound_checkpoints as sounds
from tests.jaxengine.engine.test_prompt_sounds import goldens, tight
from tests.jaxengine.engine.test_sounds import OPTIONS
from tests.jaxengine.server.http.test_audio import wav
from tests.jaxengine.server.openai_client import openai_client

NAME = "granite_speech_sound"
SOUND = wav(np.clip(sounds.sound(*sounds.B), -1, 1))
CHOSEN = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory, executables_dir):
    folder = sounds.whole_checkpoint(NAME, tmp_path_factory.mktemp("sounds"))
    engine = AsyncLLM(str(folder), **OPTIONS, **tight(NAME), compile_cache_dir=executables_dir)
    yield engine
    engine.shutdown()


def test_transcripts_and_the_adapter_of_sounds(engine):
    client = openai_client(create_app(engine, ServerConfig(served_model_name=("hears",))))
    found = goldens(NAME)

    def text_of(case: str) -> str:
        return sounds.tokenizer().decode(found[f"{case}_greedy"].tolist())

    async def transcribe(**options):
        asked = {"file": ("a.wav", SOUND), "model": "hears", "extra_body": {"max_completion_tokens": "12"}}
        return await client.audio.transcriptions.create(**asked, **options)

    async def run():
        said, written, *_ = await asyncio.gather(
            transcribe(),
            client.completions.create(model="hears", prompt=sounds.PROMPTS["text"][0], max_tokens=12, **CHOSEN),
        )
        assert said.text == text_of("asked").strip()
        assert written.choices[0].text == text_of("text")  # beside the other, and without the adapter
        pieces = [each async for each in await transcribe(stream=True) if each.type == "transcript.text.delta"]
        assert "".join(each.delta for each in pieces) == text_of("asked") and len(pieces) > 1
        for options, message in (
            ({"language": "en"}, "language is 'en'; allowed: none, as this model takes no language"),
            ({"prompt": "Ann."}, "prompt: this model's request for a transcript has no context"),
            ({"response_format": "srt"}, "this model gives no times"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                await transcribe(**options)
        return [each.id for each in (await client.models.list()).data]

    assert asyncio.run(run()) == ["hears"]  # the adapter has no name
    assert (engine.core.config.enable_lora, engine.core.config.max_lora_rank) == (True, 8)
