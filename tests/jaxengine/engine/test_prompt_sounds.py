"""Sounds in prompts: what transformers recorded (tests/fixtures/recorders/sounds.py), in chunks, out of crowds in small
pools, from the prefix cache, and in conversations."""

from __future__ import annotations

import base64
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxengine import LLM, ConfigError, RequestError, SamplingParams
from jaxengine.media.base.samples import Sound
from tests.fixtures import sound_checkpoints as sounds
from tests.fixtures.model_cases.hearing import TOKEN_IDS
from tests.fixtures.whisper_checkpoints import RATE, sound
from tests.jaxengine.engine.test_sounds import OPTIONS
from tests.jaxengine.server.http.test_audio import wav

ROOT = Path(__file__).parents[3]
# Windows of 50 embeddings at most, of which chunks of 16 tokens take several steps, and pages for some of the prompts.
TIGHT = {"encoder_cache_size": 60, "num_gpu_blocks_override": 20, "max_model_len": 144}
NAMES = tuple(sounds.CONFIGS)
# One that takes sounds of several windows, and one that takes pictures as well;
# tests/jaxengine/server/http/test_prompt_sounds.py runs another.
ALWAYS = ("gemma4_sound",)
# Seconds that are decoded, and are too many for a prompt, where they are not 5.9.
LONG = {"voxtral_sound": 11.6, "qwen3_asr_sound": 11.6, "qwen3_asr_wide_sound": 10.99}
LONG |= {"granite_speech_wide_sound": 23.4, "granite_speech_plus_wide_sound": 23.4, "glmasr_sound": 11.6}
LONG |= dict.fromkeys(("glmasr_wide_sound", "fun_asr_nano_sound", "fun_asr_nano_wide_sound"), 11.6)
LONG |= dict.fromkeys(("vibevoice_asr_sound", "vibevoice_asr_wide_sound", "moss_transcribe_sound"), 11.6)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tight(name: str) -> dict[str, Any]:
    """Options of a small pool. A sound of some models is not cut, and may have all tokens of a prompt."""
    if not name.startswith(("gemma4", "granite", "fun")):
        return TIGHT
    pages = 20 if name.startswith(("granite", "fun")) else 42 if "wide" in name else 23
    return {**TIGHT, "encoder_cache_size": 143, "num_gpu_blocks_override": pages}


def goldens(name: str) -> dict[str, np.ndarray]:
    with np.load(sounds.golden_path(name)) as found:
        return dict(found)


def cases(name: str) -> tuple[list[dict[str, Any]], list[tuple[list[int], list[int]]]]:
    """Prompts with their sounds; their tokens and those that follow."""
    found, prompts, wanted = goldens(name), [], []
    for case, prompt in sounds.prompts(name).items():
        text, held = sounds.text_and_sounds(name, prompt)
        data = {kind: each for kind, each in (("audio", held), ("image", sounds.pictures(prompt))) if each}
        prompts.append({"prompt": text} | ({"multi_modal_data": data} if data else {}))
        wanted.append((found[f"{case}_ids"].tolist(), found[f"{case}_greedy"].tolist()))
    return prompts, wanted


