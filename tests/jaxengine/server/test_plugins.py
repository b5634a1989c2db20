"""A model family of a plugin behind HTTP: the engine's process and every API process load it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import httpx

from tests.jaxengine.checkpoint.test_plugins import REGISTERED, written


def test_a_plugins_model_is_served_by_several_processes(make_server, chat_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(chat_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"]}))
    file = written(tmp_path, "own_served.py", REGISTERED)
    server = make_server(fresh=True, model=str(folder), plugins=[file], api_server_count=2, enforce_eager=True)
    body = {"model": str(folder), "prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
    answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 2
    # Once in the engine's process and once in each API process.
    assert (tmp_path / "log").read_text() == "xxx"


def test_a_plugin_that_cannot_be_imported_ends_the_command_with_its_reason(chat_model, tmp_path):
    file = tmp_path / "own_broken.py"
    file.write_text("import own_nothing\n")
    words = ["generate", chat_model, "Hello", "--plugin", str(file), "--load-format", "dummy"]
    done = subprocess.run([sys.executable, "-m", "jaxengine", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"the plugin {file} cannot be imported: ModuleNotFoundError: " in done.stderr
    assert f"({file}, line 1)" in done.stderr and "Traceback" not in done.stderr
