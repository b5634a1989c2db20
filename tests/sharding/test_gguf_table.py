"""A token table of a GGUF file that is kept quantised: over devices and stages the tokens of one device.

Run as a module it compares, with two forced CPU devices: python -m tests.sharding.test_gguf_table FILE [--thorough]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fast_compile import fast_compile_environment
from tests.models.quantization.test_gguf import LLAMA, write

ROOT = Path(__file__).parents[2]


# Over stages the table is on two, one device each, as on one.
SHORT: dict[str, int] = {"tensor_parallel_size": 2}
MORE: tuple[dict[str, int], ...] = ({}, {"pipeline_parallel_size": 2})


def compare(path: str, *, thorough: bool) -> None:
    from jaxengine import LLM, SamplingParams

    options = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    options |= {"skip_tokenizer_init": True, "disable_log_stats": True}
    steps = {"cudagraph_capture_sizes": [4], "prefill_sizes": []}
    prompts = [{"prompt_token_ids": [3, 47, 9][:size]} for size in (1, 2, 3)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def tokens(**more: Any) -> list[list[int]]:
        llm = LLM(model=path, dtype="float32", compilation_config=steps, compile_cache_dir="", **options, **more)
        kinds = {row["modules"]: row["format"] for row in llm.core.runner.weight_rows}
        assert kinds["embed"] == ("Q8_0" if "quantization" in more else "as it is"), kinds
        return [list(done.outputs[0].token_ids) for done in llm.generate(prompts, params, use_tqdm=False)]

    expected = tokens()
    for more in (SHORT, *(MORE if thorough else ())):
        found = tokens(quantization="gguf", **more)
        assert found == expected, (more, found, expected)


def test_a_kept_table_over_two_devices(tmp_path, thorough):
    file = write(tmp_path / "model.gguf", LLAMA, lambda name: "Q8_0", tied=True)
    env = os.environ | fast_compile_environment() | {"JAX_PLATFORMS": "cpu"}
    env["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "tests.sharding.test_gguf_table", file, *["--thorough"] * thorough]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    compare(sys.argv[1], thorough="--thorough" in sys.argv)
