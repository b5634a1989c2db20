"""Memory that an engine on a CPU really holds, compared with its memory plan.

Each engine runs in a process of its own and is started twice, to see a start that compiles and one that loads compiled
programs. The real memory is the resident anonymous memory (RssAnon of /proc) after a full load: every slot taken,
tokens drawn with penalties and logprobs, prompts scored. Pages of files, which Linux may drop and read again, are
reported separately. Speed is not measured.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from argparse import Namespace
from typing import Any

from benchmarks.engines import write_config
from benchmarks.harness import Option
from benchmarks.processes import command, memory
from benchmarks.recorder import Recorder, Row
from jaxengine.results import table

MIB = 2**20

# Llama's shape with 1 GiB of float32 weights.
LLAMA_1GIB = (1024, 3776, 16, 16, 8, 32000, 4096)
OPTIONS = {
    "models": Option(("default", "llama-1gib"), "default, llama-1gib, or folders and files"),
    "options": Option({}, "options of the engine, as JSON", kind=json.loads),
}


def run(args: Namespace, recorder: Recorder) -> None:
    """Measure each model twice, with a start that compiles and one that loads, and print a table of the rows."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, LLAMA_1GIB, tie_word_embeddings=True)
        for name in args.models:
            options: dict[str, Any] = {"model": None if name == "default" else name, **args.options}
            if name == "llama-1gib":
                options |= {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True}
            for _ in range(2):
                recorder.add({"model": name, **measure(options)}, quiet=True)
    print(table([_line(row) for row in recorder.rows]))


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Serve a full load in a separate process; return the plan's bytes by purpose, the bytes held, and the numbers of
    compiled and loaded programs.

    options: of the engine. Raises CalledProcessError if the process fails.
    """
    done = subprocess.run(command(measure_here, options=options), stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_here(options: dict[str, Any]) -> None:
    """Start an engine, serve a full load in this process, and print its figures, bytes and counts, as JSON.

    options: of the engine.
    """
    from jaxengine import LLM, SamplingParams

    llm = LLM(**{"disable_log_stats": True, **options})
    runner = llm.core.engine.runner
    plan, config = runner.plan, runner.config
    # All pages are allocated at the start. Full steps of both kinds and every branch of the sampler allocate the rest.
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
    figures = {
        **plan.parts,
        "planned": plan.planned,
        "real": memory(kind="RssAnon"),
        "files": memory(kind="RssFile"),
        "peak": memory(kind="VmHWM"),
        "num_compiled": runner.num_compiled,
        "num_loaded": runner.num_loaded,
    }
    print(json.dumps(figures))


def _line(row: Row) -> Row:
    """Return the printed columns of a row, bytes in MiB."""
    names = ("weights", "programs", "kv_pages", "workspace", "process", "planned", "real", "files")
    return {
        "model": row["model"],
        "compiled": row["num_compiled"],
        **{f"{name} MiB".replace("_", " "): row[name] / MIB for name in names},
        "real / plan": row["real"] / row["planned"],
    }
