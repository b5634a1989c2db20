"""Engines that see on two devices: what transformers recorded, with towers split and with one on each device, and with
embeddings in the place of pictures.

    python -m tests.jaxengine.engine.test_pictures_parallel CASE ...

needs two devices (XLA_FLAGS=--xla_force_host_platform_device_count=2).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Videos frame by frame; heads that turn, and chunks; patches that are not joined; tiles and embeddings for lines;
# neighbours that turn together, before latent attention.
CASES = ("glm4v_vision", "llama4_sees_vision", "pixtral_vision", "llava_next_vision", "kimi_vl_vision")


def compare(name: str) -> None:
    from tests.jaxengine.engine.test_pictures import Case, answers, check_idle, embedded, options_of

    with tempfile.TemporaryDirectory() as folder:
        case = Case(name, Path(folder))
        for mode in ("weights", "data"):
            llm = case.start(**options_of(case), tensor_parallel_size=2, mm_encoder_tp_mode=mode, enable_mm_embeds=True)
            wanted = [*case.answers.values()] * 2
            assert answers(llm, [*case.prompts.values()] * 2, [len(answer) for answer in wanted]) == wanted, mode
            given, wanted = embedded(case, llm)
            calls = llm.core.engine.media_stats.num_calls
            assert answers(llm, given * 2, [len(answer) for answer in wanted] * 2) == wanted * 2, mode
            # Videos come as they are.
            assert any(each["multi_modal_data"].get("video") for each in given) or (
                llm.core.engine.media_stats.num_calls == calls
            )
            check_idle(llm)


@pytest.mark.thorough("starts ten engines over two devices")
def test_two_devices_answer_as_transformers_did():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.jaxengine.engine.test_pictures_parallel", *CASES]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.stdout.endswith("".join(f"{name} equal\n" for name in CASES)), done.stderr[-3000:]


if __name__ == "__main__":
    for each in sys.argv[1:]:
        compare(each)
        print(f"{each} equal", flush=True)
