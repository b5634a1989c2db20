"""Sounds in conversations over HTTP with OpenAI's own client, and transcripts of a model that is asked for them with
the sound in its prompt."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import wave

import numpy as np
import openai
import pytest

from jaxengine.api.async_llm import AsyncLLM
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.http.audio.endpoint import _kind
from tests.fixtures import sound_checkpoints as sounds
from tests.jaxengine.engine.test_prompt_sounds import TIGHT, goldens
from tests.jaxengine.engine.test_sounds import OPTIONS
from tests.jaxengine.server.asgi_client import post
from tests.jaxengine.server.http.test_audio import wav
from tests.jaxengine.server.openai_client import openai_client

NAME = "qwen3_asr_wide_sound"
SOUND = wav(np.clip(sounds.sound(*sounds.B), -1, 1))
DATA = base64.b64encode(SOUND).decode()
SAY = {"type": "text", "text": "Say it."}


@pytest.fixture(scope="module")
def engine(tmp_path_factory, executables_dir):
    folder = sounds.whole_checkpoint(NAME, tmp_path_factory.mktemp("sounds"))
    options = {**OPTIONS, **TIGHT, "limit_mm_per_prompt": {"audio": 1}, "max_audio_seconds": 3}
    engine = AsyncLLM(str(folder), **options, compile_cache_dir=executables_dir)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def app(engine):
    return create_app(engine, ServerConfig(served_model_name=("hears",)))


def text_of(tokens) -> str:
    return sounds.tokenizer().decode(tokens.tolist())


def test_a_conversation_with_a_sound(app):
    parts = (
        {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{DATA}"}},
    )

    async def run(part):
        return await openai_client(app).chat.completions.create(
            model="hears", messages=[{"role": "user", "content": [part, SAY]}], temperature=0, max_tokens=6
        )

    one, other = (asyncio.run(run(part)) for part in parts)
    assert one.choices[0].message.content == other.choices[0].message.content
    text = "<|im_start|>user\nSay it.<|im_end|>\n<|im_start|>assistant\n"
    count = len(sounds.tokenizer().encode(text).ids) + 2 + 13  # marks, and a second
    assert one.usage.prompt_tokens == other.usage.prompt_tokens == count


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"type": "input_audio", "input_audio": {"data": DATA, "format": "mid"}},
            "input_audio.format is 'mid'; allowed:",
        ),
        ({"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}, "input_audio is not valid base64"),
        (
            {"type": "audio_url", "audio_url": {"url": "https://a.org/b"}},
            "audio_url is an address on the web; none may",
        ),
        ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, "audio_url is a local file; none may"),
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "this model takes no image: messages"),
    ],
)
def test_what_a_part_must_not_be(app, part, message):
    answer = asyncio.run(
        post(app, "/v1/chat/completions", model="hears", messages=[{"role": "user", "content": [part]}])
    )
    assert answer.status == 400 and message in answer.error["message"] and answer.error["param"] == "messages"


def test_sounds_have_limits(app):
    part = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:  # four seconds in as many kilobytes
        writer.setparams((1, 1, 1000, 0, "NONE", ""))
        writer.writeframes(bytes([128]) * 4000)
    long = {"type": "input_audio", "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}}
    for parts, message in (([part, part], "at most 1, by limit_mm_per_prompt"), ([long], "longer than 3 seconds")):
        messages = [{"role": "user", "content": parts}]
        answer = asyncio.run(post(app, "/v1/chat/completions", model="hears", messages=messages))
        assert answer.status == 400 and message in answer.error["message"]


def ask(app, kind: str = "transcriptions", **fields):
    async def run():
        client, limit = openai_client(app), {"extra_body": {"max_completion_tokens": "12"}}
        file = ("sound.wav", SOUND)
        made = await getattr(client.audio, kind).create(**{"model": "hears", "file": file, **limit, **fields})
        return [each async for each in made] if fields.get("stream") else made

    return asyncio.run(run())


def test_transcripts_are_those_of_transformers(app):
    found = goldens(NAME)
    for case, asked in sounds.ASKED.items():
        wanted = text_of(found[f"{case}_greedy"]).strip()
        answer = ask(app, **asked)
        assert (answer.text, answer.usage.type, answer.usage.seconds) == (wanted, "duration", 1)
        assert ask(app, response_format="text", **asked) == wanted + "\n"
        *deltas, done = ask(app, stream=True, **asked)
        assert done.text == wanted and "".join(each.delta for each in deltas).strip() == wanted
        assert done.usage.input_tokens == len(found[f"{case}_ids"])


def test_a_server_sets_variables_of_the_template_for_transcripts_too(engine, monkeypatch):
    template = "{{ messages[0].role }} says {{ word }}"
    monkeypatch.setattr(engine.inputs, "config", dataclasses.replace(engine.inputs.config, chat_template=template))
    made = _kind(engine, ServerConfig(default_chat_template_kwargs={"word": "it"}))
    ids = made(engine, None, "transcribe", "x", None)._encoded([{"role": "user", "content": "a"}], None)
    assert ids == sounds.tokenizer().encode("user says it").ids


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("translations", {}, "this model transcribes, and translates nothing"),
        ("transcriptions", {"language": "tlh"}, "language is 'tlh'; allowed: ar, "),
        ("transcriptions", {"response_format": "srt"}, "response_format is 'srt'; this model gives no times"),
        ("transcriptions", {"file": ("a", b"{}")}, "file is JSON; allowed: WAV"),
    ],
)
def test_what_a_transcript_must_not_be(app, kind, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask(app, kind, **fields)
