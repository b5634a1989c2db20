"""Which of our files one request runs through, in the order in which it reaches them, and what a steady step calls.

    python -m scripts.request_path

A profiler sees every call between `LLM.generate` and its answer, on the calling thread; the model's own code is not
among them, for it ran when the steps were compiled. What start-up runs is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NUM_TOKENS = 12


class Event(NamedTuple):
    """A call of one of our functions, or the return from one. path: relative to the tree."""

    is_call: bool
    path: str
    name: str


def trace(llm: Any) -> list[Event]:
    """Return the events of one greedy request of NUM_TOKENS tokens to an engine that has answered another before."""
    from jaxengine import SamplingParams

    found: list[tuple[bool, str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "return"):
            found.append((event == "call", frame.f_code.co_filename, frame.f_code.co_qualname))

    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    llm.generate("The capital of France is", params, use_tqdm=False)
    sys.setprofile(note)
    try:
        llm.generate("The capital of Spain is", params, use_tqdm=False)
    finally:
        sys.setprofile(None)
    packages = f"{ROOT / 'jaxengine'}/"
    return [
        Event(is_call, str(Path(path).relative_to(ROOT)), name)
        for is_call, path, name in found
        if path.startswith(packages)
    ]


def files(events: Iterable[Event]) -> list[str]:
    """Return the files that the events enter, in order."""
    return list(dict.fromkeys(each.path for each in events if each.is_call))


def steady_step(events: Iterable[Event]) -> list[Event]:
    """Return the events of the step in the middle of a request: one decode that neither begins nor ends anything."""
    steps: list[list[Event]] = []
    depth = 0
    for each in events:
        if not depth and each.is_call and each.name == "EngineCore.step":
            steps.append([])
        elif not depth:
            continue
        depth += 1 if each.is_call else -1
        steps[-1].append(each)
    return steps[len(steps) // 2]


def num_calls(events: Iterable[Event]) -> int:
    """Return how many of the events are calls."""
    return sum(each.is_call for each in events)


def main() -> None:
    """Trace a request to the embedded model and print both lists."""
    from jaxengine import LLM

    events = trace(LLM(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128, disable_log_stats=True))
    found, step = files(events), steady_step(events)
    for path in found:
        print(f"{len((ROOT / path).read_text().splitlines()):5}  {path}")
    print(f"{len(found)} files\n\nA steady step:")
    depth = 0
    for each in step:
        if each.is_call:
            print(f"{'  ' * depth}{each.path} {each.name}")
        depth += 1 if each.is_call else -1
    print(f"{num_calls(step)} calls in {len(files(step))} files")


if __name__ == "__main__":
    main()
