"""Gaps between the tokens of streams while pages of other requests leave the devices and come back.

Some streams decode all the time. Next to them conversations take turns in a KV pool too small for all of them, so that
each turn brings pages back, or computes them, and evicts others. A row is one engine: median, 99th percentile and
maximum of the milliseconds between two tokens of a stream, each the median of several rounds; the bytes moved; and
`kept`, whether the streams' tokens are those of the first row and nothing was compiled. On a CPU the copies take
processor time from the steps, and the tiers are the same memory as the pool.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from argparse import Namespace
from typing import Any

import numpy as np

from benchmarks.engines import engine_options, write_config
from benchmarks.harness import Option, shared
from benchmarks.recorder import Recorder
from jaxengine import LLM, SamplingParams

OPTIONS = {
    "hidden_size": Option(256, "of the model, a Llama of eight layers"),
    "streams": Option(4, "streams whose gaps are measured"),
    "tokens": Option(200, "tokens of a stream in a round"),
    "conversations": Option(6, "conversations that take turns"),
    "length": Option(192, "tokens of a conversation"),
    "page_size": Option(16, "tokens of a page"),
    **shared(rounds=3, tiny=False),
}


class Traffic:
    """Streams and conversations of one engine. args: values of OPTIONS."""

    def __init__(self, llm: LLM, args: Namespace):
        self._core, self._args, self._numbers = llm.core, args, itertools.count()
        rng = np.random.default_rng(0)
        self._starts = rng.integers(100, 120, (args.streams, 8)).tolist()
        self._texts = rng.integers(100, 120, (args.conversations, args.length)).tolist()

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        """Add a greedy request that runs to max_tokens to the engine, and return its id."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        name = str(next(self._numbers))
        self._core.add(self._core.inputs.prepare({"prompt_token_ids": prompt}, params, request_id=name))
        return name

    def run(self) -> tuple[list[float], list[list[int]]]:
        """Run all streams to their ends, with one conversation at a time next to them.

        Returns (seconds between two tokens, of all streams; the token ids of each stream). The conversation that is
        running at the end is completed.
        """
        streams = {self._add(each, self._args.tokens): [] for each in self._starts}
        times: dict[str, list[float]] = {name: [] for name in streams}
        turns, talking = itertools.cycle(self._texts), ""
        while any(len(tokens) < self._args.tokens for tokens in streams.values()):
            if not talking:
                talking = self._add(next(turns), 2)
            output: Any
            for output in self._core.step():
                name, tokens = output.request_id, output.outputs[0].token_ids
                if name in streams and len(tokens) > len(streams[name]):
                    streams[name] = list(tokens)
                    times[name].append(time.perf_counter())
                elif name == talking and output.finished:
                    talking = ""
        while self._core.has_unfinished:
            self._core.step()
        return [gap for own in times.values() for gap in np.diff(own).tolist()], list(streams.values())


def measure(name: str, args: Namespace, expected: Any, **tiers: Any) -> tuple[dict[str, Any], Any]:
    """Measure an engine with these tiers; return its row and the tokens of its streams: the medians over rounds of the
    gaps' p50, p99 and maximum in milliseconds, the MB that tiers stored and gave back, and "kept", whether nothing was
    compiled and all tokens are equal.

    expected: tokens of another engine's streams that must be equal for "kept"; None to compare rounds with each other.
    Numbers are rounded.
    """
    length = max(args.tokens + 8, args.length + 2)
    held = args.streams * -(-(args.tokens + 8) // args.page_size)
    pages = held + 2 * -(-(args.length + 2) // args.page_size) + args.streams + 1
    options = engine_options(
        dtype="float32", max_model_len=length, max_num_seqs=args.streams + 1, max_num_batched_tokens=64
    ) | {"block_size": args.page_size, "num_gpu_blocks_override": pages, "skip_tokenizer_init": True}
    options |= {"model": args.folder, "load_format": "dummy"}
    with LLM(**options, **tiers) as llm:
        traffic = Traffic(llm, args)
        traffic.run()  # fills the tiers
        rounds = [traffic.run() for _ in range(args.rounds)]
        metrics = {each.name: each.value for each in llm.get_metrics() if "kv_offload" in each.name}
        compiled = llm.core.runner.compiles.count
    gaps = [[float(np.percentile(own, at)) for own, _ in rounds] for at in (50, 99, 100)]
    half, most, longest = (round(float(np.median(own)) * 1e3, 2) for own in gaps)
    tokens = [own for _, own in rounds]
    row = {
        "tiers": name,
        "gap p50 ms": half,
        "p99 ms": most,
        "longest ms": longest,
        "MB back": round(metrics.get("vllm:kv_offload_load_bytes", 0) / 1e6, 1),
        "MB stored": round(metrics.get("vllm:kv_offload_store_bytes", 0) / 1e6, 1),
        "kept": compiled == 0 and all(each == (expected or tokens[0]) for each in tokens),
    }
    return row, tokens[0]


def run(args: Namespace, recorder: Recorder) -> None:
    if args.tiny:
        args.streams, args.tokens, args.conversations, args.length, args.rounds = 2, 8, 3, 24, 1
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as args.folder:
        write_config(args.folder, (args.hidden_size, 3 * args.hidden_size, 8, 8, 8, 1024, 4096))
        row, tokens = measure("none", args, None)
        recorder.add(row)
        recorder.add(measure("host", args, tokens, kv_offloading_size=4.0)[0])
        # Host memory for a few pages, so that most come from files.
        recorder.add(measure("disk", args, tokens, kv_offloading_size=0.004, kv_offloading_path=folder)[0])
