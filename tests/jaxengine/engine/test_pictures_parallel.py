"""Engines that see on two devices: what transformers recorded, with towers split, with one on each device, and with the
layers in two stages; and with embeddings in the place of pictures.

    python -m tests.jaxengine.engine.test_pictures_parallel CASE

needs two devices (XLA_FLAGS=--xla_force_host_platform_device_count=2).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.fixtures import picture_cases, unit_pictures

ROOT = Path(__file__).parents[3]
CASES = (*picture_cases.PROMPTS, *unit_pictures.CASES)
MODES = {
    "tp 2, weights": {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "weights"},
    "tp 2, data": {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"},
    "pp 2": {"pipeline_parallel_size": 2},
}
# Whose pictures come as embeddings, too. Videos frame by frame; heads that turn, and chunks; patches that are not
# joined; tiles and embeddings for lines; neighbours that turn together, before latent attention.
EMBEDDED = ("glm4v_vision", "llama4_sees_vision", "pixtral_vision", "llava_next_vision", "kimi_vl_vision")
# What these models are too small for: a tower of an odd number of heads or with an odd MLP, an odd number of heads of
# delta nets, and parts of pictures for both of two layers.
REFUSED = {
    ("gemma4_both_ways_vision", "tp 2, weights"): "^tensor_parallel_size is 2; allowed: 1 for this model",
    **dict.fromkeys(
        [
            *((name, "tp 2, weights") for name in ("glm46v_vision", "glm46v_moe_vision", "minicpmv4_6_untied_vision")),
            ("glm46v_vision", "tp 2, data"),
            *(("qwen4_exp_pictures_vision", mode) for mode in MODES if mode.startswith("tp 2")),
        ],
        "^tensor_parallel_size is 2; allowed: 1 for this model",
    ),
    ("muse_glimmer_odd_vision", "tp 2, weights"): "^tensor_parallel_size is 2; allowed: 1, 5 for this model",
    ("qwen2_5_vl_vision", "tp 2, weights"): "^tensor_parallel_size is 2; allowed: 1 for this model",
    ("dots_ocr_vision", "tp 2, weights"): "^tensor_parallel_size is 2; allowed: 1 for this model",
    ("janus_vision", "tp 2, weights"): "^tensor_parallel_size is 2; allowed: 1 for this model",
    ("exaone4_5_vision", "tp 2, weights"): "^tensor_parallel_size is 2; allowed: 1 for this model",
    ("blip2_odd_vision", "tp 2, weights"): "^tensor_parallel_size is 2; allowed: 1 for this model",
    ("qwen3_vl_moe_vision", "pp 2"): "^the first 2 layers add parts of images, but the first stage has 1",
}


def compare(name: str, modes: Iterable[str] = MODES) -> None:
    from jaxengine import ConfigError
    from tests.jaxengine.engine.test_pictures import Case, answers, check_idle, embedded, options_of

    with tempfile.TemporaryDirectory() as folder:
        case = Case(name, Path(folder))
        for mode in modes:
            if (name, mode) in REFUSED:
                with pytest.raises(ConfigError, match=REFUSED[name, mode]):
                    case.start(**options_of(case), **MODES[mode])
                continue
            llm = case.start(**options_of(case), **MODES[mode], enable_mm_embeds=name in EMBEDDED)
            wanted = [*case.answers.values()] * 2
            assert answers(llm, [*case.prompts.values()] * 2, [len(answer) for answer in wanted]) == wanted, mode
            stats = llm.core.engine.extensions.media_stats()
            assert stats.num_calls > 0
            if name in EMBEDDED:
                given, wanted = embedded(case, llm)
                calls = stats.num_calls
                assert answers(llm, given * 2, [len(answer) for answer in wanted] * 2) == wanted * 2, mode
                # Videos come as they are.
                assert any(each["multi_modal_data"].get("video") for each in given) or stats.num_calls == calls
            check_idle(llm)


@pytest.mark.thorough("starts three engines over two devices for each")
@pytest.mark.parametrize("name", CASES)
def test_two_devices_answer_as_transformers_did(name):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.jaxengine.engine.test_pictures_parallel", name]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.stdout.endswith(f"{name} equal\n"), done.stderr[-3000:]


if __name__ == "__main__":
    for each in sys.argv[1:]:
        compare(each)
        print(f"{each} equal", flush=True)
