"""The whole engine with random weights of a real model's shape, and the share of time that the device idles between
steps.

`tokens_per_s` is of whole runs, prompts included. For the idle share all sequences decode: `step_ms` is the time of a
step in the engine's loop, `device_ms` that of the same compiled programs when they are dispatched again and again and
nobody reads their results. The difference is time in which the device waited for the host.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from typing import Any

from benchmarks.engines import engine_options, write_config
from benchmarks.harness import Option, shared
from benchmarks.kernels.attention import machine
from benchmarks.recorder import Recorder

LLAMA_8B = (4096, 14336, 32, 32, 8, 128256, 131072)
LLAMA_1B = (2048, 8192, 16, 32, 8, 128256, 131072)
TINY = (64, 96, 2, 4, 2, 256, 131072)
# Bytes of the large model's weights, and the share of the devices' memory that weights may take.
_BYTES_OF_8B, _MOST_WEIGHTS = 16.06e9, 0.7
OPTIONS = {
    "num_seqs": Option((), "sequences at once, the most telling first", kind=int),
    **shared(budget_s=1e9, tiny=False),
}


def run(args: Namespace, recorder: Recorder) -> None:
    """Start the engine, then measure each number of sequences; every result becomes a row. Skips rows of a resumed run.

    The engine is started again for a resumed run unless all rows exist. Numbers are rounded.
    """
    num_seqs = [*args.num_seqs] or ([2] if args.tiny else [64, 256, 1, 16, 128, 4])
    input_len, output_len, num_steps = (12, 6, 4) if args.tiny else (512, 128, 64)
    recorder.describe = machine
    recorder.resume()
    wanted = [f"{count} sequences" for count in num_seqs]
    if all(recorder.named(name) for name in ("start", *wanted)):
        return
    llm: Any = None

    def start() -> dict[str, Any]:
        """Start the engine and return a row with the seconds that took, its programs, and its memory."""
        import jax

        from jaxengine.runner.base.memory import device_memory

        nonlocal llm
        began = time.perf_counter()
        llm = make_llm(
            TINY if args.tiny else fitting(device_memory(jax.devices()[0])),
            num_seqs,
            input_len + output_len + 2 * num_steps,
        )
        runner = llm.core.runner
        return {
            "seconds": round(time.perf_counter() - began, 1),
            "steps": len(runner.buckets),
            "programs_compiled": runner.num_compiled,
            "programs_loaded": runner.num_loaded,
            "weights_GB": round(runner.plan.weights / 1e9, 2),
            "kv_tokens": runner.plan.num_pages * runner.plan.page_size,
        }

    # An engine does not outlive its process: a resumed run starts it again.
    recorder.rows = [row for row in recorder.rows if row["name"] != "start"]
    recorder.measure("start", start)
    for name, count in zip(wanted, num_seqs, strict=True):
        if llm is not None:
            recorder.measure(name, lambda n=count: measure(llm, n, input_len, output_len, num_steps))


def fitting(memory: int) -> tuple[int, ...]:
    """Return the sizes of the 8B model if its weights take less than 0.7 of `memory` bytes, of the 1B model
    otherwise.
    """
    return LLAMA_8B if _MOST_WEIGHTS * memory > _BYTES_OF_8B else LLAMA_1B


def make_llm(config: tuple[int, ...], num_seqs: list[int], max_model_len: int) -> Any:
    """Return an LLM with random weights and one decode program for each number of sequences in `num_seqs`.

    config: the model's sizes. It has no prefix cache, and the tiny model no compile cache.
    """
    from jaxengine import LLM

    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, config, rope_theta=500000.0)
        most = max(num_seqs)
        return LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            max_num_seqs=most,
            max_num_batched_tokens=max(64 if config is TINY else 8192, most),
            enable_prefix_caching=False,
            compile_cache_dir="" if config is TINY else None,
            **engine_options(tuple(sorted(num_seqs))),
        )


def measure(llm: Any, num_seqs: int, input_len: int, output_len: int, num_steps: int) -> dict[str, Any]:
    """Run `num_seqs` random prompts to their end, then time decode steps; return a row: output "tokens_per_s", the
    longest "first_token_ms", the milliseconds of the parts of a step, and what `idle` returns.

    input_len, output_len: tokens of each prompt and output. num_steps: decode steps to time. Numbers are rounded.
    """
    from jaxengine.bench.engine_run import run_workload
    from jaxengine.bench.workloads import fixed_lengths

    workload = fixed_lengths(num_seqs, input_len, output_len, llm.core.runner.vocab_size)
    done = run_workload(llm, workload)
    return {
        "tokens_per_s": round(done.output_tokens / done.seconds, 1),
        "first_token_ms": round(1e3 * max(done.first_token_seconds), 1),
        **{f"{part}_ms": ms for part, ms in done.timeline().items() if part != "steps"},
        **idle(llm, workload.prompts, num_steps),
    }


def idle(llm: Any, prompts: tuple[tuple[int, ...], ...], num_steps: int) -> dict[str, float]:
    """Time decode steps of all prompts in the engine's loop, then the last step repeated on the device alone.

    Returns "step_ms" and "device_ms", milliseconds per step, and "idle_percent", the share in which the device waited
    for the host, at least 0. num_steps: steps to time in each case. Replaces `runner.execute` meanwhile, and aborts the
    requests at the end. Numbers are rounded.
    """
    import jax

    from jaxengine.requests.params.sampling_params import SamplingParams

    core, runner = llm.core, llm.core.runner
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
    prepared = [core.inputs.prepare({"prompt_token_ids": list(prompt)}, params) for prompt in prompts]
    for each in prepared:
        core.add(each)
    last: list[Any] = []
    execute = runner.execute

    def watched(step: Any) -> Any:
        last[:] = [step]
        return execute(step)

    def step_alone() -> Any:
        pending = execute(last[0])
        runner.sample(pending)
        return pending

    def num_rows(step: Any) -> int:
        return int(runner.packer.layouts[step.bucket].view(step.buffer[0], "header")[0])

    runner.execute = watched
    try:
        while not (last and last[0].bucket.decode_only and num_rows(last[0]) == len(prompts)):
            core.step()
        for _ in range(3):  # the pipeline is full and its first results are read
            core.step()
        start = time.perf_counter()
        for _ in range(num_steps):
            core.step()
        step_s = (time.perf_counter() - start) / num_steps
        jax.block_until_ready(step_alone().sampled)
        start = time.perf_counter()
        for _ in range(num_steps):
            pending = step_alone()
        jax.block_until_ready(pending.sampled)
        device_s = (time.perf_counter() - start) / num_steps
    finally:
        runner.execute = execute
        for each in prepared:
            core.abort(each.request_id)
        while core.has_unfinished:
            core.step()
    return {
        "step_ms": round(step_s * 1e3, 3),
        "device_ms": round(device_s * 1e3, 3),
        "idle_percent": round(100 * max(0.0, 1 - device_s / step_s), 1),
    }
