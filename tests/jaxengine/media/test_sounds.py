"""Sounds from files and arrays: formats, rates, and files that are wrong."""

from __future__ import annotations

import io
import json
import struct
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.base.samples import Sound
from jaxengine.media.decoding.bounds import SecondsBudget
from jaxengine.media.decoding.resample import resampled, resampled_parts
from jaxengine.media.decoding.sounds import read_sound as read_of_prompt
from jaxengine.media.registry import processor_for
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_hf
from jaxengine.requests.media.transcripts import transcriber
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures import sound_checkpoints, whisper_checkpoints
from tests.fixtures.whisper_checkpoints import sound

OPTIONS = MediaOptions(max_audio_seconds=30)


def read_sound(value, options: MediaOptions):
    """Result of one sound of a prompt."""
    return read_of_prompt(value, options, SecondsBudget(options.max_audio_seconds))


def wav(values: np.ndarray, code: int, bits: int, rate: int, channels: int = 1, data: bytes | None = None) -> bytes:
    content = values.tobytes() if data is None else data
    width = channels * bits // 8
    head = struct.pack("<HHIIHH", code, channels, rate, rate * width, width, bits)
    chunks = b"fmt " + struct.pack("<I", 16) + head + b"LIST\x03\0\0\0abc\0" + b"data" + struct.pack("<I", len(content))
    return b"RIFF" + struct.pack("<I", 4 + len(chunks) + len(content)) + b"WAVE" + chunks + content


def resample_poly(samples: np.ndarray, up: int, down: int) -> np.ndarray:
    """SciPy's, whose import takes seconds: every process of tests collects this file."""
    from scipy.signal import resample_poly

    return resample_poly(samples, up, down)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 16001, 96000])
