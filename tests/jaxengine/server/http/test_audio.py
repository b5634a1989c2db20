"""/v1/audio/transcriptions and /v1/audio/translations, with OpenAI's own client: formats, streams, long sounds, and
files and fields that must be refused."""

from __future__ import annotations

import asyncio
import io
import json
import re
import wave

import numpy as np
import openai
import pytest

from jaxengine.api.async_llm import AsyncLLM
from jaxengine.requests.media.transcripts import Segment, token_times
from jaxengine.requests.output.outputs import CompletionOutput, RequestOutput
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.http.audio.formats import Said, srt, vtt
from jaxengine.server.http.request.errors import ApiError
from jaxengine.server.http.request.form import parse_form
from tests.fixtures import whisper_checkpoints as whisper
from tests.jaxengine.engine.test_sounds import OPTIONS, goldens
from tests.jaxengine.server.asgi_client import Answer, http_client
from tests.jaxengine.server.http.checked_document import Checked
from tests.jaxengine.server.openai_client import openai_client

NAME = "whisper_sound"


def wav(samples: np.ndarray, rate: int = whisper.RATE, channels: int = 1) -> bytes:
    """A file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        values = np.clip(np.round(samples * 32768), -32768, 32767).astype("<i2")
        writer.writeframes(np.repeat(values[:, None], channels, axis=1).tobytes())
    return file.getvalue()


def text_of(tokens) -> str:
    return whisper.tokenizer(NAME).decode([token for token in tokens if token < whisper.EOS])


@pytest.fixture(scope="module")
def engine(tmp_path_factory, executables_dir):
    folder = whisper.whole_checkpoint(NAME, tmp_path_factory.mktemp("whisper"))
    engine = AsyncLLM(str(folder), **OPTIONS, max_audio_seconds=60, compile_cache_dir=executables_dir)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def app(engine):
    return create_app(engine, ServerConfig(served_model_name=("whisper",)))


def ask(app, kind: str = "transcriptions", case: str = "b", **fields):
    async def run():
        client = openai_client(app)
        file = ("sound.wav", wav(whisper.sound_of(NAME, case)))
        return await getattr(client.audio, kind).create(model="whisper", **{"file": file, **fields})

    return asyncio.run(run())


def test_json_and_text(app):
    """24 tokens of what transformers recorded, whose features differ by the rounding to 16 bits."""
    wanted = text_of(goldens(NAME)["b_plain"][4:])
    limited = {"language": "en", "extra_body": {"max_completion_tokens": "24"}}
    found = ask(app, **limited)
    assert found.text == wanted.strip() and (found.usage.type, found.usage.seconds) == ("duration", 2)
    assert ask(app, response_format="text", **limited) == wanted.strip() + "\n"
    assert ask(app, extra_body={"max_completion_tokens": "24"}).text == wanted.strip()  # English is detected
    translated = text_of(goldens(NAME)["b_translated"][4:])
    assert ask(app, "translations", extra_body={"max_completion_tokens": "24", "language": "en"}).text == translated


def test_the_models_defaults(app, engine, monkeypatch):
    """generation_config.json's parameters hold, apart from the temperature, unless the request names others."""
    wanted = ask(app, language="en", extra_body={"max_completion_tokens": "9", "repetition_penalty": "1.5"}).text
    usual = {"repetition_penalty": 1.5, "max_tokens": 9, "temperature": 3.0}
    monkeypatch.setattr(engine.inputs, "generation_defaults", usual)
    assert ask(app, language="en").text == wanted
    named = {"max_completion_tokens": "24", "repetition_penalty": "1"}
    assert ask(app, language="en", extra_body=named).text == text_of(goldens(NAME)["b_plain"][4:]).strip() != wanted


