"""Engines of models without timestamps that attend to a sound of any length: what transformers recorded
(tests/fixtures/recorders/attended.py), out of crowds in small pools."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxengine import LLM, RequestError, SamplingParams
from jaxengine.media.base.samples import Sound
from tests.fixtures import attended_checkpoints as attended
from tests.fixtures.whisper_checkpoints import sound
from tests.jaxengine.engine.test_sounds import OPTIONS, TIGHT, check_idle

ROOT = Path(__file__).parents[3]
NEW_TOKENS = 24
FURTHER = pytest.mark.thorough("a further shape, or a tower of 30 seconds")


def goldens(name: str) -> dict[str, np.ndarray]:
    with np.load(attended.golden_path(name)) as found:
        return dict(found)


def answers(llm: LLM, prompts: list[Any], **params: Any) -> list[Any]:
    params = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False, **params}
    return [output.outputs[0] for output in llm.generate(prompts, SamplingParams(**params), use_tqdm=False)]


def check_crowd(llm: LLM, name: str) -> None:
    """Tokens of many long requests for few pages and rows, some of which are therefore preempted."""
    wanted = {case: goldens(name)[f"{case}_tokens"].tolist() for case in attended.SOUNDS}
    crowd = [*attended.SOUNDS] * 4
    found = answers(llm, [attended.prompt_with_sound(name, case) for case in crowd], max_tokens=40)
    assert [list(each.token_ids)[:NEW_TOKENS] for each in found] == [wanted[case] for case in crowd]
    check_idle(llm)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "cohere_asr_sound" else FURTHER) for name in attended.KINDS],
)
def llm(request, tmp_path_factory, executables_dir):
    folder = attended.whole_checkpoint(request.param, tmp_path_factory.mktemp("attended"))
    llm = LLM(str(folder), **OPTIONS, **TIGHT, compile_cache_dir=executables_dir)
    llm.name = request.param
    yield llm
    llm.shutdown()


def test_features_are_those_of_transformers(llm):
    found, processor = goldens(llm.name), llm.core.inputs.media.processor
    for case in attended.SOUNDS:
        item, wanted = processor.process("audio", Sound(attended.sound_of(case)), {}), found[f"{case}_features"]
        values = item.patches.reshape(-1) if wanted.ndim == 1 else item.patches
        heard = int(item.columns[item.columns > 0].sum())
        # transformers' spectrograms end with a frame of zeros.
        assert heard == len(attended.sound_of(case)) // (1 if wanted.ndim == 1 else 160)
        assert not values[heard:].any()
        np.testing.assert_allclose(values[: 7 * len(wanted) : 7], wanted, atol=3e-4)


def test_tokens_and_logits_are_those_of_transformers_alone_and_out_of_a_crowd(llm):
    recorded = goldens(llm.name)
    for case in attended.SOUNDS:
        (found,) = answers(llm, [attended.prompt_with_sound(llm.name, case)], logprobs=2)
        assert list(found.token_ids) == recorded[f"{case}_tokens"].tolist()
        logits = recorded[f"{case}_logits"].astype(np.float64)
        wanted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        for given, row in zip(found.logprobs, wanted, strict=True):
            for token, about in given.items():
                assert about.logprob == pytest.approx(row[token], abs=1e-3)
    check_crowd(llm, llm.name)
    assert llm.core.engine.scheduler.num_preemptions > 0


def test_pages_are_found_for_the_same_sound_alone(llm):
    """The prompt has some whole pages, all of which the last request finds."""
    ids = [*attended.prompt_of(llm.name), *range(65, 81)]
    data = [{"prompt_token_ids": ids, "multi_modal_data": {"audio": sound(seed, 0.9)}} for seed in (31, 32, 31)]
    one = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first, other, again = (llm.generate(each, one, use_tqdm=False)[0] for each in data)
    assert [each.num_cached_tokens for each in (first, other, again)] == [0, 0, (len(ids) - 1) // 8 * 8]
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


def test_short_sounds_and_what_a_sound_must_not_be(llm):
    """A sound counts as a longer one of silence where the model has nothing to compute from; silence is a sound."""
    name, processor = llm.name, llm.core.inputs.media.processor
    short = {"prompt_token_ids": attended.prompt_of(name), "multi_modal_data": {"audio": np.zeros(7, np.float32)}}
    for samples in (np.zeros(1, np.float32), np.full(300, 0.1, np.float32), np.zeros(20_000, np.float32)):
        (found,) = answers(llm, [{**short, "multi_modal_data": {"audio": samples}}], logprobs=0)
        assert np.isfinite([next(iter(each.values())).logprob for each in found.logprobs]).all()
    long = np.zeros(processor.most + 1, np.float32)
    ids = {"prompt_token_ids": attended.prompt_of(name)}
    for data, message in (
        (None, r"multi_modal_data must have one sound under 'audio'"),
        ({"audio": [np.ones(9, np.float32)] * 2}, r"multi_modal_data has 2 sounds; allowed: 1"),
        ({"audio": long}, r"a sound of [\d.]+ seconds is given; a prompt has at most (2|1\.5|30): transcriptions"),
    ):
        given = ids if data is None else {**ids, "multi_modal_data": data}
        with pytest.raises(RequestError, match=message):
            llm.generate(given, SamplingParams(max_tokens=1), use_tqdm=False)
    check_idle(llm)


def test_a_long_sound_is_cut_as_transformers_cuts_it(llm):
    found, processor = goldens(llm.name), llm.core.inputs.media.processor
    samples = sound(*attended.LONG)
    if "long_lengths" not in found:
        samples = np.tile(samples, 10)
    pieces = processor.pieces(samples)
    assert np.array_equal(np.concatenate(pieces), samples) and len(pieces) > 1
    assert all(processor.most - processor.search <= len(each) <= processor.most for each in pieces[:-1])
    if "long_lengths" in found:
        assert [len(each) for each in pieces] == found["long_lengths"].tolist()
        data = [{"multi_modal_data": {"audio": each}} for each in pieces]
        prompts = [{"prompt_token_ids": processor.prompt("ja"), **each} for each in data]
        assert [list(each.token_ids) for each in answers(llm, prompts)] == found["long_tokens"].tolist()


def compare_on_two_devices(folder: str) -> None:
    for name in attended.KINDS:
        model = attended.whole_checkpoint(name, Path(folder) / name)
        for options in ({"tensor_parallel_size": 2}, {"data_parallel_size": 2}):
            llm = LLM(str(model), **OPTIONS, **TIGHT, **options)
            check_crowd(llm, name)
            llm.shutdown()


@pytest.mark.thorough("eight more engines")
def test_two_devices(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.jaxengine.engine.test_attended_sounds", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compare_on_two_devices(sys.argv[1])
