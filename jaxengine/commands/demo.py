"""`jaxengine demo`: answers some prompts in one continuous batch and prints the figures.

It uses only the public API: LLM, SamplingParams and get_metrics.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jaxengine.requests.params.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxengine.requests.output.outputs import RequestOutput

QUESTIONS = (
    "Write three sentences about the ocean.",
    "What is the capital of France, and what is it known for?",
    "Explain to a child why the sky is blue.",
    "Give me a short recipe for pancakes.",
)
# Two requests share these instructions, whose keys and values are computed once.
INSTRUCTIONS = (
    "You are a friendly guide in a science museum. Visitors of every age stop at your desk and ask short questions. "
    "Answer each of them in two or three plain sentences, without lists, without headings and without difficult words. "
    "Begin with the answer itself. If a question has nothing to do with science, say so kindly and tell the visitor "
    "something about the stars, the oceans, animals or plants instead. Never make up numbers, names or dates."
)
GUIDE_QUESTIONS = ("What do plants need to grow?", "Why does the moon shine at night?")


def run(**engine_options: Any) -> int:
    """Load the model, answer six prompts greedily in one batch, in at most 64 tokens; print the answers and figures.

    engine_options: fields of EngineConfig. Returns 1 if anything was compiled after start-up, else 0. Raises the errors
    of `LLM` for options or a model that cannot be loaded.
    """
    from jaxengine.api.llm import LLM

    start = time.perf_counter()
    llm = LLM(**engine_options)
    ready_seconds = time.perf_counter() - start
    before = _metrics(llm)

    guide = {"role": "system", "content": INSTRUCTIONS}
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    conversations += [[guide, {"role": "user", "content": question}] for question in GUIDE_QUESTIONS]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    print(f"\nAnswering {len(conversations)} prompts at once.\n", flush=True)
    start = time.perf_counter()
    outputs = llm.chat(conversations, params)
    seconds = time.perf_counter() - start

    for conversation, output in zip(conversations, outputs, strict=True):
        print(f"> {conversation[-1]['content']}\n{output.outputs[0].text.strip()}\n")
    after = _metrics(llm)
    plan = llm.core.runner.plan
    for line in summary(outputs, seconds, before, after, ready_seconds, plan.num_pages, plan.page_size):
        print(line)
    return 1 if after["jaxengine:compilations_since_ready"] else 0


def summary(
    outputs: list[RequestOutput],
    seconds: float,
    before: dict[str, float],
    after: dict[str, float],
    ready_seconds: float,
    num_pages: int,
    page_size: int,
) -> list[str]:
    """Return six lines of figures to print after the answers: throughput, time to first token, prefix cache, KV pages,
    start and compilations.

    outputs: the answered requests, of which at least one has a first token. seconds: duration of the run. before,
    after: metrics by name, before and after the run. ready_seconds: time from the start of loading until the model was
    ready. num_pages: pages of the KV pool. page_size: tokens per page.
    """
    new_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    times = [output.metrics.time_to_first_token for output in outputs if output.metrics]
    first = sorted(seconds for seconds in times if seconds is not None)

    def added(name: str) -> int:
        return int(after[name] - before[name])

    hits, queries = added("vllm:prefix_cache_hits"), added("vllm:prefix_cache_queries")
    used, empty = added("jaxengine:page_slots_used"), added("jaxengine:page_slots_empty")
    pages = (used + empty) / page_size / added("jaxengine:steps")
    compiled, loaded = int(after["jaxengine:executables_compiled"]), int(after["jaxengine:executables_loaded"])
    if compiled:
        start_up = f"{compiled} executables compiled, {loaded} loaded from the cache; the next start compiles nothing"
    else:
        start_up = f"nothing compiled: all {loaded} executables were loaded from the cache"
    since_ready = int(after["jaxengine:compilations_since_ready"])
    return [
        f"throughput        {new_tokens / seconds:.1f} tokens/s ({new_tokens} new tokens of {len(outputs)} requests, "
        f"{prompt_tokens} prompt tokens, {seconds:.2f} s)",
        f"first token       mean {sum(first) / len(first):.3f} s, median {first[len(first) // 2]:.3f} s, "
        f"last {first[-1]:.3f} s",
        f"prefix cache      {hits} of {queries} prompt tokens found",
        f"KV pages          {pages:.0f} of {num_pages} held on average ({100 * pages / num_pages:.1f} %), "
        f"{100 * empty / (used + empty):.1f} % of their token slots empty; {added('vllm:num_preemptions')} preemptions",
        f"start             {ready_seconds:.1f} s until ready; {start_up}",
        f"compilations      {since_ready} after ready",
    ]


def _metrics(llm: Any) -> dict[str, float]:
    """Return the value of each metric of the engine by name; of several with one name the last."""
    return {metric.name: metric.value for metric in llm.get_metrics()}