def test_a_long_sound_in_each_format(app):
    found = goldens(NAME)
    tokens = np.split(found["long_tokens"], np.cumsum(found["long_lengths"])[:-1])
    times = found["long_times"]
    told = ask(app, case="long", response_format="verbose_json", language="en")
    assert told.language == "en" and told.duration == pytest.approx(10.6) and told.text
    assert [each.tokens for each in told.segments] == [each.tolist() for each in tokens]
    np.testing.assert_allclose([(each.start, each.end) for each in told.segments], times, atol=1e-3)
    assert [each.text for each in told.segments] == [text_of(each) for each in tokens]
    assert all(each.avg_logprob < 0 < each.compression_ratio for each in told.segments)
    assert all(0 < each.no_speech_prob < 1 for each in told.segments)
    lines = ask(app, case="long", response_format="srt", language="en").split("\n\n")
    assert lines[0].split("\n")[1] == "00:00:00,260 --> 00:00:01,260" and len(lines) == len(tokens) + 1
    assert ask(app, case="long", response_format="vtt", language="en").startswith(
        "WEBVTT\n\n00:00:00.260 --> 00:00:01.260\n"
    )


def test_a_model_of_english_alone(app, engine, monkeypatch):
    """Its prompt is the token that begins a transcript, whose successor says how likely there is no speech."""
    asked = {"response_format": "verbose_json", "extra_body": {"max_completion_tokens": "8"}}
    wanted = ask(app, language="en", **asked)
    monkeypatch.setattr(engine.inputs.media.processor, "languages", {})
    for fields in ({}, {"language": "en"}):
        answer = ask(app, **fields, **asked)
        assert answer.language == "en" and answer.segments[0].tokens != wanted.segments[0].tokens
        assert answer.segments[0].no_speech_prob == pytest.approx(wanted.segments[0].no_speech_prob, rel=1e-4)
        assert answer.segments[0].avg_logprob < 0
    with pytest.raises(openai.BadRequestError, match="transcribes English alone"):
        ask(app, language="de", **asked)


def test_words(app, engine, monkeypatch):
    loader, called = engine.inputs.media.reader.loader, []
    run = loader.process
    monkeypatch.setattr(loader, "process", lambda function, *own: called.append(function) or run(function, *own))
    found = goldens(NAME)
    asked = {"response_format": "verbose_json", "language": "en"}
    for case, granularities in (("long", ["word", "segment"]), ("a", ["word"])):
        told = ask(app, case=case, timestamp_granularities=granularities, **asked)
        # Punctuation is in the recorded words, and around those of an answer there is none.
        recorded = zip(found[f"{case}_words"].tolist(), found[f"{case}_word_times"].tolist(), strict=True)
        wanted = [(text, times) for text, times in recorded if text.strip().strip("\"'“¡¿([{-.。,，!！?？:：”)]}、")]
        assert len(told.words) == len(wanted) and (told.segments is None) == ("segment" not in granularities)
        for word, (text, times) in zip(told.words, wanted, strict=True):
            # Where a window begins at the end of a sound, transformers finds its tokens 0.02 seconds before that.
            assert word.word and word.word in text and (word.start, word.end) == pytest.approx(times, abs=0.0201)
    assert token_times in called  # on the threads that clients share fairly
    with pytest.raises(openai.BadRequestError, match="words of a translation are not aligned"):
        ask(app, "translations", extra_body={"timestamp_granularities[]": "word"}, response_format="verbose_json")
    monkeypatch.setattr(engine.inputs.media.processor, "has_alignment", False)
    with pytest.raises(openai.BadRequestError, match=r"generation_config\.json does not say which heads"):
        ask(app, timestamp_granularities=["word"], **asked)


