"""Memory that sleep frees and time that waking takes, on the default model, many times over, at levels 1 and 2.

A row is a tenth of the cycles: bytes of the arrays on the devices before, asleep and after, resident anonymous memory,
programs compiled, whether the tokens are those from before the first sleep, and the medians, in milliseconds, of going
to sleep, of waking, of a first token right after it and of a first token when warm. `kept` says that nothing compiled,
that tokens are equal and that bytes after a row are those of the first one.

A long run is cut by --budget-s, and --resume goes on after the rows of the file that --save names.
"""

from __future__ import annotations

import time
from argparse import Namespace
from statistics import median
from typing import Any

import jax

from benchmarks.engines import engine_options
from benchmarks.harness import Option, shared
from benchmarks.processes import memory
from benchmarks.recorder import Recorder
from benchmarks.weights.weight_updates import stored
from jaxengine import LLM, SamplingParams

ROWS = 10
OPTIONS = {
    "cycles": Option(200),
    "requests": Option(8, "whose tokens are compared"),
    "resume": Option(False, "go on after the rows of the file"),
    **shared(budget_s=1e9),
}
ENGINE = engine_options(dtype="float32", max_model_len=256, max_num_batched_tokens=256)
PROMPT = [[100, 7, 11, 200, 5]]


def alive() -> float:
    """Return the MiB of all arrays of jax in this process, to one decimal."""
    return round(sum(each.nbytes for each in jax.live_arrays()) / 2**20, 1)


class Cycles:
    """Engine that is put to sleep and woken. expected: tokens of its requests before the first sleep."""

    def __init__(self, llm: LLM, requests: int):
        self._llm, self._tensors = llm, stored()
        self._prompts = [[100 + number, 7, 11] for number in range(requests)]
        self._params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        self.expected = self.tokens()

    def tokens(self) -> list[list[int]]:
        """Run the requests and return their greedy tokens, 8 each."""
        outputs = self._llm.generate(self._prompts, self._params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in outputs]

    def first_token(self) -> None:
        """Generate one token for PROMPT."""
        self._llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)

    def once(self, level: int) -> dict[str, Any]:
        """Put the engine to sleep and wake it; return MiB of arrays alive "before", "asleep" and "after", and seconds
        by name.

        "sleep", "wake", "first": seconds of going to sleep, of waking, and of a first token after it. "warm": of
        another first token. At level 2 waking includes restoring the weights, which come from host memory. Clears the
        prefix cache.
        """
        llm, found = self._llm, {}
        llm.core.utility("reset_prefix_cache")
        found["before"], times = alive(), [time.monotonic()]
        llm.sleep(level)
        found["asleep"] = alive()
        times.append(time.monotonic())
        if level == 2:
            llm.update_weights(self._tensors)
        llm.wake_up()
        times.append(time.monotonic())
        self.first_token()
        times.append(time.monotonic())
        llm.core.utility("reset_prefix_cache")
        found["after"], start = alive(), time.monotonic()
        self.first_token()
        found["warm"] = time.monotonic() - start
        found |= dict(
            zip(("sleep", "wake", "first"), (b - a for a, b in zip(times, times[1:], strict=False)), strict=True)
        )
        return found


def run(args: Namespace, recorder: Recorder) -> None:
    """Run the cycles, at levels 1 and 2 alternately; add a row after each tenth. Begins no tenth after the deadline."""
    if args.resume:
        recorder.resume()
    first = recorder.rows[-1]["cycles"] if recorder.rows else 0
    llm = LLM(**ENGINE, max_num_seqs=8)
    cycles = Cycles(llm, args.requests)
    for row in range(ROWS):
        start, end = max(first, row * args.cycles // ROWS), (row + 1) * args.cycles // ROWS
        if start >= end or time.monotonic() > recorder.deadline:
            continue
        done = [cycles.once(1 + number % 2) for number in range(start, end)]
        times = {
            f"{name} ms": round(median(each[name] for each in done) * 1e3, 1)
            for name in ("sleep", "wake", "first", "warm")
        }
        found = {
            "cycles": end,
            **{f"MiB {name}": median(each[name] for each in done) for name in ("before", "asleep", "after")},
            "MiB resident": memory(kind="RssAnon") >> 20,
            "compilations": llm.core.runner.compiles.count,
            "tokens equal": cycles.tokens() == cycles.expected,
            **times,
        }
        is_flat = found["MiB after"] <= (recorder.rows or [found])[0]["MiB after"]
        recorder.add(found | {"kept": is_flat and found["tokens equal"] and not found["compilations"]})
    llm.core.shutdown()