def answers(llm: LLM, prompts: list[Any]) -> list[tuple[list[int], list[int]]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(list(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]


def check_idle(llm: LLM) -> None:
    scheduler = llm.core.engine.scheduler
    assert llm.core.runner.compiles.count == 0
    assert scheduler.num_free_pages == scheduler.num_pages
    assert all(rows.num_used == 0 for rows in scheduler.extension("pictures").rows)


def param(name: str) -> Any:
    marks = [] if name in ALWAYS else [pytest.mark.thorough("a further family or shape")]
    return pytest.param(name, marks=marks)


@pytest.fixture(scope="module", params=map(param, NAMES))
def llm(request, tmp_path_factory, executables_dir):
    folder = sounds.whole_checkpoint(request.param, tmp_path_factory.mktemp("sounds"))
    llm = LLM(str(folder), **OPTIONS, **tight(request.param), compile_cache_dir=executables_dir)
    llm.name = request.param
    yield llm
    llm.shutdown()


def test_answers_are_those_of_transformers_out_of_a_crowd_in_a_small_pool(llm):
    prompts, wanted = cases(llm.name)
    assert answers(llm, prompts * 3) == wanted * 3
    assert [answers(llm, [prompt])[0] for prompt in prompts] == wanted  # alone, and from the prefix cache
    check_idle(llm)
    # Those of Gemma 4 outgrow no pages here: admission counts those of windows, which are given back. Whole sounds of
    # Granite Speech and Fun-ASR, and some windows, leave no room in the pool of embeddings for so many.
    without = ("gemma4", "granite", "fun", "vibe", "audioflamingo3", "musicflamingo")
    assert llm.core.engine.scheduler.num_preemptions > 0 or llm.name.startswith(without)
    media = llm.core.engine.extensions.media_stats()
    assert media.num_items >= 2 and media.num_hits > 0


@pytest.mark.thorough("a further engine")
@pytest.mark.parametrize("llm", ["gemma4_sound", "granite_speech_sound", "fun_asr_nano_sound"], indirect=True)
def test_preempted_requests_go_on_as_they_would_have(llm, executables_dir):
    options = {**OPTIONS, **tight(llm.name), "async_scheduling": False, "compile_cache_dir": executables_dir}
    other = LLM(llm.core.config.model, **options)
    scheduler, calls, preempted = other.core.engine.scheduler, itertools.count(1), 0
    schedule = scheduler.schedule

    def preempting(*args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        if next(calls) % 5 == 0:
            preempted += scheduler.num_running
            scheduler.preempt_all()
        return schedule(*args, **kwargs)

    scheduler.schedule = preempting
    prompts, wanted = cases(llm.name)
    assert answers(other, prompts * 2) == wanted * 2
    assert preempted > 10
    check_idle(other)
    other.shutdown()


def test_pages_are_found_for_the_same_sound_alone(llm):
    (a, b, *_), _ = cases(llm.name)
    other = {**a, "multi_modal_data": {"audio": sound(9, 0.65)}}
    llm.reset_prefix_cache()
    first, changed, again = (llm.generate(each, GREEDY, use_tqdm=False)[0] for each in (a, other, a))
    assert (first.num_cached_tokens, changed.num_cached_tokens) == (0, 8)  # the page before the sound
    assert again.num_cached_tokens >= 24
    assert first.outputs[0].token_ids == again.outputs[0].token_ids != changed.outputs[0].token_ids


def test_spectrograms(llm):
    found, processor = goldens(llm.name), llm.core.inputs.media.processor
    for case, prompt in sounds.prompts(llm.name).items():
        _, held = sounds.text_and_sounds(llm.name, prompt)
        items = [processor.process("audio", Sound(each), {}) for each in held]
        ours, wanted = [item.patches for item in items], found.get(f"{case}_features")
        if llm.name.startswith("vibe"):  # samples, of which windows have some twice
            for item, samples in zip(items, [] if wanted is None else wanted, strict=True):
                own = item.patches[: len(item.rows)][item.rows >= 0].reshape(-1)[::997]
                np.testing.assert_allclose(own, samples[: len(own)], atol=1e-6)
                assert not samples[len(own) :].any()
        elif llm.name.startswith(("gemma4", "granite", "fun")):  # each as long as it is, and zeros behind it
            for frames, held_frames in zip(ours, [] if wanted is None else wanted, strict=True):
                count = min(len(frames[::13]), len(held_frames))
                # Kaldi's in float32 differ by up to 3e-5 from those in float64, and ours by less than 2e-6.
                tolerance = 4e-5 if llm.name.startswith("fun") else 1e-5
                np.testing.assert_allclose(frames[::13][:count], held_frames[:count], atol=tolerance)
                assert not frames[::13][count:].any() and not held_frames[count:].any()
        elif ours:
            size = len(np.concatenate(ours)) // len(wanted)
            frames = np.concatenate(ours).reshape(len(wanted), size, -1)[:, ::13]
            np.testing.assert_allclose(frames, wanted, atol=1e-4)


def test_every_way_to_say_a_sound(llm):
    """In a conversation: as an array, as a file in base64, at an address, and where a template knows no sounds."""
    samples = np.round(sound(*sounds.A) * 32768).clip(-32768, 32767).astype(np.int16)
    data, text = base64.b64encode(wav(samples / 32768)).decode(), {"type": "text", "text": "Say it."}
    parts = (
        {"type": "audio", "audio": (samples, RATE)},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        {"type": "audio", "url": f"data:audio/wav;base64,{data}"},
    )
    messages = [[{"role": "user", "content": [part, text]}] for part in parts]
    outputs = llm.chat(messages, GREEDY, use_tqdm=False)
    plain = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    outputs += llm.chat(messages[0], GREEDY, use_tqdm=False, chat_template=plain)
    placeholder = TOKEN_IDS[sounds.marks(llm.name)[1]]
    counts = [output.prompt_token_ids.count(placeholder) for output in outputs]
    assert len(set(counts)) == 1 and counts[0] >= 5
    assert len({tuple(output.outputs[0].token_ids) for output in outputs[:-1]}) == 1
    begin, _, end = sounds.marks(llm.name)
    if llm.name.startswith("gemma4"):  # whose processor adds them
        begin, end = "<|audio_bos|>", "<|audio_eos|>"
    wanted = f"<|im_start|>user\n{begin}{sounds.marks(llm.name)[1] * counts[0]}{end}Say it.<|im_end|>\n"
    ids = sounds.tokenizer().encode(wanted + "<|im_start|>assistant\n").ids
    assert outputs[0].prompt_token_ids == ids and outputs[-1].prompt_token_ids[0] != ids[0]


@pytest.mark.thorough("a further engine; tests/jaxengine/server/http asks the others")
@pytest.mark.parametrize("llm", ["glmasr_sound", "glmasr_wide_sound"], indirect=True)
def test_what_is_asked_for_a_transcript(llm):
    processor, found = llm.core.inputs.media.processor, goldens(llm.name)
    for case, asked in sounds.ASKED_GLM.items():
        (message,) = processor.transcription(None, asked.get("prompt", ""))
        message["content"][0] |= {"audio": (sound(*sounds.B), RATE)}
        (output,) = llm.chat([[message]], GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == found[f"{case}_ids"].tolist()
        assert list(output.outputs[0].token_ids) == found[f"{case}_greedy"].tolist()


def test_what_a_sound_or_an_option_must_not_be(llm):
    text, held = "".join(sounds.marks(llm.name)), sound(1, 0.2)
    for prompt, data, message in (
        (text, {"audio": [held, held]}, "the prompt has 1 of the placeholder .* and 2 sounds are given"),
        (text, {"audio": sound(1, LONG.get(llm.name, 5.9))}, "this model takes at most|max_model_len has room for"),
        (text, {"audio": sound(1, 99.0)}, "makes the sounds of its prompt longer than|max_model_len has room for"),
        (text, {"audio": (held, 12.5)}, r"multi_modal_data\['audio'\] has the rate 12\.5; allowed: whole numbers"),
        (text, {"audio": b"RIFF"}, "is a file of an unknown type; allowed: WAV"),
        *([] if llm.name == "gemma4_sound" else [(text, {"image": "data:,"}, "takes no image: .* it takes sounds")]),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate({"prompt": prompt, "multi_modal_data": data}, GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="mm_processor_kwargs has 'x'"):
        data = {"multi_modal_data": {"audio": held}, "mm_processor_kwargs": {"x": 1}}
        llm.generate({"prompt": text, **data}, GREEDY, use_tqdm=False)
    check_idle(llm)
    for options, message in (
        ({"encoder_cache_size": 5}, "encoder_cache_size .* at least .* embeddings of one window of a sound"),
        ({"max_num_batched_encoder_tokens": 5}, "max_num_batched_encoder_tokens .* at least"),
        ({"mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs has 'x'"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(llm.core.config.model, **OPTIONS, **options)


def compare_on_two_devices(folder: str) -> None:
    halves = {"tensor_parallel_size": 2}
    further = ({**halves, "mm_encoder_tp_mode": "data"}, {"data_parallel_size": 2}, {"pipeline_parallel_size": 2})
    for name in (each for each in NAMES if "wide" not in each):
        model = sounds.whole_checkpoint(name, Path(folder) / name)
        prompts, wanted = cases(name)
        for options in (halves, *(further if name.startswith("qwen2") else ())):
            llm = LLM(str(model), **OPTIONS, **tight(name), **options)
            assert answers(llm, prompts) == wanted, (name, options)
            check_idle(llm)
            llm.shutdown()
            print(name, options, flush=True)


@pytest.mark.thorough("further engines")
def test_two_devices(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.jaxengine.engine.test_prompt_sounds", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compare_on_two_devices(sys.argv[1])
