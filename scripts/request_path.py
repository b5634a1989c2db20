"""Files of ours that one request runs through, and the calls of a decode step.

    python -m scripts.request_path

A profiler sees every call between `LLM.generate` and its answer, on the calling thread; the model's own code is not
among them, for it ran when the steps were compiled. What start-up runs is not counted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Paths(NamedTuple):
    """Files and calls of a request. Files are relative to the repository, in the order in which they are first reached.

    Attributes:
      request: source files of one greedy request to the embedded model.
      step: source files of a decode step in the middle of that request.
      num_calls: number of calls of this package's functions in that step.
      modules: names of this package's modules that the process has imported.
    """

    request: list[str]
    step: list[str]
    num_calls: int
    modules: list[str]


def trace(**options: Any) -> Paths:
    """Run a request of twelve tokens alone, after another one, and return the files that it went through and the calls
    of a step in the middle of it.

    options: of the engine, added to options for a few small step shapes.
    """
    from jaxengine import LLM, SamplingParams

    small = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 128, "disable_log_stats": True}
    llm = LLM(**small | options)
    home, calls, steps, depth = f"{ROOT / 'jaxengine'}/", [], [], 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(home):
            return
        is_step = code.co_qualname == "EngineCore.step"
        if event == "call":
            if is_step:
                steps.append([])
                depth += 1
            calls.append(code.co_filename)
            if depth:
                steps[-1].append(code.co_filename)
        elif is_step:
            depth -= 1

    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    llm.generate("The capital of France is", params, use_tqdm=False)
    sys.setprofile(note)
    try:
        llm.generate("The capital of Spain is", params, use_tqdm=False)
    finally:
        sys.setprofile(None)
    middle = steps[len(steps) // 2]
    request, step = ([str(Path(name).relative_to(ROOT)) for name in dict.fromkeys(each)] for each in (calls, middle))
    return Paths(request, step, len(middle), sorted(name for name in sys.modules if name.startswith("jaxengine.")))


if __name__ == "__main__":
    found = trace()
    for path in found.request:
        print(f"{len((ROOT / path).read_text().splitlines()):5}  {path}{'  (step)' * (path in found.step)}")
    print(f"{len(found.request)} files; a decode step: {len(found.step)} files, {found.num_calls} calls")
