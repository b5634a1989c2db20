"""Difference between a trainer's forward pass and the engine: log-probabilities of sampled tokens, bit by bit.

Of recorded checkpoints of each kind of layer: dense, experts, windows, latent attention, states. An engine samples
tokens in a batch, in chunks, in a small pool, and `jaxengine.rl.certify` compares their log-probabilities with those of
`get_logprobs` and of `jaxengine.rl.log_probs`, with rl_exact and without. A row has the numbers whose bits differ, and
the largest differences. `kept` says whether none differs with rl_exact.

A long run is cut by --budget-s, and --resume measures what the file that --save names lacks.
"""

from __future__ import annotations

import time
from argparse import Namespace
from itertools import product
from typing import Any

import numpy as np

from benchmarks.harness import Option, shared
from benchmarks.recorder import Recorder
from jaxengine import LLM, open_model
from jaxengine.rl import certify
from tests.fixtures.drawn_weights import checkpoint

FAMILIES = (
    *("llama", "olmo2", "cohere2", "gemma2", "gpt_oss"),
    *("qwen3_moe", "mixtral", "llama4", "deepseek_v3"),
    *("qwen3_next", "falcon_h1", "granite_hybrid", "lfm2"),
)
DTYPES = ("float32", "bfloat16")
OPTIONS = {
    "names": Option(FAMILIES, "folders of tests/fixtures/models"),
    "dtypes": Option(DTYPES),
    "modes": Option(("exact", "default")),
    "resume": Option(False, "keep the rows of the file"),
    **shared(budget_s=1e9),
}
# Little room, so that prompts come in chunks, and a pool so small that requests are preempted. Pages are as long as
# an engine's are by default, so that attention is machine code where jaxengine[cpu] is installed and heads allow it.
ENGINE = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 12,
    "block_size": 16,
    "num_gpu_blocks_override": 12,
    "compilation_config": {"cudagraph_capture_sizes": [4], "prefill_sizes": [12]},
    "disable_log_stats": True,
    "enforce_eager": True,
}


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Return seven prompts of 3 to 40 random tokens. The last one begins with 24 tokens of the second."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, size).tolist() for size in (3, 40, 17, 26, 9, 31)]
    return [*prompts, prompts[1][:24] + prompts[0]]


def run(args: Namespace, recorder: Recorder) -> None:
    """Certify each checkpoint, dtype and mode that has no row yet, and add a row. Stops at the recorder's deadline."""
    if args.resume:
        recorder.resume()
    known = {(row["family"], row["dtype"], row["rl_exact"]) for row in recorder.rows}
    for dtype, mode, name in product(args.dtypes, args.modes, args.names):
        if time.monotonic() > recorder.deadline:
            return
        if (name, dtype, mode == "exact") not in known:
            recorder.add(measured(name, dtype, mode == "exact"))


def measured(name: str, dtype: str, exact: bool) -> dict[str, Any]:
    """Certify one recorded checkpoint in a dtype, with or without rl_exact; return a row with the number of tokens, how
    many of their log-probabilities differ from those that the engine recomputes and from the trainer's, and the largest
    differences.

    name: of the checkpoint. "kept" is in the row only with rl_exact.
    """
    model = open_model(checkpoint(name), dtype=dtype)
    llm = LLM(str(checkpoint(name)), dtype=dtype, rl_exact=exact, **ENGINE)
    try:
        found = certify(llm, model, prompts_of(model.config.vocab_size))
    finally:
        llm.shutdown()
    row = {
        "family": name,
        "dtype": dtype,
        "rl_exact": exact,
        "tokens": found.num_tokens,
        "recomputed differ": found.rollout_recomputed.mismatches,
        "trainer differ": found.rollout_trainer.mismatches,
        "recomputed largest": float(f"{found.rollout_recomputed.largest:.2e}"),
        "largest": float(f"{found.rollout_trainer.largest:.2e}"),
    }
    return row | ({"kept": found.holds} if exact else {})
