"""The file for a bug report: what is asked for is in it, and nothing secret."""

from __future__ import annotations

import json
import zipfile

from jaxengine.commands import report
from jaxengine.commands.cli import main
from jaxengine.runner.executables.verdicts import Verdicts


def test_report_has_every_part(tmp_path, tiny_model, capsys, monkeypatch):
    monkeypatch.setattr(report, "collected", lambda: iter(["== devices"]))  # of test_collect_env.py
    cache, steps = tmp_path / "cache", tmp_path / "steps"
    Verdicts(str(cache), ["digest", "0.10", "TPU v6e"]).end("matmul (tpu): float32[8, 8]", {"error": "is wrong"})
    steps.mkdir()
    for name in ("engine.json", "step-00000002.safetensors", "step-00000010.safetensors"):
        (steps / name).write_text(name)
    options = ["--compile-cache-dir", str(cache), "--record-steps", str(steps), "--hf-token", "hf_secret"]
    output = tmp_path / "out.zip"
    assert main(["report", tiny_model, *options, "--chips", "v6e", "-o", str(output)]) == 0
    with zipfile.ZipFile(output) as file:
        parts = {name: file.read(name).decode() for name in file.namelist()}
    found = json.loads(parts["kernels.json"])
    assert found[0]["environment"] == ["0.10", "TPU v6e"]
    assert found[0]["verdicts"] == {"matmul (tpu): float32[8, 8]": {"error": "is wrong"}}
    assert (
        parts["steps/step-00000010.safetensors"] == "step-00000010.safetensors"
        and "steps/step-00000002.safetensors" not in parts
    )
    assert "v6e" in parts["plan.txt"] and "weights" in parts["plan.txt"]
    assert json.loads(parts["options.json"])["hf_token"] == "(set)"
    assert "hf_secret" not in "".join(parts.values())
    assert "holds what users wrote" in capsys.readouterr().out
