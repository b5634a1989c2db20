"""Memory that sleep frees and time that waking takes, on the default model, many times over, at levels 1 and 2.

In every other pair of cycles, requests run when the engine goes to sleep, with mode="keep", and as many arrive while it
sleeps; each ends with the tokens that it had before the first sleep.

A row is a tenth of the cycles: bytes of the arrays on the devices before, asleep and after, resident anonymous memory,
programs compiled, requests that waited for the engine to wake, whether all tokens are those from before the first
sleep, processor seconds of a cycle, and the medians, in milliseconds, of going to sleep, of waking, of a first token
right after it and of a first token when warm. `kept` says that nothing compiled, that tokens are equal and that bytes
after a row are those of the first one.

A long run is cut by --budget-s, and --resume goes on after the rows of the file that --save names.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from statistics import median
from typing import Any

import jax

from benchmarks.engines import engine_options
from benchmarks.harness import Option, shared
from benchmarks.processes import memory
from benchmarks.recorder import Recorder
from benchmarks.weights.weight_updates import milliseconds, stored
from jaxengine import AsyncLLM, SamplingParams
from jaxengine.requests.output.outputs import RequestOutput

ROWS = 10
OPTIONS = {
    "cycles": Option(200),
    "requests": Option(8, "whose tokens are compared"),
    "resume": Option(False, "go on after the rows of the file"),
    **shared(budget_s=1e9),
}
ENGINE = engine_options(dtype="float32", max_model_len=256, max_num_batched_tokens=256)
PROMPT = [100, 7, 11, 200, 5]


def alive() -> float:
    """Return the MiB of all arrays of jax in this process, to one decimal."""
    return round(sum(each.nbytes for each in jax.live_arrays()) / 2**20, 1)


class Cycles:
    """Engine that is put to sleep and woken. expected: tokens of its requests before the first sleep."""

    def __init__(self, llm: AsyncLLM, requests: int):
        """Read the default model's weights into host memory, for level 2. requests: number of those that are
        compared.
        """
        self._llm, self._tensors = llm, stored()
        self._prompts = [[100 + number, 7, 11] for number in range(requests)]
        self._params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    async def begin(self) -> None:
        """Run the requests for `expected`."""
        self.expected = await self._tokens(self._prompts)

    async def _tokens(self, prompts: list[list[int]], begun: asyncio.Semaphore | None = None) -> list[list[int]]:
        """Return the greedy tokens of the prompts, 8 each; release `begun` at the first token of each."""

        async def one(prompt: list[int]) -> list[int]:
            output: RequestOutput | None = None
            async for newest in self._llm.generate(prompt, self._params):
                if output is None and begun:
                    begun.release()
                output = newest
            assert output is not None
            return list(output.outputs[0].token_ids)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    async def _num_unfinished(self) -> int:
        """Return the number of requests that the engine has."""
        return await self._llm.between_steps(lambda: self._llm.core.engine.scheduler.num_unfinished)

    async def _first_token(self) -> float:
        """Generate one token for PROMPT; return the seconds that it took."""
        start = time.monotonic()
        async for _ in self._llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1, detokenize=False)):
            pass
        return time.monotonic() - start

    async def once(self, level: int, *, busy: bool) -> dict[str, Any]:
        """Put the engine to sleep and wake it; return what was measured, by name.

        "before", "asleep", "after": MiB of arrays alive. "sleep", "wake", "first", "warm": seconds of going to sleep,
        of waking, of a first token after it, if not busy, and of another first token. "waited": requests that were not
        done when the engine slept. "equal": whether they ended with the expected tokens. "cpu": processor seconds.

        busy: half of the requests run when the engine goes to sleep, and the others arrive while it sleeps. At level 2
        waking includes restoring the weights, which come from host memory. Clears the prefix cache.
        """
        llm, tasks, half = self._llm, list[asyncio.Task[list[list[int]]]](), len(self._prompts) // 2
        cpu = time.process_time()
        await llm.reset_prefix_cache()
        found: dict[str, Any] = {"before": alive(), "waited": 0, "equal": True}
        if busy:
            begun = asyncio.Semaphore(0)
            tasks.append(asyncio.create_task(self._tokens(self._prompts[:half], begun)))
            await begun.acquire()
        times = [time.monotonic()]
        await llm.sleep(level, "keep")
        times.append(time.monotonic())
        found["asleep"] = alive()
        if busy:
            found["waited"] = await self._num_unfinished() + len(self._prompts) - half
            tasks.append(asyncio.create_task(self._tokens(self._prompts[half:])))
            while await self._num_unfinished() < found["waited"]:
                await asyncio.sleep(0.001)
        waking = time.monotonic()
        if level == 2:
            await llm.update_weights(self._tensors)
        await llm.wake_up()
        times.append(time.monotonic())
        if busy:
            tokens = [each for task in tasks for each in await task]
            found["equal"] = tokens == self.expected
        else:
            found["first"] = await self._first_token()
        await llm.reset_prefix_cache()
        found |= {"after": alive(), "warm": await self._first_token(), "cpu": time.process_time() - cpu}
        return found | {"sleep": times[1] - times[0], "wake": times[2] - waking}


def run(args: Namespace, recorder: Recorder) -> None:
    """Start an engine and run args.cycles cycles on it (`_rows`), with args.resume those that the file lacks."""
    if args.resume:
        recorder.resume()
    llm = AsyncLLM(**ENGINE, max_num_seqs=8)
    try:
        asyncio.run(_rows(Cycles(llm, args.requests), llm, args.cycles, recorder))
    finally:
        llm.shutdown()


async def _rows(cycles: Cycles, llm: AsyncLLM, total: int, recorder: Recorder) -> None:
    """Run the cycles of `total` that the recorder's rows do not have yet, at levels 1 and 2 alternately and every
    second pair of them busy; add a row after each tenth. Begins no tenth after the deadline. "kept" is whether arrays
    take no more than in the first row, all tokens were as expected and nothing was compiled. Numbers are rounded.
    """
    await cycles.begin()
    first = recorder.rows[-1]["cycles"] if recorder.rows else 0
    for row in range(ROWS):
        start, end = max(first, row * total // ROWS), (row + 1) * total // ROWS
        if start >= end or time.monotonic() > recorder.deadline:
            continue
        done = [await cycles.once(1 + number % 2, busy=number % 4 > 1) for number in range(start, end)]
        found = {
            "cycles": end,
            **{f"MiB {name}": median(each[name] for each in done) for name in ("before", "asleep", "after")},
            "MiB resident": memory(kind="RssAnon") >> 20,
            "compilations": llm.core.runner.compiles.count,
            "requests waited": sum(each["waited"] for each in done),
            "tokens equal": all(each["equal"] for each in done),
            "cpu s": round(median(each["cpu"] for each in done), 2),
        }
        for name in ("sleep", "wake", "first", "warm"):
            found[f"{name} ms"] = milliseconds([each[name] for each in done if name in each])
        is_flat = found["MiB after"] <= (recorder.rows or [found])[0]["MiB after"]
        recorder.add(found | {"kept": is_flat and found["tokens equal"] and not found["compilations"]})
