"""examples/notebook.ipynb is a notebook, its commands are commands, and its code runs from top to bottom."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxengine.commands.cli import build_parser
from tests.conftest import WITHOUT_LLVMLITE
from tests.jaxengine.server.conftest import chat_model

__all__ = ["chat_model"]

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"
FAST = "--load-format dummy --dtype float32 --max-model-len 64 --max-num-seqs 1 --max-num-batched-tokens 64"
FAST += ' --compilation-config \'{"cudagraph_capture_sizes": [1], "prefill_sizes": [64]}\' --compile-cache-dir '


def cells() -> dict[str, dict]:
    return {cell["id"]: cell for cell in json.loads(NOTEBOOK.read_text())["cells"]}


def code_of(cell: dict) -> str:
    """Its code as Python: lines that begin with "!" are commands of a shell, in which {NAME} is a variable."""
    text = "".join(cell["source"])
    return re.sub(r"^!(.*)$", lambda line: f"shell({line[1]!r})", text, flags=re.M)


def test_it_is_a_notebook():
    """As nbformat 4.5 has it, without outputs."""
    found = json.loads(NOTEBOOK.read_text())
    assert set(found) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert {"name", "display_name"} <= set(found["metadata"]["kernelspec"])
    ids = [cell["id"] for cell in found["cells"]]
    assert len({*ids}) == len(ids) and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", each) for each in ids)
    for cell in found["cells"]:
        own = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert (
            cell["cell_type"] in ("code", "markdown") and set(cell) == {"cell_type", "id", "metadata", "source"} | own
        )
        assert not own or (cell["execution_count"], cell["outputs"]) == (None, [])
        assert all(line.endswith("\n") for line in cell["source"][:-1])


def test_its_commands_are_commands():
    parser, seen = build_parser(), []
    names = dict(line.split(" = ") for line in "".join(cells()["parameters"]["source"]).splitlines())
    for cell in cells().values():
        if cell["cell_type"] == "code":
            ast.parse(code_of(cell))
            for line in re.findall(r"^!jaxengine (.*)$", "".join(cell["source"]), re.M):
                words = re.sub(r"\{(\w+)\}", lambda name: ast.literal_eval(names[name[1]]), line)
                parser.parse_args(shlex.split(words))
                seen.append(words.split()[0])
    assert seen == ["plan", "generate", "report"]


@pytest.mark.thorough("it starts an engine and a server")
def test_its_code_runs(chat_model, executables_dir, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, words in (("jaxengine", "-m jaxengine"), ("python", "")):
        (bin / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (bin / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{NOTEBOOK.parents[1]}:{WITHOUT_LLVMLITE}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def shell(line: str) -> None:
        subprocess.run(line, shell=True, check=True, timeout=300)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"MODEL": chat_model, "OPTIONS": FAST + shlex.quote(executables_dir), "PORT": port}
    script = tmp_path / "notebook.py"
    left_out = {"install", "parameters"}
    own = [cell for cell in cells().values() if cell["cell_type"] == "code"]
    own = [code_of(cell) for cell in own if not left_out & {*cell["metadata"].get("tags", ())}]
    script.write_text("\n\n".join(own))
    space = runpy.run_path(str(script), {"shell": lambda line: shell(line.format(**given)), **given})
    shown = capfd.readouterr().out
    assert "CpuDevice(id=0)" in shown and "fits" in shown and "kernels.json" in shown
    assert (tmp_path / "jaxengine-report.zip").is_file() and space["server"].returncode == 0
