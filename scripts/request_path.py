"""Which of our files one request runs through, in the order in which it reaches them.

    python -m scripts.request_path

A profiler sees every call between `LLM.generate` and its answer, on the calling thread; the model's own code is not
among them, for it ran when the steps were compiled. What start-up runs is not counted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def files_of_a_request() -> list[str]:
    """Paths of source files, relative to the tree, of one greedy request of four tokens to the embedded model."""
    from jaxengine import LLM, SamplingParams

    llm = LLM(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128, disable_log_stats=True)
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            seen.setdefault(frame.f_code.co_filename)

    params = SamplingParams(max_tokens=4, temperature=0)
    llm.generate("The capital of France is", params, use_tqdm=False)
    sys.setprofile(note)
    try:
        llm.generate("The capital of Spain is", params, use_tqdm=False)
    finally:
        sys.setprofile(None)
    packages = f"{ROOT / 'jaxengine'}/"
    return [str(Path(name).relative_to(ROOT)) for name in seen if name.startswith(packages)]


if __name__ == "__main__":
    found = files_of_a_request()
    for path in found:
        print(f"{len((ROOT / path).read_text().splitlines()):5}  {path}")
    print(f"{len(found)} files")
