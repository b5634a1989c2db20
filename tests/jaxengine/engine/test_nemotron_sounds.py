"""Sounds of Nemotron-H Omni, under published names: what transformers recorded, in chunks, out of crowds in a small
pool, next to images, and in clips."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jaxengine import LLM
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.media.base.samples import RATE, Sound
from jaxengine.media.open import open_processor
from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.sound.nemotron_h_omni import read_nemotron_sound
from jaxengine.models.weights.load import check_source
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures import nemotron_sounds as fixture
from tests.fixtures.picture_checkpoints import picture
from tests.fixtures.whisper_checkpoints import sound
from tests.jaxengine.engine.test_prompt_sounds import answers, check_idle
from tests.jaxengine.engine.test_sounds import OPTIONS

IDS = fixture.IDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fixture.whole_checkpoint(tmp_path_factory.mktemp("nemotron") / "published", published=True)


@pytest.fixture(scope="module")
def goldens():
    with np.load(fixture.GOLDENS) as found:
        return dict(found)


@pytest.fixture(scope="module")
def processor(folder):
    return open_processor(folder, read_folder(folder), tokenizer=Tokenizer.from_hf_folder(folder))


def test_answers_are_those_of_transformers_out_of_a_crowd_with_preemptions(folder, goldens, executables_dir):
    more = {"encoder_cache_size": 400, "num_gpu_blocks_override": 40, "max_model_len": 128, "async_scheduling": False}
    llm = LLM(
        str(folder), **OPTIONS, **more, limit_mm_per_prompt={"image": 0, "video": 0}, compile_cache_dir=executables_dir
    )
    prompts, wanted = [], []
    for case, prompt in fixture.PROMPTS.items():
        text, sounds = fixture.text_and_sounds(prompt)
        prompts.append({"prompt": text, "multi_modal_data": {"audio": sounds}})
        wanted.append((goldens[f"{case}_ids"].tolist(), goldens[f"{case}_greedy"].tolist()))
    scheduler, calls, preempted = llm.core.engine.scheduler, itertools.count(1), 0
    schedule = scheduler.schedule

    def preempting(*args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        if next(calls) % 7 == 0:
            preempted += scheduler.num_running
            scheduler.preempt_all()
        return schedule(*args, **kwargs)

    scheduler.schedule = preempting
    try:
        assert answers(llm, prompts * 2) == wanted * 2
        assert preempted > 4
        scheduler.schedule = schedule
        assert [answers(llm, [prompt])[0] for prompt in prompts] == wanted
        check_idle(llm)
    finally:
        llm.shutdown()


def test_spectrograms(processor, goldens):
    for case, prompt in fixture.PROMPTS.items():
        _, sounds = fixture.text_and_sounds(prompt)
        for samples, wanted in zip(sounds, goldens[f"{case}_features"], strict=True):
            item = processor.process("audio", Sound(samples), {})
            count = len(samples) // 160
            frames = item.patches[:count:13]
            np.testing.assert_allclose(frames, wanted[: len(frames)], atol=1e-4)  # in float32, theirs
            assert len(item.patches) == 3000 and not item.patches[count:].any()
            assert item.num_rows == -(-count // 8) and (item.columns[0] >= 0).sum() == count


def test_clips(processor):
    """Each clip of 30 seconds has a spectrogram of its own, and the last one at least a tenth of a second."""
    samples = np.concatenate([sound(8, 4.63)] * 7)
    for seconds, rows, frames in ((30.0, 375, 3000), (31.0, 388, 6000), (30.01, 377, 6000), (0.05, 2, 3000)):
        given = samples[: int(seconds * RATE)]
        item = processor.process("audio", Sound(given), {})
        assert (item.num_rows, len(item.patches)) == (rows, frames)
        assert item.rows[item.rows >= 0].tolist() == list(range(rows))
        last = processor.process("audio", Sound(given[30 * RATE :] if seconds > 30 else given), {})
        np.testing.assert_array_equal(item.patches[-3000:], last.patches)


def test_prompts_with_an_image(processor):
    items = {
        "image": [processor.process("image", picture(3, 24, 40), {})],
        "audio": [processor.process("audio", Sound(sound(3, seconds)), {}) for seconds in (0.65, 1.0)],
    }
    text = "a<so_embedding>b<image>c<so_embedding>"
    found = processor.expand(processor.encode(text, processor.seeing.tokenizer.encode(text)), items)
    assert found.order == [("audio", 0), ("image", 0), ("audio", 1)]
    ids = np.array(found.token_ids)
    for (kind, number), own in zip(found.order, found.positions, strict=True):
        before, embedded, after = {
            "audio": ("<so_start>", "<so_embedding>", "<so_end>"),
            "image": ("<img>", "<image>", "</img>"),
        }[kind]
        assert len(own) == items[kind][number].num_rows and set(ids[own]) == {IDS[embedded]}
        assert (ids[own[0] - 1], ids[own[-1] + 1]) == (IDS[before], IDS[after])


def test_files(folder, tmp_path):
    """Every tensor is known under both kinds of names, with any of the towers; settings that are not are refused."""
    for published in (True, False):
        made = fixture.whole_checkpoint(tmp_path / str(published), published=published)
        for limits, hears in (({}, [False, True]), ({"audio": 0}, [False]), ({"image": 0, "video": 0}, [True])):
            source = open_model(EngineConfig(model=str(made), limit_mm_per_prompt=limits))
            assert [tower.hears for tower in source.config.towers] == hears
            check_source(build_model(source.config, Build("float32")), source.weights)
            source.close()
    audio = fixture.CONFIG["audio_config"]
    for changes, message in (
        ({"subsampling_factor": 4}, "subsampling_factor must be 8 or absent"),
        ({"conv_kernel_size": 4}, "conv_kernel_size must be odd"),
        ({"num_mel_bins": 12}, "num_mel_bins must be a multiple of 8"),
        ({"num_attention_heads": 5}, "num_attention_heads must be a divisor of hidden_size 24"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_nemotron_sound(ConfigFields({"audio_config": audio | changes}))
