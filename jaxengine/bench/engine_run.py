"""Runs a workload through the engine and divides its time between the parts of a step.

All engine benchmarks report a `Run`. The times are the difference of the engine's StepStats before and after the run.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxengine.api.llm import LLM
    from jaxengine.bench.workloads import Workload
    from jaxengine.requests.output.outputs import RequestOutput


@dataclass(frozen=True)
class Run:
    """Outputs and times of one run of a workload, in seconds.

    Attributes:
      seconds: from submitting the requests until the last one has finished.
      outputs: of each request, in the order of the workload.
      stats: increase of each numeric field of the engine's StepStats during the run.
    """

    seconds: float
    outputs: list[RequestOutput]
    stats: dict[str, float]

    @property
    def output_tokens(self) -> int:
        """Number of tokens of all outputs."""
        return sum(len(completion.token_ids) for output in self.outputs for completion in output.outputs)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were found in the prefix cache."""
        return sum(output.num_cached_tokens or 0 for output in self.outputs)

    @property
    def first_token_seconds(self) -> list[float]:
        """Time to first token of each request that has one, in the order of the workload."""
        times = [output.metrics.time_to_first_token for output in self.outputs if output.metrics is not None]
        return [seconds for seconds in times if seconds is not None]

    @property
    def inter_token_seconds(self) -> list[float]:
        """Mean seconds between tokens, for each request that has metrics and at least two tokens."""
        means = []
        for output in self.outputs:
            metrics, count = output.metrics, sum(len(completion.token_ids) for completion in output.outputs)
            if metrics is None or metrics.first_token_time is None or metrics.finished_time is None or count < 2:
                continue
            means.append((metrics.finished_time - metrics.first_token_time) / (count - 1))
        return means

    @property
    def kv_waste(self) -> float:
        """Empty token slots of allocated pages, as a share of the used slots, over all steps."""
        return self.stats["page_slots_empty"] / max(1, self.stats["page_slots_used"])

    def timeline(self) -> dict[str, float]:
        """Return the mean milliseconds per step of each part of a step, and "steps", the number of steps, at least 1.

        The parts are "schedule", "dispatch", "wait", "update" and "outside"; the last is the remaining time of the run,
        such as tokenisation and outputs.
        """
        steps = max(1, int(self.stats["num_steps"]))
        parts = ("schedule", "dispatch", "wait", "update")
        per_step = {part: self.stats[f"{part}_seconds"] / steps * 1e3 for part in parts}
        per_step["outside"] = self.seconds / steps * 1e3 - sum(per_step.values())
        return {"steps": steps, **{part: round(ms, 3) for part, ms in per_step.items()}}


def run_workload(llm: LLM, workload: Workload, *, max_tokens: tuple[int, ...] | None = None) -> Run:
    """Empty the prefix cache, submit all requests at once with temperature 0, and wait for all; return a Run.

    Only the workload's stop_token_ids end a request early, not the end of sequence. Nothing is detokenised. max_tokens:
    output length of each request instead of the workload's; None or empty for the workload's. The run's `stats` hold
    the increase of each of the engine's numeric counters. Raises RequestError for a request that the engine refuses.
    """
    from jaxengine.requests.params.sampling_params import SamplingParams

    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            stop_token_ids=workload.stop_token_ids,
            detokenize=False,
        )
        for count in max_tokens or workload.max_tokens
    ]
    prompts: Any = [{"prompt_token_ids": list(prompt)} for prompt in workload.prompts]
    llm.reset_prefix_cache()
    stats = llm.core.engine.stats
    names = [each.name for each in dataclasses.fields(stats) if isinstance(getattr(stats, each.name), (int, float))]
    before = [getattr(stats, name) for name in names]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    spent = {name: getattr(stats, name) - value for name, value in zip(names, before, strict=True)}
    return Run(seconds, outputs, spent)


def run_static(llm: LLM, workload: Workload, batch_size: int) -> tuple[float, int]:
    """Run a workload in static batches of `batch_size` requests; return (seconds, requested tokens).

    Batches are formed in order of arrival, and each begins with an empty prefix cache. Every request runs as long as
    the longest one of its batch, and then the next batch starts. Only requested tokens are counted. seconds: the sum
    over the batches, without the time between them. Raises RequestError for a request that the engine refuses.
    """
    seconds = 0.0
    for first in range(0, len(workload.prompts), batch_size):
        rows = slice(first, first + batch_size)
        batch = dataclasses.replace(workload, prompts=workload.prompts[rows], max_tokens=workload.max_tokens[rows])
        longest = max(batch.max_tokens)
        seconds += run_workload(llm, batch, max_tokens=(longest,) * len(batch.prompts)).seconds
    return seconds, sum(workload.max_tokens)