def test_streams(app):
    async def run(case: str, **fields):
        client, file = openai_client(app), ("sound.wav", wav(whisper.sound_of(NAME, case)))
        stream = await client.audio.transcriptions.create(
            model="whisper", file=file, stream=True, language="en", **fields
        )
        return [each async for each in stream]

    *_, done = asyncio.run(run("b", prompt="before"))
    assert done.usage.input_tokens == 1 + len(" before") + 4  # the prompt, and four tokens that ask for a transcript
    for case, fields in (("b", {"extra_body": {"max_completion_tokens": "24"}}), ("long", {})):
        *deltas, done = asyncio.run(run(case, **fields))
        assert {each.type for each in deltas} == {"transcript.text.delta"} and done.type == "transcript.text.done"
        assert len(deltas) > 3 and "".join(each.delta for each in deltas).rstrip() == done.text
        assert done.text == ask(app, case=case, language="en", **fields).text
        assert done.usage.output_tokens > 20 and done.usage.total_tokens > done.usage.output_tokens
        # vLLM's clients read choices, of every event.
        assert "".join(each.choices[0]["delta"]["content"] for each in (*deltas, done)).rstrip() == done.text
        assert [each.choices[0]["finish_reason"] for each in (*deltas, done)] == [None] * len(deltas) + ["length"]
        assert {(each.object, each.model) for each in (*deltas, done)} == {("transcription.chunk", "whisper")}
    body = {"stream_include_usage": "true", "stream_continuous_usage_stats": "true", "max_completion_tokens": "24"}
    *deltas, end, done = asyncio.run(run("b", extra_body=body))
    assert (done.choices, end.choices[0]["finish_reason"]) == ([], "length")
    counts = [each.usage["completion_tokens"] for each in deltas]
    assert counts == sorted(counts) and done.usage.completion_tokens == done.usage.output_tokens == counts[-1] == 24
    assert asyncio.run(run("b", extra_body={"stream_include_usage": "false"}))[-1].usage is None
    whole = ask(app, language="en").text
    assert whole == ask(app, language="en", extra_body={"max_completion_tokens": "1000000"}).text


def test_a_transcript_that_is_ended_early_is_an_error(app, engine, monkeypatch):
    """Also before its first token; what there is of it is no transcript."""

    async def stream(*_):
        yield RequestOutput(
            "a", None, [1], [CompletionOutput(0, "", ids, finish_reason=reason, stop_reason=about)], True
        )

    async def run():
        async with http_client(app) as client:
            for data in ({}, {"stream": "true"}):
                files = {"file": ("a", wav(whisper.sound(2, 0.3)))}
                yield await client.post("/v1/audio/transcriptions", data={"language": "en", **data}, files=files)

    async def codes():
        return [each.status_code if each.status_code != 200 else error_in(each.text) async for each in run()]

    def error_in(events: str) -> int:
        (data,) = re.findall(r"data: (\{.*\})\n", events)
        return json.loads(data)["error"]["code"]

    monkeypatch.setattr(engine, "stream", stream)
    for reason, about, code in (("abort", "timeout", 504), ("abort", None, 409), ("error", "a fault", 500)):
        for ids in ([5], []):
            assert asyncio.run(codes()) == [code, code], (reason, about, ids)


def test_answers_are_as_the_document_says(app):
    async def run():
        async with http_client(app) as client:
            checked = Checked((await client.get("/openapi.json")).json())
            for fields in ({}, {"response_format": "verbose_json"}, {"stream": "true"}):
                data = {"language": "en", "max_completion_tokens": "8", **fields}
                files = {"file": ("a", wav(whisper.sound(2, 0.3)))}
                answer = Answer(await client.post("/v1/audio/translations", data=data, files=files))
                values = answer.events if "stream" in fields else [answer.json]
                kind = answer.headers["content-type"].partition(";")[0]
                checked.check("post", "/v1/audio/translations", kind, values)

    asyncio.run(run())


