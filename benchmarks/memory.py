"""What an engine on a CPU holds, beside what its memory plan says: python -m benchmarks.memory [--json FILE].

Each engine runs in a process of its own, started twice, so that a start that compiles is seen and one that loads.
Real is the anonymous memory that is resident (RssAnon of /proc) after a full load: every slot taken, tokens drawn
with penalties and logprobs, prompts scored. Pages of files, which Linux drops and reads again as it likes, are told
beside it. Tells nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxengine.bench.report import machine, table, write_json

MIB = 2**20

# Llama's shape with 1 GiB of float32 weights.
LLAMA_1GIB = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3776,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--models", default="default,llama-1gib", help="default, llama-1gib, or folders and files")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the engine, as JSON")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(_measure_here(args.options)))
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shape = Path(folder) / "config.json"
        shape.write_text(json.dumps(LLAMA_1GIB))
        for name in args.models.split(","):
            options: dict[str, Any] = {"model": None if name == "default" else name, **args.options}
            if name == "llama-1gib":
                options |= {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True}
            rows += [{"model": name, **measure(options)} for _ in range(2)]
    print(table([_line(row) for row in rows]))
    write_json(args.json, {"rows": rows, "machine": machine()})
    return 0


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Serves a full load in a process of its own: the plan's bytes by purpose, what was held, and the start's kind."""
    command = [sys.executable, "-m", "benchmarks.memory", "--here", "--options", json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measure_here(options: dict[str, Any]) -> dict[str, Any]:
    from jaxengine import LLM, SamplingParams

    llm = LLM(**{"disable_log_stats": True, **options})
    runner = llm.core.engine.runner
    plan, config = runner.plan, runner.config
    # Every page is there from the start; full steps of both kinds and every branch of the sampler bring the rest.
    length = max(1, min(config.max_model_len // 2, 2 * config.max_num_batched_tokens // config.max_num_seqs))
    prompts = [
        {"prompt_token_ids": [(number * 7 + place) % 100 + 3 for place in range(length)]}
        for number in range(2 * config.max_num_seqs)
    ]
    params = [
        SamplingParams(
            max_tokens=min(8, config.max_model_len - length),
            temperature=1.0,
            top_p=0.9,
            presence_penalty=0.5,
            logprobs=2,
            prompt_logprobs=1 if number % 16 == 0 else None,
            ignore_eos=True,
        )
        for number in range(len(prompts))
    ]
    llm.generate(prompts, params, use_tqdm=False)
    return {
        **plan.parts,
        "planned": plan.planned,
        "real": _status("RssAnon"),
        "files": _status("RssFile"),
        "peak": _status("VmHWM"),
        "num_compiled": runner.num_compiled,
        "num_loaded": runner.num_loaded,
    }


def _status(name: str) -> int:
    """Bytes that Linux tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _line(row: dict[str, Any]) -> dict[str, Any]:
    names = ("weights", "programs", "kv_pages", "workspace", "process", "planned", "real", "files")
    return {
        "model": row["model"],
        "compiled": row["num_compiled"],
        **{f"{name} MiB".replace("_", " "): row[name] / MIB for name in names},
        "real / plan": row["real"] / row["planned"],
    }


if __name__ == "__main__":
    sys.exit(main())
