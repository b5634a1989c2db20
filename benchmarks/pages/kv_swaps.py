"""Tokens of requests whose pages leave the devices and come back all the time, beside an engine whose pages stay.

Requests begin with one of 48 documents, which take six times the pages of the pool. Four run at once, too many for the
pool if their outputs are long: pages leave for host memory and come back, and requests are preempted by swap. Free
pages are filled with NaN, and so are allocated ones until they are written, and the states of slots without a request.
A row is a kind of page: `different` requests had other tokens than the engine without tiers computed; `hits` are prompt
tokens that came back. Each block of requests is written to the file of `--save`, and a run that was cut goes on after
the last one.
"""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import numpy as np

from benchmarks.engines import engine_options
from benchmarks.harness import Option, shared
from benchmarks.recorder import Recorder
from jaxengine import LLM
from tests.fixtures.drawn_weights import checkpoint
from tests.jaxengine.engine.offload_cases import Poisoned, params_of
from tests.jaxengine.engine.test_states import poison as poison_states

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {"num_gpu_blocks_override": 52}),
    "window": ("gemma2", {"num_gpu_blocks_override": 60}),
    "latent": ("deepseek_v2", {"num_gpu_blocks_override": 52}),
    "state": ("qwen3_next", {"num_gpu_blocks_override": 52, "num_state_snapshots": 8}),
}
OPTIONS = {
    "requests": Option(5000, "requests of each kind"),
    "block": Option(250, "requests between two writings of the file"),
    "kinds": Option(tuple(KINDS), "kinds of pages", choices=tuple(KINDS)),
    **shared(tiny=False),
}
_DOCUMENTS, _AT_ONCE = 48, 10


def prompts_of(block: int, count: int) -> list[list[int]]:
    """Return `count` prompts of a block: the beginning or all of a random document, then 1 to 7 random tokens.

    The same block number always gives the same prompts.
    """
    lengths = np.random.default_rng(0).integers(20, 37, _DOCUMENTS)
    documents = [np.random.default_rng(index).integers(3, 128, size) for index, size in enumerate(lengths)]
    rng = np.random.default_rng((1, block))
    prompts = []
    for index in rng.integers(_DOCUMENTS, size=count):
        document = documents[index][: rng.integers(16, 40)]
        prompts.append([*document.tolist(), *rng.integers(3, 128, rng.integers(1, 8)).tolist()])
    return prompts


class _Pair:
    """An engine with tiers whose free pages are NaN, and one without tiers. kind: key of KINDS."""

    def __init__(self, kind: str):
        """Start both engines. For pages of states, the states of free slots become NaN before every step."""
        model, own = KINDS[kind]
        common = engine_options(
            model=str(checkpoint(model)),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            block_size=4,
        )
        plain: dict[str, Any] = common | own | {"num_gpu_blocks_override": 400}
        tiers: dict[str, Any] = common | own | {"kv_offloading_size": 0.05, "preemption_mode": "swap"}
        self.plain, self.tiers = LLM(**plain), LLM(**tiers)
        self._poisoned = Poisoned(self.tiers)
        if kind == "state":
            step = self.tiers.core.step

            def poisoned_step() -> Any:
                poison_states(self.tiers)
                return step()

            self.tiers.core.step = poisoned_step

    def different(self, block: int, count: int) -> int:
        """Run a block's requests on both engines; return how many got different tokens."""
        prompts, max_tokens = prompts_of(block, count), 3 + block % 4 * 7
        params = [params_of(index, max_tokens) for index in range(count)]
        plain = self.plain.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        found = self._poisoned.run(prompts, _AT_ONCE, max_tokens)
        return sum(list(each.outputs[0].token_ids) != own for each, own in zip(plain, found, strict=True))

    def counts(self) -> dict[str, int]:
        """Return the totals of the engine with tiers so far: prefix cache hits in tokens, swapped requests, and
        compilations.
        """
        core, offload = self.tiers.core, self.tiers.core.engine.scheduler.extension("offload")
        return {
            "hits": offload.num_hits,
            "swapped": offload.num_by_mode["swap"],
            "compilations": core.runner.compiles.count,
        }


def run(args: Namespace, recorder: Recorder) -> None:
    """Compare each kind of page in blocks of requests; after each block update the kind's row with the totals."""
    if args.tiny:
        args.requests, args.block, args.kinds = 40, 20, ("full",)
    recorder.resume()
    for kind in args.kinds:
        row: dict[str, Any] | None = next((each for each in recorder.rows if each["kind"] == kind), None)
        row = row or {"kind": kind, "requests": 0, "different": 0, "hits": 0, "swapped": 0, "compilations": 0}
        if row["requests"] >= args.requests:
            continue
        pair = _Pair(kind)
        while row["requests"] < args.requests:
            before, start = pair.counts(), time.monotonic()
            count = min(args.block, args.requests - row["requests"])
            different = pair.different(row["requests"] // args.block, count)
            new = {name: value - before[name] for name, value in pair.counts().items()}
            seconds = time.monotonic() - start
            new |= {"requests": count, "different": different, "seconds": seconds}
            row = {"kind": kind} | {name: round(row.get(name, 0) + value, 1) for name, value in new.items()}
            row["kept"] = not row["different"] and not row["compilations"] and row["hits"] > 0 < row["swapped"]
            recorder.add(row, ("kind",))
        pair.plain.shutdown()
        pair.tiers.shutdown()
