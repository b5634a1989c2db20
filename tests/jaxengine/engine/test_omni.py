"""Engines that see and hear: what transformers recorded (tests/fixtures/recorders/omni.py) of prompts with images,
videos and sounds, in chunks, out of crowds in small pools, from the prefix cache, and in conversations.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxengine import LLM, ConfigError, RequestError, SamplingParams
from tests.fixtures import omni_checkpoints as omni
from tests.fixtures.whisper_checkpoints import RATE
from tests.jaxengine.engine.test_pictures import OPTIONS, check_idle

ROOT = Path(__file__).parents[3]
# Chunks cut images and sounds, and pages run out.
TIGHT = {**OPTIONS, "max_model_len": 128, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 18}
pytestmark = pytest.mark.thorough("engines: tests/models/families/test_omni.py shows the parts")


def cases(name: str) -> tuple[list[dict[str, Any]], list[tuple[list[int], list[int]]]]:
    """Prompts with their media; their tokens and those that follow."""
    found, prompts, wanted = omni.goldens(name), [], []
    for case, prompt in omni.PROMPTS.items():
        text, media = omni.text_and_media(name, prompt)
        prompts.append({"prompt": text, "multi_modal_data": omni.data_of(media)})
        wanted.append((found[f"{case}_ids"].tolist(), found[f"{case}_greedy"].tolist()))
    return prompts, wanted


def answers(llm: LLM, prompts: list[Any], wanted: list[Any]) -> list[tuple[list[int], list[int]]]:
    params = [SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True) for _, answer in wanted]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(list(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]


@pytest.fixture(scope="module", params=omni.CONFIGS)
def llm(request, tmp_path_factory, executables_dir):
    folder = omni.whole_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    llm = LLM(str(folder), **TIGHT, compile_cache_dir=executables_dir)
    llm.name = request.param
    yield llm
    llm.shutdown()


def test_a_crowd_answers_as_transformers_did(llm):
    """Twice each prompt at once, alone and from the prefix cache; then with longer answers, for which pages run out."""
    prompts, wanted = cases(llm.name)
    assert answers(llm, prompts * 2, wanted * 2) == wanted * 2
    assert [answers(llm, [prompt], [each])[0] for prompt, each in zip(prompts, wanted, strict=True)] == wanted
    long = [(ids, [0] * 24) for ids, _ in wanted]
    alone = [answers(llm, [prompt], [each])[0] for prompt, each in zip(prompts, long, strict=True)]
    llm.reset_prefix_cache()
    assert answers(llm, prompts * 2, long * 2) == alone * 2
    check_idle(llm)
    scheduler = llm.core.engine.scheduler
    assert scheduler.num_preemptions > 0 and scheduler.num_prefix_hits > 0
    media, rows = llm.core.engine.extensions.media_stats(), scheduler.extension("pictures").rows[0]
    assert media.num_items >= 7 and media.num_hits > 0 and rows.num_hits > 0


def test_a_conversation_with_all_of_them(llm):
    """An image and a sound in one message are those of the prompt that a template writes; limits count each kind."""
    _, found = omni.text_and_media(llm.name, omni.PROMPTS["both"])
    parts = [
        {"type": "image", "image": found["image"][0]},
        {"type": "audio", "audio": (found["audio"][0], RATE)},
        {"type": "text", "text": "Say it."},
    ]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (said,) = llm.chat([{"role": "user", "content": parts}], greedy, use_tqdm=False)
    marks = omni.marks(llm.name)
    text = f"<|im_start|>user\n{marks['image']}{marks['audio']}Say it.<|im_end|>\n<|im_start|>assistant\n"
    (written,) = llm.generate({"prompt": text, "multi_modal_data": omni.data_of(found)}, greedy, use_tqdm=False)
    assert said.prompt_token_ids == written.prompt_token_ids
    assert said.outputs[0].token_ids == written.outputs[0].token_ids
    check_idle(llm)


def test_what_is_refused(llm):
    marks, (prompts, _) = omni.marks(llm.name), cases(llm.name)
    sound = prompts[1]["multi_modal_data"]["audio"][0]
    for prompt, data, message in (
        (marks["audio"], {"audio": [sound, sound]}, "the prompt has 1 of the audio's placeholder.* and 2 audios"),
        (marks["audio"], {"image": np.zeros((8, 8, 3), np.uint8)}, "placeholder"),
        (marks["audio"], {"audio": np.zeros(40 * RATE, np.float32)}, "longer than|max_model_len has room for"),
        (marks["audio"], {"audio": np.zeros(0, np.float32)}, "sound|audio"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate({"prompt": prompt, "multi_modal_data": data}, use_tqdm=False)
    with pytest.raises(RequestError, match="mm_processor_kwargs has 'use_audio_in_video'"):
        llm.generate({**prompts[4], "mm_processor_kwargs": {"use_audio_in_video": True}}, use_tqdm=False)
    with pytest.raises(ConfigError, match="encoder_cache_size .* at least .* embeddings of one window of a sound"):
        LLM(llm.core.config.model, **{**TIGHT, "encoder_cache_size": 5})
    check_idle(llm)


def test_a_part_of_what_it_takes(llm):
    """Towers of what prompts may not contain are not loaded; what is left answers as before."""
    prompts, wanted = cases(llm.name)
    for limits, kept, towers in (
        ({"audio": 0}, (0, 2), (True, False)),
        ({"image": 0, "video": 0}, (1, 2), (False, True)),
        ({"image": 0, "video": 0, "audio": 0}, (2,), (False, False)),
    ):
        less = LLM(llm.core.config.model, **TIGHT, limit_mm_per_prompt=limits)
        kinds = [tower.hears for tower in less.core.inputs.model_config.towers]
        assert (False in kinds, True in kinds) == towers
        chosen = [prompts[number] if any(towers) else {"prompt": prompts[number]["prompt"]} for number in kept]
        answer = [wanted[number] for number in kept]
        assert answers(less, chosen, answer) == answer
        with pytest.raises(RequestError, match="limit_mm_per_prompt|takes no|at most 0|audio|image"):
            less.generate(prompts[3], use_tqdm=False)
        less.shutdown()


def compare_on_two_devices(folder: str) -> None:
    halves = {"tensor_parallel_size": 2}
    further = ({**halves, "mm_encoder_tp_mode": "data"}, {"data_parallel_size": 2})
    for name, modes in (("qwen2_5_omni", (halves, *further, {"pipeline_parallel_size": 2})), ("qwen3_omni", (halves,))):
        model = omni.whole_checkpoint(name, Path(folder) / name)
        prompts, wanted = cases(name)
        for options in modes:
            llm = LLM(str(model), **TIGHT, **options)
            assert answers(llm, prompts, wanted) == wanted, (name, options)
            check_idle(llm)
            llm.shutdown()
            print(name, options, flush=True)


def test_two_devices(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.jaxengine.engine.test_omni", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compare_on_two_devices(sys.argv[1])