def test_resampling_is_that_of_scipy(rate):
    samples = sound(4, 0.7, rate)
    common = np.gcd(rate, 16000)
    wanted = resample_poly(samples.astype(np.float64), 16000 // common, rate // common)
    np.testing.assert_allclose(resampled(samples, rate, 16000), wanted, atol=2e-6)
    parts = np.split(samples, [1, 7, 1000, 1001, 4000])
    for block in (100, 3000, 1 << 20):
        np.testing.assert_allclose(resampled_parts(parts, rate, 16000, block), wanted, atol=2e-6)


def test_formats_of_wav():
    samples = sound(4, 0.2)
    whole = np.round(samples * 32767).astype("<i2")
    for code, bits, values in (
        (1, 16, whole),
        (1, 32, (samples * 2**31).astype("<i4")),
        (3, 32, samples),
        (3, 64, samples.astype("<f8")),
        (1, 8, np.round(samples * 127 + 128).astype("u1")),
        (1, 24, (samples * 2**31).astype("<i4").view("u1").reshape(-1, 4)[:, 1:].copy()),
    ):
        found = read_sound(wav(values, code, bits, 16000), OPTIONS).samples
        np.testing.assert_allclose(found, samples, atol=0.01 if bits == 8 else 1e-4)
    whole_file = wav(whole, 1, 16, 16000)
    at = whole_file.index(b"data") + 4
    for start in (b"RF64\xff\xff\xff\xff", b"RIFF" + bytes(4)):  # more than 32 bits tell; written as a stream
        for size in (b"\xff" * 4, bytes(4)):
            file = start + whole_file[8:at] + size + whole_file[at + 4 :]
            np.testing.assert_allclose(read_sound(file, OPTIONS).samples, samples, atol=1e-4)
    # G.711: codes of silence, of the quietest and of the loudest samples.
    for code, codes, wanted in (
        (7, (0xFF, 0x7F, 0x80, 0x00, 0xE7, 0x6A), (0, 0, 32124, -32124, 260, -212)),
        (6, (0xD5, 0x55, 0xAA, 0x2A, 0xC5, 0x60), (8, -8, 32256, -32256, 264, -1376)),
    ):
        file = wav(np.array(codes, np.uint8), code, 8, 16000)
        np.testing.assert_array_equal(read_sound(file, OPTIONS).samples * 32768, wanted)
    stereo = np.stack([whole, np.zeros_like(whole)], axis=1)
    found = read_sound(wav(stereo, 1, 16, 16000, 2), OPTIONS).samples
    np.testing.assert_allclose(found, samples / 2, atol=1e-4)
    np.testing.assert_allclose(read_sound((np.stack([samples, samples]), 16000), OPTIONS).samples, samples, atol=1e-7)


@pytest.mark.parametrize(
    ("container", "codec"),
    [("mp3", "mp3"), ("mp2", "mp2"), ("flac", "flac"), ("ogg", "libopus"), ("mp4", "aac")],
)
def test_other_files_are_decoded(container, codec):
    av = pytest.importorskip("av")
    samples, file = sound(6, 1.0, 48000), io.BytesIO()
    with av.open(file, "w", format=container) as writer:
        stream = writer.add_stream(codec, rate=48000, layout="mono")
        values = np.round(samples * 32767).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(values, format="s16", layout="mono")
        frame.sample_rate = 48000
        codec_context = stream.codec_context
        resampler = av.AudioResampler(codec_context.format, "mono", 48000, codec_context.frame_size or None)
        for each in (*resampler.resample(frame), *resampler.resample(None)):
            writer.mux(stream.encode(each))
        writer.mux(stream.encode(None))
    found = read_sound(file.getvalue(), OPTIONS).samples
    assert abs(len(found) - 16000) < 2200  # encoders add silence
    wanted = resampled(samples, 48000, 16000)
    matches = [np.corrcoef(found[at : at + 8000], wanted[4000:12000])[0, 1] for at in range(3500, 6500)]
    assert max(matches) > 0.95
    # What cannot be decoded is left out, such as padding after the sound.
    padded = read_sound(file.getvalue() + bytes(5000), OPTIONS).samples
    np.testing.assert_array_equal(padded[:15_900], found[:15_900])
    for cut in (len(file.getvalue()) // 2, 20):
        damaged = file.getvalue()[:cut]
        try:
            assert len(read_sound(damaged, OPTIONS).samples) < 16000
        except MediaError as error:
            assert str(error)


def test_what_a_sound_must_not_be():
    one = np.zeros(100, "<i2")
    for value, message in (
        (b"", "has no bytes"),
        (b"{}", "is JSON; allowed: WAV"),
        (wav(one, 1, 16, 0), "has the rate 0; allowed: 1000 to"),
        (wav(one, 1, 16, 16000, 9), "has 9 channels; allowed: 1 to 8"),
        (wav(one, 1, 12, 16000), "WAV file of format 1 with 12 bits"),
        (wav(one, 1, 16, 16000, data=b""), "has no samples"),
        (wav(one, 1, 16, 16000)[:40], "without samples"),
        (wav(one, 3, 32, 16000, data=np.full(4, np.inf, "<f4").tobytes()), "not finite"),
        (wav(one, 3, 64, 16000, data=np.full(4, 1e300, "<f8").tobytes()), "not finite"),
        (np.array([0.0, np.nan]), "not finite"),
        (np.array([0.0, -1e11]), r"beyond 1e\+10; allowed: floats from -1 to 1"),
        (wav(one, 1, 16, 1000, data=bytes(62_000)), "longer than 30 seconds"),
        ((np.zeros(481_000, np.float32), 16000), "longer than 30 seconds"),
        (np.zeros((9, 5), np.float32), r"shape \[9, 5\]"),
        (np.zeros(5, bool), "is an array of bool"),
        ((np.zeros(5), True), "has the rate True"),
        ((np.zeros(5), float("nan")), "has the rate nan"),
        ((np.zeros(5), float("inf")), "has the rate inf"),
        ([[0.0], [0.0, 1.0], [0.0]], "is a list that is not of numbers"),
        ("text", "is a str; allowed:"),
        (b"OggS" + bytes(100), f"is in the form Ogg{'' if find_spec('av') else ', for which .* no decoder'}"),
    ):
        with pytest.raises(MediaError, match=message):
            read_sound(value, OPTIONS)
    big = MediaOptions(max_media_bytes=50)
    with pytest.raises(MediaError, match="bytes"):
        read_sound(wav(one, 1, 16, 16000), big)


def test_sounds_of_a_prompt_share_their_seconds():
    budget, half = SecondsBudget(30), np.zeros(15 * 16000, np.float32)
    for _ in range(2):
        read_of_prompt(half, OPTIONS, budget)
    with pytest.raises(MediaError, match="makes the sounds of its prompt longer than 30 seconds"):
        read_of_prompt(half[:1000], OPTIONS, budget)


def test_a_small_file_of_much_silence_is_not_decoded_to_its_end():
    av = pytest.importorskip("av")
    file, silence = io.BytesIO(), np.zeros((1, 48000), np.int16)
    with av.open(file, "w", format="flac") as writer:
        stream = writer.add_stream("flac", rate=48000, layout="mono")
        for _ in range(60):
            frame = av.AudioFrame.from_ndarray(silence, format="s16", layout="mono")
            frame.sample_rate = 48000
            writer.mux(stream.encode(frame))
        writer.mux(stream.encode(None))
    assert len(file.getvalue()) < 50_000
    taken = []

    class Budget(SecondsBudget):
        def take(self, seconds: float) -> None:
            taken.append(seconds)
            super().take(seconds)

    with pytest.raises(MediaError, match="longer than 2 seconds"):
        read_of_prompt(file.getvalue(), OPTIONS, Budget(2))
    assert 2 < sum(taken) < 3


def processor(folder: Path) -> Any:
    raw = read_config_json(folder)
    return processor_for(folder, raw, read_hf(raw), Tokenizer.from_hf_folder(folder))


def test_windows_of_sounds_and_their_embeddings(tmp_path):
    """Spectrograms of each window by itself, and as many placeholders, as transformers has for them."""
    families = ("audioflamingo3", "musicflamingo", "moss", "glmasr")
    for name in (name for name in sound_checkpoints.CONFIGS if name.startswith(families)):
        made = processor(sound_checkpoints.whole_checkpoint(name, tmp_path / name))
        found = np.load(sound_checkpoints.golden_path(name))
        for case in ("a", "long"):
            _, (samples,) = sound_checkpoints.text_and_sounds(name, sound_checkpoints.PROMPTS[case])
            item, wanted = made.process("audio", Sound(samples), {}), found[f"{case}_features"]
            frames = item.patches.reshape(len(wanted), -1, wanted.shape[2])[:, ::13]
            np.testing.assert_allclose(frames, wanted, atol=1e-4)
            assert item.num_rows == (found[f"{case}_ids"] == made.token_id).sum() == (item.rows >= 0).sum()
            assert all(column.tolist().count(0) == -(-len(samples) // 160) for column in item.columns[:1])
        own = made.expand([7, made.token_id, 8], {"audio": [item]}).token_ids
        assert made.length(item) == len(own) - 2 and own.count(made.token_id) == item.num_rows
        text, _ = sound_checkpoints.text_and_sounds(name, sound_checkpoints.PROMPTS["long"])
        expanded = made.expand(made.tokenizer.encode(text, add_special_tokens=False), {"audio": [item]})
        assert expanded.token_ids == found["long_ids"].tolist() and len(expanded.positions[0]) == item.num_rows
        assert {expanded.token_ids[place] for place in expanded.positions[0].tolist()} == {made.token_id}
    (message,) = made.transcription(None, "Write it down.")
    assert message["content"][1] == {"type": "text", "text": "Write it down."}
    assert made.transcription(None, "")[0]["content"][1]["text"] == "Please transcribe this audio into text"
    media: Any = SimpleNamespace(processor=made)
    assert transcriber(media) is made and made.languages == {} and made.text_mark is None


def test_stacked_frames_and_their_transcripts(tmp_path):
    """Fun-ASR-Nano's prompts, rows and columns, and sounds that are too short or too long for it."""
    name = "fun_asr_nano_sound"  # with at most 130 patches
    folder = sound_checkpoints.whole_checkpoint(name, tmp_path)
    made, found = processor(folder), np.load(sound_checkpoints.golden_path(name))
    (samples,) = sound_checkpoints.text_and_sounds(name, sound_checkpoints.PROMPTS["b"])[1]
    item = made.process("audio", Sound(samples), {})
    assert item.num_rows == 17 and len(item.patches) == made.tower.unit
    wanted = np.r_[np.arange(17), np.full(len(item.patches) - 17, -1)]
    assert (item.rows == wanted).all()
    assert (item.columns == [np.minimum(wanted, 0), np.where(wanted < 0, -1, wanted + 1)]).all()
    for case, asked in sound_checkpoints.ASKED.items():
        messages = made.transcription(asked.get("language"), asked.get("prompt", ""))
        text = made.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        ids = made.tokenizer.encode(text, add_special_tokens=False)
        assert made.expand(ids, {"audio": [item]}).token_ids == found[f"{case}_ids"].tolist(), case
    media: Any = SimpleNamespace(processor=made)
    assert transcriber(media) is made and sorted(made.languages) == ["en", "ja", "zh"] and made.text_mark is None
    longest = 400 + 160 * 6 * 130 - 1
    for count, rows in ((400, 1), (longest, 130)):
        assert made.process("audio", Sound(np.zeros(count, np.float32)), {}).num_rows == rows
    assert made.largest("audio").num_rows == 130
    for count, message in ((399, "is too short for an embedding"), (longest + 1, "this model takes at most 7")):
        with pytest.raises(RequestError, match=message):
            made.process("audio", Sound(np.zeros(count, np.float32)), {})
    for changes in ({"frame_shift": 20}, {"window": "povey"}, {"stride_lfr": 4}, {"num_frames_lfr": 7}):
        settings = sound_checkpoints.features_config(name) | changes
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        with pytest.raises(ModelFileError, match=next(iter(changes))):
            processor(folder)


def test_overlapping_windows_and_durations(tmp_path):
    """VibeVoice-ASR's frames, of which windows have some twice, its prompts, and wrong settings."""
    name = "vibevoice_asr_sound"  # with windows of 32 frames, of which six are those of the window before
    folder = sound_checkpoints.whole_checkpoint(name, tmp_path)
    made, found = processor(folder), np.load(sound_checkpoints.golden_path(name))
    assert (made.tower.unit, made.tower.context, made.hop) == (32, 6, 1000)
    item = made.process("audio", Sound(sound(*sound_checkpoints.B), 24_000), {})
    text = sound_checkpoints.DURATION + "".join(sound_checkpoints.marks(name))
    ids = made.tokenizer.encode(text, add_special_tokens=False)
    assert made.expand(ids, {"audio": [item]}).token_ids == found["asked_ids"].tolist()
    with pytest.raises(RequestError, match="the prompt has 2 of the text .* and 1 sounds are given"):
        made.expand(made.tokenizer.encode(text + sound_checkpoints.DURATION), {"audio": [item]})
    for frames, windows in ((1, 1), (32, 1), (33, 2), (58, 2), (59, 3)):
        item = made.process("audio", Sound(np.ones(1000 * frames - 999, np.float32)), {})
        new = item.rows[item.rows >= 0]
        assert item.num_rows == frames and new.tolist() == list(range(frames)), frames
        assert -(-len(item.patches) // 32) == windows and len(item.patches) == len(item.rows)
    silent = made.process("audio", Sound(np.zeros(1000, np.float32)), {}).patches
    assert not silent.any() and made.languages == {} and made.text_mark is None
    (message,) = made.transcription(None, "Ann.")
    assert message["content"] == [{"type": "audio"}, {"type": "text", "text": "Ann."}]
    for changes in ({"sampling_rate": 16_000}, {"pad_to_multiple_of": 3200}, {"target_dB_FS": 201}, {"eps": -1}):
        settings = sound_checkpoints.features_config(name) | changes
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        with pytest.raises(ModelFileError, match=next(iter(changes))):
            processor(folder)


def test_sounds_are_read_at_the_rate_of_the_model():
    samples = sound(4, 0.2)
    found = read_of_prompt((samples, 16_000), OPTIONS, SecondsBudget(1), 24_000)
    np.testing.assert_allclose(found.samples, resample_poly(samples.astype(np.float64), 3, 2), atol=2e-6)
    assert abs(found.seconds - 0.2) < 1e-9
    assert len(read_of_prompt(samples, OPTIONS, SecondsBudget(1), 24_000).samples) == len(samples)
    file = read_of_prompt(
        wav(np.round(samples * 32767).astype("<i2"), 1, 16, 16_000), OPTIONS, SecondsBudget(1), 24_000
    )
    np.testing.assert_allclose(file.samples, found.samples, atol=1e-4)
    assert read_of_prompt(found, OPTIONS, SecondsBudget(1), 24_000) is found
    again = read_of_prompt(Sound(samples), OPTIONS, SecondsBudget(1), 24_000)
    assert again.rate == 24_000 and (again.samples == found.samples).all()


def test_settings_of_windows(tmp_path):
    name = "audioflamingo3_sound"  # with windows of two seconds
    folder = sound_checkpoints.whole_checkpoint(name, tmp_path)
    features = sound_checkpoints.features_config(name)

    def made(changes: dict[str, Any], **more: Any) -> Any:
        content = {"feature_extractor": {**features, **changes}, **more}
        (folder / "processor_config.json").write_text(json.dumps(content))
        return processor(folder)

    assert (made({}).most_samples, made({}, max_audio_len=7.5).most_samples) == (600 * 16000, 6 * 16000)
    with pytest.raises(RequestError, match=r"a sound of 6\.00006 seconds is given; this model takes at most 6"):
        made({}, max_audio_len=7).process("audio", Sound(np.zeros(96001, np.float32)), {})
    for changes, more, message in (
        ({"chunk_length": 30}, {}, "chunk_length must be 2 or absent"),
        ({}, {"max_audio_len": 1}, "max_audio_len must be a number of seconds from 2 to 86400"),
        ({"padding_side": "left"}, {}, "padding_side"),
        ({"padding_value": 0.5}, {}, "padding_value"),
        ({"dither": 0.1}, {}, "dither"),
    ):
        with pytest.raises(ModelFileError, match=message):
            made(changes, **more)


def test_tokens_that_an_old_generation_config_lacks(tmp_path):
    """Whisper's fine-tunes of before 2023 name neither languages nor tasks, nor the token without timestamps."""
    folder = whisper_checkpoints.whole_checkpoint("whisper_sound", tmp_path)
    content, names = whisper_checkpoints.generation_config("whisper_sound"), ("start", "no_timestamps", "rules")

    def made(*without: str, **changes: Any) -> Any:
        kept = {name: value for name, value in content.items() if name not in without} | changes
        (folder / "generation_config.json").write_text(json.dumps(kept))
        return processor(folder)

    new, old = made(), made("lang_to_id", "task_to_id", "no_timestamps_token_id", "is_multilingual")
    assert old.languages == new.languages == {"en": 258, "de": 259} and old.tasks == new.tasks
    assert all(getattr(old, name) == getattr(new, name) for name in names)
    english = made("lang_to_id", "task_to_id", is_multilingual=False)
    assert english.languages == english.tasks == {}
