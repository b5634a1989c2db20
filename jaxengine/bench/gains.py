"""`jaxengine bench gains`: measures what each optimisation gains for a model on this machine, with and without it in
one run.

A row of GAINS names an optimisation, the options of the two engines that differ by it, and the figure that is measured
on both alternately. The best value of each counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxengine.config.command_line import given_options, output_file, positive_int
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.engine_flags import add_engine_options, add_model

if TYPE_CHECKING:
    from jaxengine.api.llm import LLM
    from jaxengine.bench.workloads import Workload

# A pool of fixed bytes, however many bytes a token takes.
POOL = {"kv_cache_memory_bytes": 256 << 20}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}


@dataclass(frozen=True)
class Sizes:
    """Size of the requests that are measured.

    Attributes:
      num_prompts: requests of a run.
      input_len, output_len: tokens of each prompt and of each output.
    """

    num_prompts: int
    input_len: int
    output_len: int

    @property
    def context(self) -> int:
        """Tokens of the longest request that a measure sends: four times input and output, at least 16."""
        return max(16, 4 * (self.input_len + self.output_len))


@dataclass(frozen=True)
class Gain:
    """An optimisation and how its gain is measured.

    Attributes:
      name: of its row in the table.
      measure: returns the figure of an engine for requests of these sizes: (engine, sizes) -> figure. Raises
        RequestError for a request that the engine refuses.
      unit: of that figure.
      base, changed: options of the engine without and with the optimisation.
      smaller_is_better: the figure is a time, not a rate.
      once: only the first figure of an engine counts, as later ones find everything compiled.
      measure_base: in place of `measure` for the figure without the optimisation, if one engine gives both figures.
    """

    name: str
    measure: Callable[[LLM, Sizes], float]
    unit: str
    base: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, Any] = field(default_factory=dict)
    smaller_is_better: bool = False
    once: bool = False
    measure_base: Callable[[LLM, Sizes], float] | None = None


def requests_of(llm: LLM, sizes: Sizes) -> Workload:
    """Return requests of random tokens with these sizes, the same in each call. Token ids are below the engine's
    vocabulary size.
    """
    from jaxengine.bench.workloads import fixed_lengths

    return fixed_lengths(sizes.num_prompts, sizes.input_len, sizes.output_len, llm.core.runner.vocab_size)


def rate(llm: LLM, workload: Workload) -> float:
    """Empty the prefix cache, run all requests at once, and return the prompt and output tokens per second.

    Raises RequestError for a request that the engine refuses.
    """
    from jaxengine.bench.engine_run import run_workload

    done = run_workload(llm, workload)
    return (done.output_tokens + done.prompt_tokens) / done.seconds


def plain_rate(llm: LLM, sizes: Sizes) -> float:
    """Return the prompt and output tokens per second of requests of random tokens."""
    return rate(llm, requests_of(llm, sizes))


def shared_prefix_rate(llm: LLM, sizes: Sizes) -> float:
    """Return the prompt and output tokens per second of requests that share a prefix, as with a common system prompt.

    All of a prompt is shared but its last sixteenth, at least one token.
    """
    import dataclasses

    workload = requests_of(llm, sizes)
    own = max(1, sizes.input_len // 16)
    prompts = tuple(workload.prompts[0][:-own] + prompt[-own:] for prompt in workload.prompts)
    return rate(llm, dataclasses.replace(workload, prompts=prompts))


def repeating_rate(llm: LLM, sizes: Sizes) -> float:
    """Return the prompt and output tokens per second of requests whose prompts repeat four tokens.

    N-gram drafts predict the outputs of such prompts.
    """
    import dataclasses

    workload = requests_of(llm, sizes)
    prompts = tuple((prompt[:4] * sizes.input_len)[: sizes.input_len] for prompt in workload.prompts)
    return rate(llm, dataclasses.replace(workload, prompts=prompts))


def ragged_rate(llm: LLM, sizes: Sizes) -> float:
    """Return the output tokens per second of sizes.num_prompts requests of very different lengths that arrive at once.

    They have at most sizes.context tokens each.
    """
    from jaxengine.bench.engine_run import run_workload

    done = run_workload(llm, _ragged(llm, sizes))
    return done.output_tokens / done.seconds


def static_rate(llm: LLM, sizes: Sizes) -> float:
    """Return the output tokens per second of requests of very different lengths that run in static batches.

    The next batch begins when the longest request of the previous one has ended. A batch has a quarter of the requests,
    at most max_num_seqs.
    """
    from jaxengine.bench.engine_run import run_static

    batch_size = llm.core.runner.config.max_num_seqs
    assert batch_size is not None
    seconds, tokens = run_static(llm, _ragged(llm, sizes), min(batch_size, max(1, sizes.num_prompts // 4)))
    return tokens / seconds


def _ragged(llm: LLM, sizes: Sizes) -> Workload:
    """Return sizes.num_prompts requests of very different lengths, of at most sizes.context tokens each."""
    from jaxengine.bench.workloads import ragged_trace

    return ragged_trace(sizes.num_prompts, llm.core.runner.vocab_size, sizes.context)


def first_seconds(llm: LLM, sizes: Sizes) -> float:
    """Return the seconds until a request of sizes.input_len random tokens has its first token, with an empty prefix
    cache.
    """
    from jaxengine.bench.engine_run import run_workload
    from jaxengine.bench.workloads import fixed_lengths

    (seconds,) = run_workload(llm, fixed_lengths(1, sizes.input_len, 2, llm.core.runner.vocab_size)).first_token_seconds
    return seconds


def longest_gap(llm: LLM, sizes: Sizes) -> float:
    """Return the longest pause, in milliseconds, between two outputs of a running request while long prompts arrive.

    The running request has a prompt of 4 tokens and generates 4 * sizes.output_len tokens; three prompts of 4 *
    sizes.input_len tokens arrive meanwhile. The wait for its first token does not count. Empties the prefix cache
    first, and runs until all requests have ended.
    """
    import time

    import numpy as np

    from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams

    core, runner = llm.core, llm.core.runner
    generator = np.random.default_rng(0)
    llm.reset_prefix_cache()

    def add(name: str, length: int, new: int) -> None:
        """Queue request `name`, which has `length` random prompt tokens and generates exactly `new` tokens."""
        params = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        prompt = generator.integers(0, runner.vocab_size, length).tolist()
        core.add(core.inputs.prepare({"prompt_token_ids": prompt}, params, request_id=name))

    add("stream", 4, 4 * sizes.output_len)
    arrivals = {sizes.output_len * turn for turn in (1, 2, 3)}
    count, last, gaps = 0, time.perf_counter(), []
    while core.has_unfinished:
        for output in core.step():
            if output.request_id == "stream":
                now = time.perf_counter()
                gaps, last, count = [*gaps, now - last], now, count + 1
                if count in arrivals:
                    add(f"prompt {count}", sizes.input_len * 4, 1)
    return max(gaps[1:]) * 1e3  # the first one is the time of the stream's own prompt


def kv_tokens(llm: LLM, sizes: Sizes) -> float:
    """Return the number of tokens that the pages of a replica hold. sizes: unused, for the signature of a measure."""
    plan = llm.core.runner.plan
    return float(plan.num_pages * plan.page_size)


GAINS: dict[str, Gain] = {
    "prefix-caching": Gain(
        "prefix caching, shared prompts",
        shared_prefix_rate,
        "tokens/s",
        {"enable_prefix_caching": False},
        {"enable_prefix_caching": True},
    ),
    "batching": Gain("continuous batching", ragged_rate, "output tokens/s", measure_base=static_rate),
    "chunked-prefill": Gain(
        "chunked prefill, longest pause of a stream",
        longest_gap,
        "ms",
        {"enable_chunked_prefill": False},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 64},
        smaller_is_better=True,
    ),
    "compiled": Gain(
        "steps compiled at start, first token",
        first_seconds,
        "s",
        {"enforce_eager": True, "compile_cache_dir": ""},
        {"enforce_eager": False},
        smaller_is_better=True,
        once=True,
    ),
    "drafts": Gain("n-gram drafts, repeating text", repeating_rate, "tokens/s", {}, {"speculative_config": NGRAM}),
    "int8": Gain("weights in int8", plain_rate, "tokens/s", {}, {"quantization": "int8"}),
    "kv-int8": Gain("keys and values in int8, speed", plain_rate, "tokens/s", {}, {"kv_cache_dtype": "int8"}),
    "kv-capacity": Gain(
        "keys and values in int8, capacity", kv_tokens, "tokens", POOL, {**POOL, "kv_cache_dtype": "int8"}
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, with `run` as the function that executes it."""
    add_model(parser)
    parser.add_argument("--only", nargs="+", choices=tuple(GAINS), metavar="GAIN", help=f"some of {', '.join(GAINS)}")
    parser.add_argument("--num-prompts", type=positive_int, default=32, help="requests of a run")
    parser.add_argument("--input-len", type=positive_int, default=128, help="prompt tokens of each request")
    parser.add_argument("--output-len", type=positive_int, default=32, help="new tokens of each request")
    parser.add_argument(
        "--num-runs", type=positive_int, default=2, help="runs of each engine, in turns; the best counts"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result there")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure the gains named in args.only, or all; print the table, write it to the --json file, and return 0.

    max_model_len is Sizes.context if it is not given. A gain whose options an engine refuses (ConfigError) becomes a
    row without figures whose unit is the reason. Other errors are raised, and then nothing is written. Prints progress
    to standard error.
    """
    from jaxengine.config.base.errors import ConfigError
    from jaxengine.results import table, write_json

    options = given_options(args, EngineConfig)
    sizes = Sizes(args.num_prompts, args.input_len, args.output_len)
    options.setdefault("max_model_len", sizes.context)
    rows: list[dict[str, Any]] = []
    for name in args.only or GAINS:
        print(f"{name}: {GAINS[name].name} ...", file=sys.stderr, flush=True)
        try:
            rows.append(compare(GAINS[name], options, sizes, args.num_runs))
        except ConfigError as error:
            rows.append({"gain": GAINS[name].name, "unit": f"not here: {error}"})
    columns = ("gain", "without", "with", "times", "unit")
    print(table([{column: row.get(column) for column in columns} for row in rows]))
    write_json(args.json, {"options": {key: str(value) for key, value in options.items()}, "gains": rows})
    return 0


def compare(gain: Gain, options: Mapping[str, Any], sizes: Sizes, num_runs: int) -> dict[str, Any]:
    """Measure one gain; return a row with the keys "gain", "without", "with", "times" and "unit".

    "without" and "with" are the best of `num_runs` figures each, or the only figures of a gain that is measured once;
    "times" says how many times better the second is, rounded to two decimals. A gain with its own measure of the base
    runs both on one engine; others run on two engines that are loaded at once and take turns. options: options of both
    engines; the gain's options replace them. The engines are shut down at the end, also after an error. Raises the
    errors of `LLM`, such as ConfigError for options that an engine refuses, and those of the gain's measures.
    """
    from jaxengine import LLM

    better = min if gain.smaller_is_better else max
    before: list[float] = []
    after: list[float] = []
    if gain.measure_base is not None:
        llm = LLM(**{**options, **gain.changed})
        try:
            for _ in range(num_runs):
                before.append(gain.measure_base(llm, sizes))
                after.append(gain.measure(llm, sizes))
        finally:
            llm.shutdown()
    else:
        engines: list[LLM] = []
        try:
            engines = [LLM(**{**options, **gain.base})]
            engines.append(LLM(**{**options, **gain.changed}))
            for _ in range(1 if gain.once else num_runs):
                for llm, figures in zip(engines, (before, after), strict=True):
                    figures.append(gain.measure(llm, sizes))
        finally:
            for llm in engines:
                llm.shutdown()
    base, changed = better(before), better(after)
    times = base / changed if gain.smaller_is_better else changed / base
    return {"gain": gain.name, "without": base, "with": changed, "times": round(times, 2), "unit": gain.unit}
