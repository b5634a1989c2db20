"""The text for a bug report: complete, and without secrets."""

from __future__ import annotations

import os

from jaxengine import __version__
from jaxengine.commands.cli import main
from jaxengine.commands.collect_env import variables, without_home

GIVEN = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_a=1",
    "JAXENGINE_CACHE_DIR": "/cache",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_ENDPOINT": "https://me:word@hub.org/a",
    "HF_TOKEN": "hf_secret",
    "NVIDIA_API_KEY": "secret",
    "TPU_AUTH": "secret",
    "OTHER": "secret",
}


def test_variables_are_shown_without_secrets():
    assert list(variables(GIVEN)) == [
        "HF_ENDPOINT=https://...@hub.org/a",
        "HF_TOKEN=(set)",
        "JAXENGINE_CACHE_DIR=/cache",
        "JAX_PLATFORMS=cpu",
        "NVIDIA_API_KEY=(set)",
        "TOKENIZERS_PARALLELISM=false",
        "TPU_AUTH=(set)",
        "XLA_FLAGS=--xla_a=1",
    ]


def test_the_report_has_every_part(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    for part in (
        f"version: {__version__}",
        "Python: ",
        "platform: ",
        "jax: ",
        "backend: ",
        "device 0: ",
        "HF_TOKEN=(set)",
    ):
        assert part in out, part
    assert "hf_secret" not in out
    assert without_home(os.path.expanduser("~/a")) == "~/a"
