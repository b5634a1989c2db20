"""Conversations in a KV pool that is a tenth of what they need: without tiers, with host memory, and with a folder.

All conversations have their first turn, then all their second, and so on, some requests at once, so that a pool in the
order of last use has nothing of a conversation left when it goes on. A row is one engine: `computed` tokens of prompts,
`needed` those that a pool that forgets nothing would compute, `ratio` the one by the other; bytes brought back and
stored; pages dropped because copies were too many; the time to the first token of all turns but the first; seconds of
the run; and `kept`, whether all tokens are those of the first row and nothing was compiled while serving. On a CPU the
host's memory is the device's: what is computed less is shown there, not what a copy to a device costs.
"""

from __future__ import annotations

import os
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
    "model": Option("", "a checkpoint; the default model if it is not given"),
    "hidden_size": Option(0, "of a Llama of eight layers that is measured instead, with dummy weights"),
    "conversations": Option(24),
    "turns": Option(10),
    "said": Option(24, "tokens that a user adds in each turn"),
    "answered": Option(8, "tokens of an answer"),
    "at_once": Option(2, "requests that run together"),
    "page_size": Option(16, "tokens of a page"),
    **shared(tiny=False),
}


def pages_of(args: Namespace) -> int:
    """Return the number of pages that all conversations take at their ends."""
    length = args.turns * (args.said + args.answered)
    return args.conversations * -(-length // args.page_size)


def talk(llm: LLM, args: Namespace) -> dict[str, Any]:
    """Run all turns of the conversations; return "texts" (token ids of each), "computed" (prompt tokens that the engine
    computed), "needed" (those that it had to compute even if it had kept all pages), "seconds", and "firsts" (seconds
    to the first token, of all turns but the first).
    """
    rng = np.random.default_rng(0)
    texts: list[list[int]] = [[] for _ in range(args.conversations)]
    params = SamplingParams(temperature=0, max_tokens=args.answered, ignore_eos=True, detokenize=False)
    firsts: list[float] = []
    computed = needed = 0
    start = time.monotonic()
    for turn in range(args.turns):
        for first in range(0, len(texts), args.at_once):
            own = texts[first : first + args.at_once]
            for text in own:
                # Tokens in full pages of the previous turn. The last token of an answer is never computed.
                written = max(0, len(text) - 1) // args.page_size * args.page_size
                text += rng.integers(100, 500 if not args.tiny else 128, args.said).tolist()
                needed += len(text) - written
            for text, output in zip(own, llm.generate([*map(list, own)], params, use_tqdm=False), strict=True):
                computed += len(text) - (output.num_cached_tokens or 0)
                if turn:
                    assert output.metrics is not None and output.metrics.time_to_first_token is not None
                    firsts.append(output.metrics.time_to_first_token)
                text += output.outputs[0].token_ids
    seconds = time.monotonic() - start
    return {"texts": texts, "computed": computed, "needed": needed, "seconds": seconds, "firsts": firsts}


def measure(name: str, args: Namespace, expected: Any, **tiers: Any) -> tuple[dict[str, Any], Any]:
    """Run the conversations on an engine with these tiers, whose pool has a tenth of the pages that all of them take,
    but room for those that run at once; return (row, token ids of each conversation).

    "kept" is whether nothing was compiled and the conversations equal `expected`, unless that is None. Numbers are
    rounded.
    """
    length = args.turns * (args.said + args.answered) + 1
    pages = max(pages_of(args) // 10, args.at_once * -(-length // args.page_size) + args.at_once)
    options = engine_options(
        dtype="float32", max_model_len=length, max_num_seqs=args.at_once, max_num_batched_tokens=64
    ) | {"block_size": args.page_size, "num_gpu_blocks_override": pages, "skip_tokenizer_init": True}
    options |= {"model": args.model} if args.model else {}
    options |= {"load_format": "dummy"} if args.hidden_size else {}
    with LLM(**options, **tiers) as llm:
        found = talk(llm, args)
        metrics = {each.name: each.value for each in llm.get_metrics() if "kv_offload" in each.name}
        texts, compiled = found.pop("texts"), llm.core.runner.compiles.count
    firsts = found["firsts"]  # none of a single turn
    row = {
        "tiers": name,
        "pool / need": round(pages / pages_of(args), 3),
        "computed": found["computed"],
        "needed": found["needed"],
        "ratio": round(found["computed"] / found["needed"], 3),
        "MB back": round(metrics.get("vllm:kv_offload_load_bytes", 0) / 1e6, 1),
        "MB stored": round(metrics.get("vllm:kv_offload_store_bytes", 0) / 1e6, 1),
        "dropped": metrics.get("jaxengine:kv_offload_dropped_pages", 0),
        "first token p50 ms": round(1e3 * float(np.median(firsts)), 1) if firsts else None,
        "p99 ms": round(1e3 * float(np.quantile(firsts, 0.99)), 1) if firsts else None,
        "seconds": round(found["seconds"], 1),
        "kept": compiled == 0 and (expected is None or texts == expected),
    }
    return row, texts


def run(args: Namespace, recorder: Recorder) -> None:
    if args.tiny:
        args.conversations, args.turns, args.said, args.answered, args.page_size = 4, 3, 9, 3, 4
    recorder.notes["load average"] = os.getloadavg()[0]  # of a machine that others may use
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as model:
        if args.hidden_size:
            write_config(model, (args.hidden_size, 3 * args.hidden_size, 8, 8, 8, 1024, 4096))
            args.model = model
        row, texts = measure("none", args, None)
        recorder.add(row)
        recorder.add(measure("host", args, texts, kv_offloading_size=4.0)[0])
        # Host memory for a few pages, so that most come from files.
        recorder.add(measure("disk", args, texts, kv_offloading_size=0.01, kv_offloading_path=folder)[0])
