"""Engines that attend to sounds: what transformers recorded (tests/fixtures/recorders/whisper.py), out of crowds in
small pools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxengine import LLM, ConfigError, RequestError, SamplingParams
from jaxengine.media.base.samples import Sound
from jaxengine.requests.media.transcripts import Recording, Segment, cut_segments, prompt_of, token_times
from jaxengine.scheduler.extensions.sounds import MAX_ALIGNED
from tests.fixtures import whisper_checkpoints as whisper

ROOT = Path(__file__).parents[3]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "compilation_config": {"prefill_sizes": [], "cudagraph_capture_sizes": []},
    "disable_log_stats": True,
}
# Two sounds for four slots, and pages for less than three transcripts.
TIGHT = {"encoder_cache_size": 2, "num_gpu_blocks_override": 12}


def goldens(name: str) -> dict[str, np.ndarray]:
    with np.load(whisper.golden_path(name)) as found:
        return dict(found)


def answers(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def check_idle(llm: LLM) -> None:
    scheduler = llm.core.engine.scheduler
    assert llm.core.runner.compiles.count == 0
    assert scheduler.num_free_pages == scheduler.num_pages
    assert all(rows.num_used == 0 for rows in scheduler.extension("sounds").rows)


WIDE = pytest.mark.thorough("a further shape")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=WIDE if "wide" in name else ()) for name in whisper.CONFIGS]
)
def llm(request, tmp_path_factory, executables_dir):
    folder = whisper.whole_checkpoint(request.param, tmp_path_factory.mktemp("whisper"))
    llm = LLM(str(folder), **OPTIONS, **TIGHT, compile_cache_dir=executables_dir)
    llm.name = request.param
    yield llm
    llm.shutdown()


def test_transcripts_are_those_of_transformers_out_of_a_crowd_in_a_small_pool(llm):
    prompts, wanted = whisper.transcripts(llm.name)
    assert answers(llm, prompts * 2) == wanted * 2
    assert answers(llm, prompts[:1]) == wanted[:1]
    check_idle(llm)
    assert llm.core.engine.scheduler.num_preemptions > 0
    media = llm.core.engine.extensions.media_stats()
    assert media.num_items >= 2 and media.num_hits > 0


def test_spectrograms_and_languages(llm):
    found, processor = goldens(llm.name), llm.core.inputs.media.processor
    for case in "ab":
        sound = Sound(whisper.sound_of(llm.name, case))
        frames = processor.process("audio", sound, {}).patches
        np.testing.assert_allclose(frames[::7], found[f"{case}_features"], atol=2e-5)
    with pytest.raises(RequestError, match="mm_processor_kwargs has 'size'; this model has none"):
        processor.with_options({"size": 1})
    languages = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[whisper.EN, whisper.DE])
    sounds = [whisper.sound_of(llm.name, case) for case in "ab"]
    text, data = "<|startoftranscript|>", [{"multi_modal_data": {"audio": each}} for each in sounds]
    prompts: list[Any] = [{"prompt": text, **each} for each in data]
    # vLLM's form.
    prompts += [{"encoder_prompt": {"prompt": "", **each}, "decoder_prompt": text} for each in data]
    outputs = llm.generate(prompts, languages, use_tqdm=False)
    assert [each.outputs[0].token_ids[0] for each in outputs] == [found[f"{case}_language"][0] for case in "abab"]
    assert all(each.prompt_token_ids == [whisper.START] for each in outputs)


class Window(NamedTuple):
    """A window of the long sound: its prompt and transcript, its first frame and positions, and its segments."""

    prompt: dict[str, Any]
    tokens: list[int]
    seek: int
    positions: int
    segments: list[Segment]


def read_windows(llm: LLM, name: str) -> Iterator[Window]:
    processor, samples = llm.core.inputs.media.processor, whisper.sound_of(name, "long")
    frames = processor.spectrogram(samples)
    np.testing.assert_allclose(frames[::7], goldens(name)["long_features"], atol=1e-4)
    recording, seek = Recording(frames, len(samples) / whisper.RATE, len(frames)), 0
    while seek < len(frames):
        prompt = {"prompt_token_ids": prompt_of(processor, "en", "transcribe", timed=True)}
        prompt |= recording.window(seek, processor.num_frames)
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)[0].outputs[0]
        tokens = [token for token in output.token_ids if token != whisper.EOS]
        held = min(processor.num_frames, len(frames) - seek)
        segments, behind = cut_segments(tokens, seek, held, whisper.FIRST_TIMESTAMP)
        yield Window(prompt, output.token_ids, seek, recording.num_positions(seek, processor.num_frames), segments)
        seek = behind


def times_of(llm: LLM, windows: list[Window], others: list[Any]) -> list[float]:
    """Times of the tokens of all segments, from windows that are aligned together, among other requests."""
    prompts, params = list(others), [SamplingParams(temperature=0, max_tokens=24) for _ in others]
    for each in windows:
        ids = each.prompt["prompt_token_ids"]
        prompts.append({**each.prompt, "prompt_token_ids": [*ids, *each.tokens[:-1]]})
        params.append(SamplingParams(max_tokens=1, extra_args={"alignment": [len(ids), each.positions]}))
    outputs = llm.generate(prompts, params, use_tqdm=False)[len(others) :]
    found = []
    for each, output in zip(windows, outputs, strict=True):
        alignment = output.outputs[0].alignment
        assert alignment.shape == (len(each.tokens) - 1, each.positions)
        ends = token_times(alignment, len(each.tokens), each.seek)[:, 1]
        found += [time for own in each.segments for time in ends[own.first : own.first + len(own.tokens)]]
    return found


def test_a_long_sound_has_the_segments_and_times_of_transformers(llm):
    found, windows = goldens(llm.name), list(read_windows(llm, llm.name))
    segments = [each for own in windows for each in own.segments]
    assert len(segments) > 5
    assert [len(each.tokens) for each in segments] == found["long_lengths"].tolist()
    assert [token for each in segments for token in each.tokens] == found["long_tokens"].tolist()
    np.testing.assert_allclose([(each.start, each.end) for each in segments], found["long_times"], atol=1e-9)
    times = times_of(llm, windows, whisper.transcripts(llm.name)[0])
    np.testing.assert_allclose(times, found["long_token_times"], atol=1e-4)
    assert len(set(times)) > 20
    runner, config = llm.core.runner, llm.core.config
    result = config.max_model_len * runner.extension("alignment").num_positions * 4
    assert runner.plan.extensions["alignment"] == MAX_ALIGNED * config.max_in_flight * result
    check_idle(llm)


def test_pages_are_found_for_the_same_sound_alone(llm):
    """A long prompt, so that it has whole pages."""
    ids = [whisper.PREVIOUS, *range(65, 83), whisper.START, whisper.EN, whisper.TRANSCRIBE, whisper.NO_TIMESTAMPS]
    a, b = ({"prompt_token_ids": ids, "multi_modal_data": {"audio": whisper.sound_of(llm.name, case)}} for case in "ab")
    greedy = SamplingParams(temperature=0, max_tokens=4)
    first, other, again = (llm.generate(each, greedy, use_tqdm=False)[0] for each in (a, b, a))
    assert (first.num_cached_tokens, other.num_cached_tokens, again.num_cached_tokens) == (0, 0, 16)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids != other.outputs[0].token_ids


def test_what_a_sound_or_an_option_must_not_be(llm):
    ids = {"prompt_token_ids": [whisper.START]}
    with pytest.raises(RequestError, match="encoder_prompt has 'prompt'; the encoder reads a sound alone"):
        llm.generate({"encoder_prompt": {"prompt": "a"}, "decoder_prompt": "b"}, use_tqdm=False)
    sound = whisper.sound(1, 0.2)
    for data, message in (
        (None, r"multi_modal_data must have one sound under 'audio'"),
        ({"audio": [sound, sound]}, r"multi_modal_data has 2 sounds; allowed: 1"),
        ({"audio": whisper.sound(1, 2.5)}, r"a sound of 2\.5 seconds is given; a prompt has at most [12]"),
        ({"audio": (sound, 12.5)}, r"multi_modal_data\['audio'\] has the rate 12\.5; allowed: whole numbers"),
        ({"audio": np.full(9, np.nan, np.float32)}, r"has samples that are not finite"),
        ({"audio": b"RIFF"}, r"is a file of an unknown type; allowed: WAV"),
        ({"image": "data:,"}, r"this model takes no image: .* it takes sounds"),
    ):
        prompt = ids if data is None else {**ids, "multi_modal_data": data}
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    heard = {**ids, "multi_modal_data": {"audio": sound}}
    for asked, message in (
        ("a", r"alignment must be \[first prompt token >= 0, positions of the sound >= 1\], got 'a'"),
        ([0, True], "alignment must be"),
        ([0, 2**31], "alignment must be"),
        (
            [1, 1],
            r"alignment is \[1, 1\]; allowed: a token up to 0, the prompt's last, and at most (100|50) pos",
        ),
        ([0, 2**31 - 1], r"alignment is \[0, 2147483647\]; allowed: a token up to 0"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(heard, SamplingParams(max_tokens=1, extra_args={"alignment": asked}), use_tqdm=False)
    check_idle(llm)
    for options, message in (
        ({"enable_lora": True}, "enable_lora is True, which WhisperForConditionalGeneration, which attends"),
        ({"limit_mm_per_prompt": {"audio": 0}}, "limit_mm_per_prompt leaves no sound"),
        ({"limit_mm_per_prompt": {"audio": 2}}, "limit_mm_per_prompt.audio is 2; allowed: 1, as every prompt"),
        ({"mm_encoder_tp_mode": "data"}, "mm_encoder_tp_mode is 'data', which Whisper"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'float8_e4m3fn', which Whisper"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(llm.core.config.model, **OPTIONS, **options)


def compare_on_two_devices(folder: str) -> None:
    name = "whisper_sound"
    model = whisper.whole_checkpoint(name, Path(folder))
    prompts, wanted = whisper.transcripts(name)
    for options in ({"tensor_parallel_size": 2}, {"data_parallel_size": 2}):
        llm = LLM(str(model), **OPTIONS, **TIGHT, **options)
        assert answers(llm, prompts) == wanted, options
        times = times_of(llm, list(read_windows(llm, name)), prompts)
        np.testing.assert_allclose(times, goldens(name)["long_token_times"], atol=1e-4)
        check_idle(llm)
        llm.shutdown()


@pytest.mark.thorough("two more engines")
def test_two_devices(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.jaxengine.engine.test_sounds", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compare_on_two_devices(sys.argv[1])
