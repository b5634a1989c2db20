"""Gemma 4's processor of sounds, alone and beside that of images: spectrograms and counts as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Gemma4AudioFeatureExtractor

from jaxengine.media.base.samples import Sound
from jaxengine.media.processors.usm_mel import UsmMel
from jaxengine.media.registry import processor_for
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_hf
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures import sound_checkpoints as sounds
from tests.fixtures.model_cases.hearing import TOKEN_IDS

NAME = "gemma4_sound"
BEGIN, AUDIO, END, IMAGE = (
    TOKEN_IDS[each] for each in ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "[BEGIN_AUDIO]")
)
# What is read from preprocessor_config.json, with settings that published checkpoints leave out.
SETTINGS: dict[str, Any] = {"feature_size": 20, **sounds.EMPHASIS["gemma4_wide_sound"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return sounds.whole_checkpoint(NAME, tmp_path_factory.mktemp("gemma4"))


def opened(folder: Path, **changes: Any) -> Any:
    raw = {**read_config_json(folder), **changes}
    return processor_for(folder, raw, read_hf(raw), Tokenizer.from_hf_folder(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"preemphasis_htk_flavor": False, "input_scale_factor": 2.0},
        {"preemphasis": 0.0, "min_frequency": 0.0, "max_frequency": 8000.0},  # the defaults, as files spell them out
    ],
)
def test_spectrograms_are_those_of_transformers(changes: dict[str, Any]):
    settings = {**SETTINGS, **changes}
    theirs, ours = Gemma4AudioFeatureExtractor(**settings), UsmMel.read(ConfigFields(settings), 20)
    for count in (160, 161, 480, 481, 800, 5000, 16_000):
        samples = sounds.sound(2, 1.0)[:count]
        wanted = theirs._extract_spectrogram(samples, np.ones(count, np.int32))[0] if count > 160 else np.zeros((0, 20))
        np.testing.assert_allclose(ours.of(samples), wanted, atol=1e-5)


def test_embeddings_of_a_sound(folder):
    processor = opened(folder)
    # ceil(ceil(frames / 2) / 2), where frames lie within the sound and half a window before it.
    for count, rows in ((161, 1), (641, 1), (801, 2), (16_000, 25), (480_000, 750)):
        made = processor.process("audio", Sound(np.zeros(count, np.float32)), {})
        assert made.num_rows == rows == (made.rows >= 0).sum()
        frames = (made.columns[0] == 0).sum()
        assert frames == (count - 1) // 160 and len(made.patches) - frames >= 2 and not made.patches[frames:].any()
    assert (processor.largest("audio").num_rows, len(processor.largest("audio").patches)) == (750, 3072)
    for samples, options, message in (
        (160, {}, "too short for an embedding"),
        (480_001, {}, "this model takes at most 30"),
        (161, {"x": 1}, "mm_processor_kwargs has 'x'"),
    ):
        with pytest.raises(RequestError, match=message):
            processor.process("audio", Sound(np.zeros(samples, np.float32)), options)


def test_images_and_sounds_of_one_prompt(folder):
    processor = opened(folder)
    assert processor.modalities == ("image", "video", "audio")
    image = processor.process("image", sounds.picture(1, 24, 40), {})
    short, longer = (processor.process("audio", Sound(sounds.sound(1, seconds)), {}) for seconds in (0.1, 0.2))
    items = {"image": [image, image], "audio": [short, longer]}
    found = processor.expand([7, AUDIO, IMAGE, 8, IMAGE, AUDIO, 9], items)
    assert found.order == [("audio", 0), ("image", 0), ("image", 1), ("audio", 1)]
    shown = [AUDIO, IMAGE, IMAGE, AUDIO]
    for positions, token, (modality, number) in zip(found.positions, shown, found.order, strict=True):
        assert [found.token_ids[place] for place in positions] == [token] * items[modality][number].num_rows
    assert sum(map(len, found.positions)) == sum(each in (AUDIO, IMAGE) for each in found.token_ids)
    assert found.token_ids[:3] == [7, BEGIN, AUDIO] and found.token_ids[-3:] == [AUDIO, END, 9]
    with pytest.raises(RequestError, match="the prompt has 2 of the placeholder '<|AUDIO|>', and 1 sounds are given"):
        processor.expand([AUDIO, IMAGE, AUDIO], {"image": [image], "audio": [short]})
    assert opened(folder, vision_config=None).modalities == ("audio",)
    assert opened(folder, audio_config=None).modalities == ("image", "video")


def test_settings_that_are_refused(folder, tmp_path):
    sounds.whole_checkpoint(NAME, tmp_path)
    for changes, message in (
        ({"feature_size": 80}, "feature_size must be 16"),
        ({"sampling_rate": 8000}, "sampling_rate must be 16000"),
        ({"dither": 0.1}, "dither must be 0.0"),
        ({"frame_length": 512}, "frame_length must be 320 or absent"),
        ({"frame_length_ms": 0.09}, "frame_length_ms must be .* at least 2 samples"),
        ({"padding_side": "left"}, 'padding_side must be "right"'),
        ({"frame_length_ms": 1e38}, "frame_length_ms must be a number > 0 and <= 1000"),
        ({"min_frequency": 100.0, "max_frequency": 100.0}, "max_frequency must be .* from min_frequency"),
        ({"preemphasis": 2.0}, "preemphasis must be a number from 0 to 1"),
        ({"input_scale_factor": 1e38}, "input_scale_factor must be a number > 0"),
        ({"per_bin_mean": [1.0]}, "per_bin_mean must be a list of 16 numbers"),
        ({"per_bin_mean": [[1], [1, 2]]}, "per_bin_mean must be a list of 16 numbers"),
        ({"per_bin_stddev": [0.0] * 16}, "per_bin_stddev must be a list of 16 numbers from 1e-06"),
    ):
        settings = {"feature_extractor": {**sounds.features_config(NAME), **changes}}
        images = {"image_processor": sounds.PICTURES, "video_processor": {**sounds.PICTURES, "max_soft_tokens": 4}}
        (tmp_path / "processor_config.json").write_text(json.dumps({**settings, **images}))
        with pytest.raises(ModelFileError, match=message):
            opened(tmp_path)