def test_what_is_refused(app):
    sound = wav(whisper.sound(2, 0.3))
    for fields, param, message in (
        ({"language": "xx"}, "language", "language is 'xx'; allowed: de, en"),
        ({"response_format": "diarized_json"}, "response_format", "response_format is not valid"),
        (
            {"timestamp_granularities": ["letter"], "response_format": "verbose_json"},
            "timestamp_granularities",
            "has 'letter'; allowed: 'segment' and 'word'",
        ),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities", "only allowed with"),
        (
            {"timestamp_granularities": ["word"], "response_format": "verbose_json", "stream": True},
            "stream",
            "allowed: json and text",
        ),
        ({"include": ["logprobs"]}, "include", "not supported"),
        ({"chunking_strategy": {"type": "server_vad"}}, "chunking_strategy", "is 'server_vad'"),
        ({"extra_body": {"max_completion_tokens": 0}}, "max_completion_tokens", "max_completion_tokens must be"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"prompt": "<|en|>"}, "prompt", "special tokens"),
        ({"stream": True, "response_format": "srt"}, "stream", "allowed: json and text"),
        ({"file": ("a", b"hello")}, "file", "is a file of an unknown type; allowed: WAV"),
        ({"file": ("a", b"\x89PNG\r\n\x1a\n")}, "file", "is a PNG"),
        ({"file": ("a", sound[:30])}, "file", "WAV file with"),
        ({"file": ("a", wav(np.zeros(61 * 1000, np.float32), 1000))}, "file", "longer than 60 seconds"),
        ({"file": ("a", sound[:22] + b"\x63\0" + sound[24:])}, "file", "has 99 channels"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(app, **{"file": ("a", sound), **fields})
        assert refused.value.body["param"] == param and message in refused.value.body["message"], refused.value.body
    with pytest.raises(openai.NotFoundError):
        ask(app, extra_body={"model": "other"})

    async def post(**request):
        async with http_client(app) as client:
            return await client.post("/v1/audio/transcriptions", **request)

    assert asyncio.run(post(json={})).status_code == 415
    missing = asyncio.run(post(files={"other": ("a", sound)}))
    assert missing.status_code == 400 and missing.json()["error"]["param"] == "other"
    missing = asyncio.run(post(files={"model": (None, "whisper")}))
    assert missing.status_code == 400 and missing.json()["error"]["param"] == "file"


def test_a_model_without_sounds_refuses_the_routes(chat_engine):
    app = create_app(chat_engine, ServerConfig(served_model_name=("whisper",)))
    with pytest.raises(openai.BadRequestError, match="this model transcribes no sounds"):
        ask(app)
    asked = SamplingParams(max_tokens=1, extra_args={"alignment": [0, 1]})

    async def align():
        async for _ in chat_engine.generate("a", asked, "aligned"):
            pass

    with pytest.raises(RequestError, match="alignment: the engine's model does not align tokens with a sound"):
        asyncio.run(align())


def parsed(body, size=1 << 20):
    """Parses a form that arrives in pieces of `size` bytes; the form and its file."""
    file = bytearray()

    async def parse():
        async def pieces():
            for at in range(0, len(body), size):
                yield body[at : at + size]

        async def keep(piece):
            file.extend(piece)

        return await parse_form(pieces(), b"x", keep)

    return asyncio.run(parse()), bytes(file)


def test_forms():
    head = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n'
    body = head % b"a[]" + b"1\r\n" + head % b"a[]" + b"2\r\n" + head % b"file" + b"\r\n--\r\n--x--\r\n"
    for size in (1, 2, 3, 7, 99):
        form, file = parsed(b"preamble\r\n" + body, size)
        assert form.fields == {"a": ["1", "2"]} and form.filename == "" and file == b"\r\n--"
    for body in (b"", b"--x", b"--x\r\n\r\n\r\n--x--", head % b"a", head % b"" + b"1\r\n--x--", b"y" * 99):
        with pytest.raises(ApiError):
            parsed(body)
    with pytest.raises(ApiError, match="more than"):
        parsed((head % b"a" + b"1\r\n") * 99 + b"--x--")
    for part, problem in ((b"y" * 5000, "no header"), (head % b"a" + b"1" * (1 << 17), "more than 65536 bytes")):
        with pytest.raises((ApiError, RequestError), match=problem):
            parsed(b"--x" * (part[0] == b"y"[0]) + part, 4096)


def test_subtitles():
    said = [Said(Segment(3599.9994, 3661.5, (), 0, 0), " a\n\n--> b")]
    assert srt(said) == "1\n00:59:59,999 --> 01:01:01,500\na -> b\n\n"
    assert vtt(said) == "WEBVTT\n\n00:59:59.999 --> 01:01:01.500\na -> b\n\n"
